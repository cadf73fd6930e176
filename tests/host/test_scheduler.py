"""The scheduler step by step, with literal page ids: pages of 4 tokens, ids 1 to 10, budget 16 unless a test says otherwise."""

import json

import pytest

from jaxpaged.errors import CapacityError, InvalidRequestError
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.host.fakes import EOS, Harness, chains, draw, expect_lone, request


def params(max_tokens, **fields):
    return SamplingParams(max_tokens=max_tokens, **fields)


def rows(output):
    return [(row.num_computed_tokens, row.num_tokens) for row in output.scheduled]


# --- one sequence ------------------------------------------------------------------------------------------------------


def test_pages_are_taken_on_need():
    """R3: a 6-token prompt holds 2 pages; token 9 takes the third; never more than ceil(written / 4)."""
    harness = Harness()
    req = harness.add(request("a", 6, params(5)))
    output = harness.step()
    row = output.scheduled[0]
    assert (row.table_start, row.page_ids, row.from_device) == (0, (1, 2), False)
    assert output.samples == ((row.seq_id, 0),)
    for written, table, change in [(7, [1, 2], (2, ())), (8, [1, 2], (2, ())), (9, [1, 2, 3], (2, (3,)))]:
        row = harness.step().scheduled[0]
        assert harness.table(req) == table and (row.table_start, row.page_ids) == change
        assert row.num_computed_tokens + row.num_tokens == written
        stats = harness.scheduler.stats()
        assert stats.num_wasted_slots == len(table) * 4 - written < 4
    assert harness.step().scheduled[0].num_computed_tokens == 9
    assert req.finished and harness.table(req) == []
    harness.rest_check()
    expect_lone(req)


def test_a_long_prompt_is_computed_in_chunks():
    harness = Harness(max_num_batched_tokens=8)
    req = harness.add(request("a", 20, params(2)))
    assert [rows(harness.step()) for _ in range(3)] == [[(0, 8)], [(8, 8)], [(16, 4)]]
    assert [len(output.samples) for output in harness.outputs] == [0, 0, 1]
    harness.run()
    expect_lone(req)


def test_the_next_step_runs_on_the_token_that_is_still_on_the_device():
    """Pipelining: the next step is planned before the token is known; the plan after the last token schedules nothing."""
    harness = Harness(pipelined=True)
    req = harness.add(request("a", 6, params(3)))
    for start, from_device in [(0, False), (6, True), (7, True)]:
        row = harness.dispatch().scheduled[0]
        assert (row.num_computed_tokens, row.from_device) == (start, from_device)
        if start:
            harness.collect()
    assert harness.dispatch().scheduled == ()  # three tokens are known or in flight: the limit
    harness.run()
    expect_lone(req)
    assert req.sequences[0].num_inflight_tokens == 0


def test_a_row_planned_past_the_end_is_ignored():
    """The token turns out to be EOS after the next step was planned: its row's sample is dropped, its pages are free."""
    harness = Harness(pipelined=True)
    req = harness.add(request("a", 6, params(8), eos={EOS}))
    harness.dispatch(forced={req.sequences[0].seq_id: EOS})
    assert len(harness.dispatch().scheduled) == 1
    assert harness.collect() == [req] and req.sequences[0].finish_reason is FinishReason.STOP
    assert harness.scheduler.stats().num_used_pages == 0
    assert harness.collect() == []
    assert req.sequences[0].generated_token_ids == [EOS]
    harness.rest_check()


def test_synchronous_and_pipelined_steps_give_the_same_tokens():
    outcomes = []
    for pipelined in (False, True):
        harness = Harness(pipelined=pipelined, num_pages=14)
        reqs = [
            harness.add(request(f"r{i}", 3 + 2 * i, params(9, n=1 + i % 2), eos={EOS}, seed=i, arrival=i)) for i in range(6)
        ]
        harness.run()
        outcomes.append([seq.token_ids for req in reqs for seq in req.sequences])
    assert outcomes[0] == outcomes[1]


def test_equal_calls_give_equal_plans():
    """Plans are data: two runs of the same requests print the same JSON."""
    printed = []
    for _ in range(2):
        harness = Harness(num_pages=11)
        for i in range(4):
            harness.add(request(f"r{i}", 6, params(7, n=1 + i % 3), seed=i, arrival=i))
        harness.run()
        printed.append(json.dumps([[o.step, o.scheduled, o.samples, o.copies, o.preempted] for o in harness.outputs]))
    assert printed[0] == printed[1]


# --- ends --------------------------------------------------------------------------------------------------------------


def test_stop_before_length():
    """B34: EOS as the last allowed token is reported as "stop"; without it "length"."""
    for token, reason in ((EOS, FinishReason.STOP), (5, FinishReason.LENGTH)):
        harness = Harness()
        req = harness.add(request("a", 3, params(1), eos={EOS}))
        harness.step(forced={req.sequences[0].seq_id: token})
        assert req.sequences[0].finish_reason is reason and req.sequences[0].stop_reason is None


def test_which_tokens_stop():
    """B34: every EOS id ends a sequence; ``ignore_eos`` lets them pass but not an explicit stop token."""
    for fields, token, reason, stop in [
        ({}, 2, "stop", None),
        ({}, 7, "stop", None),
        ({"ignore_eos": True}, 7, None, None),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, 7, "stop", 7),
        ({"stop_token_ids": (9,)}, 9, "stop", 9),
    ]:
        harness = Harness()
        req = harness.add(request("a", 3, params(8, **fields), eos={2, 7}))
        harness.step(forced={req.sequences[0].seq_id: token})
        assert (req.sequences[0].finish_reason, req.sequences[0].stop_reason) == (reason, stop)
        assert req.sequences[0].generated_token_ids == [token]


def test_length_limits():
    """B15: prompt and output together have at most max_model_len tokens; the last token needs no slot."""
    harness = Harness(max_model_len=16)
    for length in (16, 17):
        with pytest.raises(InvalidRequestError, match=f"got {length} tokens, wants at most 15"):
            harness.scheduler.add(request("long", length))
    assert not harness.scheduler.has_unfinished()
    for length, max_tokens, tokens, pages in [(15, 100, 1, 4), (12, 100, 4, 4), (8, 1, 1, 2)]:
        req = harness.add(request(f"r{length}", length, params(max_tokens)))
        most = 0
        while not req.finished:
            harness.step()
            most = max(most, len(harness.device.rows[req.sequences[0].seq_id].pages))
        assert len(req.sequences[0].generated_token_ids) == tokens and most == pages
        assert req.sequences[0].finish_reason is FinishReason.LENGTH
    harness.rest_check()


def test_a_broken_row_fails_its_request_only():
    """Non-finite logits: all samples of that request end in ERROR and give back their pages, others go on."""
    harness = Harness()
    bad = harness.add(request("bad", 6, params(8, n=2)))
    good = harness.add(request("good", 6, params(8)))
    harness.step()
    harness.device.broken.add("bad")
    harness.step()
    assert [seq.finish_reason for seq in bad.sequences] == [FinishReason.ERROR] * 2
    harness.run()
    expect_lone(good)


def test_logprobs_are_kept_as_asked():
    harness = Harness()
    plain = harness.add(request("plain", 3, params(3)))
    top = harness.add(request("top", 3, params(3, logprobs=2)))
    harness.run()
    assert [extra for _, extra in plain.sequences[0].logprobs] == [()] * 3
    assert all(len(extra) == 2 and extra[0][1] >= extra[1][1] for _, extra in top.sequences[0].logprobs)
    assert sum(logprob for logprob, _ in top.sequences[0].logprobs) == pytest.approx(top.sequences[0].cumulative_logprob)


# --- several samples ---------------------------------------------------------------------------------------------------


def test_samples_share_the_prompt_and_copy_one_page_each():
    """R8, R9, B08: a 6-token prompt with n = 3 is computed once into pages 1 and 2; both are named three times. At the first
    own tokens two samples copy page 2 (to 3 and 4); the last one writes in place. Page 1 stays shared."""
    harness = Harness()
    req = harness.add(request("a", 6, params(8, n=3), seed=5))
    output = harness.step()
    ids = [seq.seq_id for seq in req.sequences]
    assert rows(output) == [(0, 6)] and output.samples == tuple((i, 0) for i in ids)
    assert [harness.table(req, i) for i in range(3)] == [[1, 2]] * 3
    stats = harness.scheduler.stats()
    assert (stats.num_used_pages, stats.num_logical_pages, stats.num_wasted_slots) == (2, 6, 2)
    output = harness.step()
    assert output.copies == ((2, 3), (2, 4))
    assert [harness.table(req, i) for i in range(3)] == [[1, 3], [1, 4], [1, 2]]
    assert [(row.table_start, row.page_ids) for row in output.scheduled] == [(1, (3,)), (0, (1, 4)), (0, (1, 2))]
    assert harness.scheduler._kv.pool.ref_cnt[1] == 3
    assert 2 not in harness.scheduler._kv.cache.index.key_of
    harness.run()
    assert harness.scheduler.stats().num_page_copies == 2
    expect_lone(req)


def test_nothing_is_copied_when_the_prompt_ends_on_a_page_edge():
    """R9, R10: full pages are shared for good; the samples' tails are pages of their own."""
    harness = Harness()
    req = harness.add(request("a", 8, params(8, n=3)))
    harness.step()
    harness.step()
    assert [harness.table(req, i) for i in range(3)] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    harness.run()
    assert harness.scheduler.stats().num_page_copies == 0
    expect_lone(req)


def test_samples_decode_without_waiting_for_the_host():
    """Pipelined: all samples run from the device right after the prompt."""
    harness = Harness(pipelined=True)
    req = harness.add(request("a", 6, params(4, n=2)))
    harness.dispatch()
    output = harness.dispatch()
    assert [(row.num_computed_tokens, row.from_device) for row in output.scheduled] == [(6, True)] * 2
    harness.run()
    expect_lone(req)


def test_a_request_takes_seats_for_all_its_samples():
    """A request with n samples is admitted when n rows are left, so a step never samples more than max_num_seqs."""
    harness = Harness(max_num_seqs=4, num_pages=40)
    reqs = [harness.add(request(f"r{n}{i}", 5, params(6, n=n))) for i, n in enumerate((2, 3, 1))]
    assert len(harness.step().scheduled) == 1
    harness.run()
    for req in reqs:
        expect_lone(req)
    assert max(len(output.samples) for output in harness.outputs) <= 4


# --- order -------------------------------------------------------------------------------------------------------------


def test_first_come_first_served_or_by_priority():
    """R19: admission in order of arrival, or of priority and then arrival."""
    for policy, order in (("fcfs", "abc"), ("priority", "cab")):
        harness = Harness(max_num_seqs=1, policy=policy)
        reqs = {
            name: harness.add(request(name, 3, params(2), priority=priority))
            for name, priority in (("a", 1), ("b", 1), ("c", 0))
        }
        first_rows = []
        while harness.scheduler.has_unfinished():
            row = harness.step().scheduled[0]
            if row.num_computed_tokens == 0:
                first_rows.append(next(n for n, r in reqs.items() if r.sequences[0].seq_id == row.seq_id))
        assert "".join(first_rows) == order


def test_the_head_of_the_queue_is_not_overtaken():
    """No starvation: while the first waiting request finds no room, later and smaller ones wait too."""
    harness = Harness(num_pages=7)
    harness.add(request("a", 12, params(8)))  # 3 pages of 6 now
    harness.add(request("b", 14, params(2)))  # wants 4
    harness.add(request("c", 2, params(2)))
    assert len(harness.step().scheduled) == 1
    assert harness.scheduler.stats().num_waiting_seqs == 2
    harness.run()


def test_a_long_prompt_starves_nobody():
    """B18: budget 8; while a 40-token prompt is computed, a decoding sequence gets a token in every step and a newcomer of
    3 tokens starts at once."""
    harness = Harness(max_num_batched_tokens=8, num_pages=40)
    decoding = harness.add(request("r0", 3, params(30)))
    harness.step()
    harness.add(request("r1", 40, params(4)))
    newcomer = harness.add(request("r2", 3, params(4)))
    for step in range(1, 12):
        output = harness.step()
        assert len(decoding.sequences[0].generated_token_ids) == step + 1
        assert output.num_tokens == 8 or step > 6
        if step == 1:
            assert rows(output) == [(3, 1), (0, 4), (0, 3)]
            assert newcomer.sequences[0].num_generated_tokens == 1
    harness.run()


def test_the_budget_nobody_wants_goes_to_the_long_prompt():
    """A capped chunk grows again when those it left room for need less."""
    harness = Harness(max_num_batched_tokens=16, num_pages=40)
    harness.add(request("long", 40, params(2)))
    harness.add(request("short", 2, params(2)))
    assert rows(harness.step()) == [(0, 14), (0, 2)]


# --- what can never be, and what cannot be now -------------------------------------------------------------------------


def test_what_never_fits_is_refused_with_both_numbers():
    """B14: pool of 4 pages; 20 tokens need 5 or more. The small request behind it is served."""
    harness = Harness(num_pages=5)
    with pytest.raises(CapacityError, match=r"may need 6 pages .* but the pool has 4"):
        harness.scheduler.add(request("big", 20, params(4)))
    with pytest.raises(CapacityError, match=r"may need 13 pages"):
        harness.scheduler.add(request("grows", 10, params(40)))
    with pytest.raises(CapacityError, match=r"may need 7 pages of 4 tokens \(3 x 11 tokens sharing the prompt's full pages\)"):
        harness.scheduler.add(request("wide", 6, params(6, n=3)))
    small = harness.add(request("small", 4, params(4)))
    harness.run()
    expect_lone(small)


def test_more_samples_than_rows_are_refused():
    """B14: n above max_num_seqs is refused by name; it would never be admitted."""
    harness = Harness(max_num_seqs=2)
    with pytest.raises(InvalidRequestError, match="n or best_of: got 4, wants at most max_num_seqs = 2"):
        harness.scheduler.add(request("n", 4, params(4, n=4)))
    with pytest.raises(InvalidRequestError, match="beam_width: got 3"):
        harness.scheduler.add(request("b", 4, BeamSearchParams(beam_width=3, max_tokens=2)))


def test_refused_requests():
    harness = Harness()
    with pytest.raises(InvalidRequestError, match="prompt: got no tokens"):
        harness.scheduler.validate(request("empty", ()))
    with pytest.raises(InvalidRequestError, match="max_tokens: got 0"):
        harness.scheduler.validate(request("zero", 3, max_tokens=0))
    harness.add(request("twice", 3))
    with pytest.raises(InvalidRequestError, match="'twice', which a live request has"):
        harness.scheduler.add(request("twice", 3))
    harness.run()


def test_an_id_can_be_used_again_at_once():
    """B20: add x, abort x, add x: the second is served whole, the first's step in flight touches nothing."""
    harness = Harness(pipelined=True)
    first = harness.add(request("x", 6, params(8), seed=1))
    harness.dispatch()
    harness.dispatch()
    assert harness.scheduler.abort("x") is first
    assert harness.scheduler.abort("x") is None
    assert first.sequences[0].finish_reason is FinishReason.ABORT and harness.scheduler.stats().num_used_pages == 0
    second = harness.add(request("x", 6, params(8), seed=2))
    harness.run()
    assert first.sequences[0].generated_token_ids == []
    expect_lone(second)


def test_abort_while_queued_in_chunks_and_before_the_fork():
    for steps in range(4):
        harness = Harness(max_num_batched_tokens=4)
        harness.add(request("a", 10, params(4, n=3)))
        other = harness.add(request("b", 3, params(3)))
        for _ in range(steps):
            harness.step()
        harness.scheduler.abort("a")
        harness.scheduler.check_integrity()
        harness.run()
        expect_lone(other)


# --- user-level forks --------------------------------------------------------------------------------------------------


def test_a_fork_shares_pages_and_draws_its_own_tokens():
    """The fork has the tokens so far, names the same pages, and runs its last token again; whoever writes first copies."""
    harness = Harness()
    req = harness.add(request("a", 5, params(9)))
    harness.step()
    harness.step()
    child = harness.scheduler.fork("a", "b", seed=77)
    harness.requests["b"] = child
    base = child.sequences[0].token_ids[:]
    assert base == req.sequences[0].token_ids and len(base) == 7
    assert harness.table(child) == harness.table(req) == [1, 2]
    output = harness.step()
    assert rows(output) == [(6, 1), (6, 1)] and output.copies == ((2, 3),)
    harness.run()
    expect_lone(req)
    value = chains(base)[-1]
    assert child.sequences[0].token_ids[7] == draw(value, 77, 0)
    assert child.sequences[0].num_prompt_tokens == 5 and len(child.sequences[0].generated_token_ids) == 9


def test_a_fork_never_shares_a_page_the_original_has_filled():
    """Its last token would be written into a page that can be found; the fork computes that page's tokens itself."""
    harness = Harness()
    harness.add(request("a", 7, params(9)))
    harness.step()
    harness.step()  # 8 tokens written: pages 1 and 2 are full
    child = harness.scheduler.fork("a", "b")
    harness.requests["b"] = child
    assert harness.table(child) == [1, 2]  # 9 tokens known: position 8 starts a page
    harness.scheduler.abort("b")
    harness.requests.pop("b")
    harness = Harness(pipelined=True)
    harness.add(request("a", 7, params(9)))
    harness.dispatch()
    harness.dispatch()
    harness.collect()  # 8 tokens known, position 7 in flight: page 2 is being filled
    child = harness.scheduler.fork("a", "b")
    harness.requests["b"] = child
    assert harness.table(child) == [1]
    harness.run()


def test_forks_that_cannot_be():
    harness = Harness()
    harness.add(request("a", 5, params(3)))
    harness.add(request("beam", 3, BeamSearchParams(beam_width=2, max_tokens=2)))
    fork = harness.scheduler.fork
    for call, words in [
        (lambda: fork("nobody", "b"), "request_id: got 'nobody'"),
        (lambda: fork("a", "a"), "a live request has"),
        (lambda: fork("a", "b", index=1), "index: got 1"),
        (lambda: fork("beam", "b"), "beam search"),
        (lambda: fork("a", "b", params=params(3, n=2)), "n: got 2, wants 1"),
    ]:
        with pytest.raises(InvalidRequestError, match=words):
            call()
    harness.run()


# --- pinned beginnings -------------------------------------------------------------------------------------------------


def test_a_pinned_beginning_outlives_pressure():
    """R13: 10 tokens pin two full pages; computed once, they are found again however much else ran in between."""
    harness = Harness(num_pages=7)
    prefix = tuple(range(1, 11))
    assert harness.scheduler.pin_prefix(prefix) == 2
    harness.add(request("warm", prefix, params(1)))
    harness.run()
    for i in range(5):
        harness.add(request(f"other{i}", [11 - i] * 9, params(4)))
        harness.run()
    again = harness.add(request("again", [*prefix, 3, 4], params(2)))
    harness.run()
    assert again.sequences[0].num_cached_tokens == 8
    expect_lone(again)
    harness.scheduler.unpin_prefix(prefix)
    for i in range(3):
        harness.add(request(f"more{i}", [9 - i] * 15, params(8)))
        harness.run()
    gone = harness.add(request("gone", [*prefix, 3, 4], params(2)))
    harness.run()
    assert gone.sequences[0].num_cached_tokens == 0


def test_pins_cannot_starve_the_pool():
    """A pin that might leave a live request without pages is refused with both numbers, as is a request that pins leave no
    room for."""
    harness = Harness(num_pages=7)
    harness.add(request("a", 12, params(5)))  # 4 pages at worst
    with pytest.raises(
        CapacityError, match=r"with 3 pages pinned, live request 'a' may need 7 pages in all but the pool has 6"
    ):
        harness.scheduler.pin_prefix(range(1, 13))
    with pytest.raises(CapacityError, match="6 pages would be pinned but the pool has 6"):
        harness.scheduler.pin_prefix(range(1, 25))
    assert harness.scheduler.pin_prefix(range(1, 9)) == 2
    with pytest.raises(CapacityError, match=r"may need 5 pages .* but the pool has 6, 2 of them pinned"):
        harness.scheduler.add(request("b", 13, params(6)))
    harness.run()
    fits = harness.add(request("c", 13, params(6)))  # the pinned pages are computed now and count for it
    harness.run()
    assert fits.sequences[0].num_cached_tokens == 12  # the two pinned pages and one more that happens to be cached
    again = harness.add(request("d", 13, params(6)))  # 5 pages at worst, 2 of them pinned and computed: 6 with one more pin
    assert harness.scheduler.pin_prefix((9, 9, 9, 9)) == 1
    with pytest.raises(CapacityError, match="may need 7 pages in all but the pool has 6"):
        harness.scheduler.pin_prefix((8, 8, 8, 8))
    harness.run()
    expect_lone(again)
    for call, words in [
        (lambda: harness.scheduler.pin_prefix(range(1, 9)), "pinned already"),
        (lambda: harness.scheduler.pin_prefix((1, 2, 3)), "got 3 tokens, wants a full page"),
        (lambda: harness.scheduler.unpin_prefix((5,)), "not pinned"),
        (lambda: Harness(enable_prefix_caching=False).scheduler.pin_prefix(range(9)), "enable_prefix_caching is off"),
    ]:
        with pytest.raises(InvalidRequestError, match=words):
            call()
