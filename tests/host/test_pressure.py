"""A pool too small for everybody: preemption, swap, offload, windows. Pages of 4 tokens unless a test says otherwise."""

import dataclasses
import itertools

import pytest

from jaxpaged.errors import CapacityError
from jaxpaged.sampling_params import SamplingParams
from tests.host.beam_reference import beam_reference
from tests.host.fakes import Harness, beam_params, config, expect_lone, request


def params(max_tokens, **fields):
    return SamplingParams(max_tokens=max_tokens, **fields)


def saved(harness):
    return [pair for output in harness.outputs for pair in output.saves]


def restored(harness):
    return [pair for output in harness.outputs for pair in output.restores]


def test_the_latest_arrival_is_preempted_and_the_oldest_never():
    """R19: when page 4 is wanted and none is free, the younger of two gives way; its tokens are kept and computed again."""
    harness = Harness(num_pages=6)
    old = harness.add(request("old", 6, params(8)))
    young = harness.add(request("young", [7, 8, 9, 1, 2, 3], params(8)))
    victims = []
    while harness.scheduler.has_unfinished():
        known = young.sequences[0].token_ids[:]
        output = harness.step()
        victims += output.preempted
        if output.preempted:
            assert young.sequences[0].token_ids == known
            assert young.sequences[0].num_computed_tokens == 0 and harness.table(young) == []
    assert victims == [young.sequences[0].seq_id]
    expect_lone(old)
    expect_lone(young)
    harness.rest_check()


@pytest.mark.parametrize(
    "caching, mode, host", [(True, "recompute", 0), (False, "recompute", 0), (True, "swap", 40), (False, "swap", 3)]
)
@pytest.mark.parametrize("pipelined", [False, True])
def test_preempted_requests_lose_nothing(caching, mode, host, pipelined):
    """B16: pool of 10, four requests of 7 pages each: all tokens as alone, exactly 20, in under 400 steps; the first-ranked
    running request is never a victim; nobody evicts each other forever."""
    harness = Harness(
        num_pages=11, enable_prefix_caching=caching, preemption_mode=mode, num_host_pages=host, pipelined=pipelined
    )
    reqs = [harness.add(request(f"r{i}", [i + 1, 2, 3, 4, 5, 6], params(20), seed=i)) for i in range(4)]
    steps = 0
    while harness.scheduler.has_unfinished():
        running = [r.sequences[0].seq_id for r in reqs if not r.finished and harness.table(r)]
        output = harness.step()
        assert not running or running[0] not in output.preempted
        steps += 1
        assert steps < 400
    harness.run()
    assert harness.scheduler.stats().num_preemptions >= 1
    for req in reqs:
        expect_lone(req)
        assert len(req.sequences[0].generated_token_ids) == 20


def test_preempting_at_any_length_leaks_nothing():
    """B10: every prompt of 1 to 9 and every generated length of 1 to 9, preempted at that moment, then aborted."""
    for (prompt, generated), hit in itertools.product(itertools.product(range(1, 10), range(1, 10)), (False, True)):
        harness = Harness(num_pages=20)
        if hit:
            harness.add(request("warm", 5, params(1)))
            harness.run()
        harness.add(request("old", [11] * 3, params(16)))
        victim = harness.add(request("victim", prompt, params(20)))
        while len(victim.sequences[0].generated_token_ids) < generated:
            harness.step()
        harness.scheduler._running.preempt_last()
        harness.scheduler.check_integrity()
        assert harness.table(victim) == []
        harness.scheduler.abort("victim")
        harness.scheduler.check_integrity()
        harness.run()


def swapped_pair(host_pages, num_pages, **fields):
    """An old request that grows and a young one that is swapped out with exactly 8 written tokens."""
    harness = Harness(num_pages=num_pages, num_host_pages=host_pages, preemption_mode="swap", **fields)
    old = harness.add(request("old", 6, params(14)))
    young = harness.add(request("young", [9, 8, 7, 6, 5, 4], params(9)))
    return harness, old, young


def test_swap_moves_all_pages_and_brings_them_back():
    """R20: the whole group leaves (no device page is left) and comes back into other pages with the same content; nothing is
    computed twice."""
    harness, old, young = swapped_pair(8, 6)
    while not any(output.preempted for output in harness.outputs):
        harness.step()
    seq = young.sequences[0]
    assert harness.table(young) == [] and harness.scheduler.stats().num_swapped_seqs == 1
    assert [host for _, host in saved(harness)] == [0, 1]
    computed = seq.num_computed_tokens
    assert computed == 8
    harness.run()
    assert [host for host, _ in restored(harness)] == [0, 1]
    stats = harness.scheduler.stats()
    assert (stats.num_swapped_out_pages, stats.num_swapped_in_pages) == (2, 2)
    expect_lone(old)
    expect_lone(young)
    assert harness.device.num_written == 6 + 13 + 6 + 8  # every position written once


def test_a_swapped_group_waits_for_room_for_its_next_token():
    """B11: 8 tokens swapped out need 3 pages, two for what was written and one for the next token; at 2 they stay."""
    harness, _, young = swapped_pair(8, 6)
    while not any(output.preempted for output in harness.outputs):
        harness.step()
    harness.scheduler.abort("old")
    pool = harness.scheduler._kv.pool
    taken = [pool.allocate() for _ in range(3)]
    assert pool.num_available == 2 and young.sequences[0].num_computed_tokens == 8
    assert harness.step(check=False).scheduled == ()
    pool.release(taken.pop())
    output = harness.step(check=False)
    assert len(output.restores) == 2 and len(output.scheduled) == 1 and pool.num_available == 0
    pool.release_all(taken)
    harness.run()
    expect_lone(young)


def test_a_page_being_copied_is_not_handed_out_in_the_same_step():
    """A copies page 2, which it shares with its fork, to page 4. D's first sample wants a page for its own copy: the fork is
    preempted and page 2 is let go. All copies of a step run at once, so D may not copy into it; it waits for the next step."""
    harness = Harness(num_pages=5, enable_prefix_caching=False)
    a = harness.add(request("a", 6, params(3)))
    harness.step()
    d = harness.add(request("d", [11, 10], params(3, n=2)))
    harness.step()
    fork = harness.requests["fork"] = harness.scheduler.fork("a", "fork")
    assert [harness.table(a), harness.table(fork), harness.table(d, 0), harness.table(d, 1)] == [[1, 2], [1, 2], [3], [3]]
    output = harness.step()
    assert output.copies == ((2, 4),) and output.preempted == (fork.sequences[0].seq_id,)
    assert [row.seq_id for row in output.scheduled] == [a.sequences[0].seq_id]
    assert harness.step().copies == ((3, 2),)
    harness.run()
    expect_lone(a)
    expect_lone(d)


def test_without_host_room_a_group_is_recomputed():
    """B11: one host page for a group of four under pressure: recompute instead, all tokens right, a later request works."""
    harness = Harness(num_pages=12, num_host_pages=1, preemption_mode="swap", max_num_seqs=8)
    reqs = [harness.add(request(f"r{i}", [i + 1, 2, 3, 4, 5], params(6, n=4), seed=i)) for i in range(3)]
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 0
    later = harness.add(request("later", 6, params(6)))
    harness.run()
    for req in [*reqs, later]:
        expect_lone(req)


def test_the_mode_auto_swaps_groups_and_recomputes_single_sequences():
    """As in the paper: recompute for one sequence, swap for several that share pages; shared pages move once."""
    for n in (1, 2):
        harness = Harness(num_pages=9, num_host_pages=20, max_num_seqs=4)
        old = harness.add(request("old", 6, params(20)))
        young = harness.add(request("young", [9, 8, 7, 6, 5], params(12, n=n)))
        while True:
            tables = [harness.table(young, index) for index in range(n)]
            output = harness.step()
            if output.preempted:
                break
        assert len(output.preempted) == n
        assert [device for device, _ in output.saves] == ([] if n == 1 else list(dict.fromkeys(tables[0] + tables[1])))
        assert n == 1 or len(output.saves) < len(tables[0]) + len(tables[1])
        harness.run()
        expect_lone(old)
        expect_lone(young)


@pytest.mark.parametrize("pages", [6, 8, 11])
def test_samples_share_their_prompt_again_after_recompute(pages):
    """Three samples of a 12-token prompt need 3 shared pages and one each. All are preempted without a prefix cache; the first
    to return computes the prompt, the others wait for it and name its pages, so a pool of 6 suffices."""
    harness = Harness(num_pages=pages + 1, enable_prefix_caching=False, max_num_batched_tokens=64)
    young = harness.add(request("young", [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8, 7], params(5, n=3)))
    harness.step()
    harness.step()
    for _ in range(3):
        harness.scheduler._running.preempt_last()
    assert harness.scheduler.stats().num_used_pages == 0
    most = 0
    while not young.finished:
        harness.step()
        tables = [harness.table(young, index) for index in range(3)]
        assert len({tuple(table[:3]) for table in tables if table}) <= 1
        most = max(most, sum(len(table) > 0 for table in tables))
    assert most == 3
    harness.run()
    expect_lone(young)


def test_a_restored_sequence_owns_the_pages_it_was_restored_to():
    """B13: pool of 6, swap: a prompt is cached, its continuation is swapped out and back; then the prompt is served thrice."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    harness = Harness(num_pages=7, num_host_pages=10, preemption_mode="swap")
    warm = harness.add(request("warm", prompt, params(1)))
    harness.run()
    reqs = [
        harness.add(request("b", [9, 9, 8, 8, 7, 7, 6, 6], params(12))),
        harness.add(request("a", [*prompt, 3, 3], params(12))),
    ]
    harness.run()
    assert harness.scheduler.stats().num_swapped_in_pages > 0
    for i in range(3):
        reqs.append(harness.add(request(f"again{i}", prompt, params(1))))
        harness.run()
    for req in [warm, *reqs]:
        expect_lone(req)


def test_evicted_pages_come_back_from_the_host():
    """R21: only cached pages nobody names are moved; a later prompt finds them there and they return to fresh pages."""
    harness = Harness(num_pages=5, num_host_pages=6, offload_cached_pages=True)
    first = harness.add(request("first", 9, params(1)))
    harness.run()
    other = harness.add(request("other", [11] * 13, params(1)))
    harness.run()
    assert len(saved(harness)) == 2 and not any(output.preempted for output in harness.outputs)
    again = harness.add(request("again", 9, params(3)))
    harness.run()
    assert again.sequences[0].num_cached_tokens == 8 and len(restored(harness)) == 2
    for req in (first, other, again):
        expect_lone(req)


def test_offloaded_pages_are_bounded_and_give_way():
    """R20, R21: with room for two host pages the oldest offloaded page is forgotten; results stay right."""
    harness = Harness(num_pages=5, num_host_pages=2, offload_cached_pages=True, preemption_mode="swap")
    reqs = []
    for i in range(6):
        reqs.append(harness.add(request(f"r{i}", [1 + i % 3] * 9, params(5), seed=i)))
        harness.run()
    assert {host for _, host in saved(harness)} == {0, 1}
    for req in reqs:
        expect_lone(req)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_any_pool_gives_the_same_tokens(page_size, mode):
    """From the smallest pool that admits the largest request up: same tokens as alone, all pages back at the end."""
    smallest = 2 * -(-13 // page_size) + 1
    for num_pages in (smallest, smallest + 1, 2 * smallest, 6 * smallest):
        harness = Harness(
            page_size=page_size,
            num_pages=num_pages,
            num_host_pages=smallest,
            preemption_mode=mode,
            pipelined=num_pages % 2 == 1,
        )
        reqs = [harness.add(request(f"r{i}", [1 + i, 2, 3, 4][: 1 + i % 4], params(10, n=1 + i % 2), seed=i)) for i in range(5)]
        harness.run()
        for req in reqs:
            expect_lone(req)


def test_totals_count_every_token_once():
    """B58: with preemptions, aborts, a refusal, samples, beams and cache hits: prompts count once per request, tokens as
    returned, no total ever falls, and at rest every gauge is 0."""
    harness = Harness(num_pages=11)
    reqs = [harness.add(request(f"r{i}", [i + 1, 2, 3, 4, 5, 6], params(20), seed=i)) for i in range(4)]
    reqs += [harness.add(request(f"n{i}", [1, 2, 3, 4, 5, 6], params(4, n=2))) for i in range(2)]
    reqs.append(harness.add(request("beam", [1, 2, 3, 4, 9], beam_params(2, 4))))
    with pytest.raises(CapacityError):
        harness.scheduler.add(request("big", 40, params(20)))
    totals = [name for name in dataclasses.asdict(harness.scheduler.stats()) if not name.endswith(("seqs", "pages", "slots"))]
    before = dict.fromkeys(totals, 0)
    steps = 0
    while harness.scheduler.has_unfinished():
        harness.step()
        steps += 1
        if steps in (3, 30):
            harness.scheduler.abort("r0" if steps == 3 else "r3")
        now = dataclasses.asdict(harness.scheduler.stats())
        assert all(now[name] >= before[name] for name in totals)
        before = {name: now[name] for name in totals}
    harness.rest_check()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.num_cached_tokens > 0
    assert stats.num_prompt_tokens == sum(len(req.prompt_token_ids) for req in reqs)
    assert stats.num_generated_tokens == sum(len(seq.generated_token_ids) for req in reqs for seq in req.sequences)
    assert all(req.sequences[0].num_cached_tokens < len(req.prompt_token_ids) for req in reqs)
    assert all(seq.finished for req in reqs for seq in req.sequences)


# --- sliding windows ---------------------------------------------------------------------------------------------------


def test_pages_wholly_behind_the_window_are_given_back():
    """Window 6: position p sees p - 5 to p. After position 8 is written the next query, 9, sees 4 to 9: page 0 (0 to 3) goes;
    one token earlier it is still seen."""
    harness = Harness(sliding_window=6)
    req = harness.add(request("a", 7, params(12)))
    harness.step()
    assert harness.table(req) == [1, 2]
    harness.step()
    assert harness.table(req) == [1, 2]  # 8 written: query 8 sees 3
    harness.step()
    assert harness.table(req) == [0, 2, 3]  # 9 written: query 9 sees 4 and later
    harness.run()
    expect_lone(req)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 50])
@pytest.mark.parametrize("budget", [1, 3, 16])
def test_windows_of_any_size_and_chunks_of_any_size(window, budget):
    """The device checks each position a query may see; prefix hits, samples and a tight pool do not change that."""
    harness = Harness(sliding_window=window, max_num_batched_tokens=budget, num_pages=12, max_num_seqs=6)
    reqs = []
    for i in range(4):
        reqs.append(harness.add(request(f"r{i}", 10 + i, params(8, n=1 + (i == 3)), seed=i)))
        harness.step()
    harness.run()
    for req in reqs:
        expect_lone(req)


def test_a_window_bounds_what_a_request_needs():
    """Worst-case need of a 60-token sequence under a window of 8: 3 pages of 4, not 15; it runs in a pool of 3."""
    harness = Harness(sliding_window=8, num_pages=4)
    req = harness.add(request("a", 20, params(40)))
    most = 0
    while harness.scheduler.has_unfinished():
        harness.step()
        most = max(most, harness.scheduler.stats().num_used_pages)
    assert most == 3
    expect_lone(req)


def test_pages_shared_under_a_window_are_freed_once():
    """B07: window 8, a prompt of 14, three samples to 24 tokens; also as beams: no page is freed twice."""
    harness = Harness(cfg=config(sliding_window=8, num_pages=30, max_num_seqs=8))
    samples = harness.add(request("s", [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], params(10, n=3)))
    beams = harness.add(request("b", [9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 2, 3, 4, 5], beam_params(3, 10, ignore_eos=True)))
    harness.run()
    expect_lone(samples)
    want = beam_reference(beams.prompt_token_ids, width=3, max_tokens=10, stop_ids=())
    assert [seq.generated_token_ids for seq in beams.sequences] == [tokens for tokens, _, _ in want]
