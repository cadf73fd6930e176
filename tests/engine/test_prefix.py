"""Prefix reuse: which pages hit, and that a hit never changes an answer."""

from pathlib import Path

import numpy as np
import pytest

from jaxpaged.errors import CapacityError, InvalidRequestError
from jaxpaged.outputs import RequestOutput
from tests.kit.engines import add, check_rest, engine_for, finish, fresh_engine, greedy, logprobs, run, salt, tokens
from tests.kit.oracle import Oracle


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    return np.random.default_rng(seed).integers(3, 64, length).tolist()


def same(oracle: Oracle, prompt: list[int], output: RequestOutput) -> None:
    ids, values = oracle.greedy(prompt, len(tokens(output)))
    assert tokens(output) == ids
    np.testing.assert_allclose(logprobs(output), values, atol=1e-5)


@pytest.mark.parametrize("length", [1, 4, 5, 7, 8, 12])
def test_a_wholly_cached_prompt_still_computes_its_last_token(tiny_dir: Path, tiny_oracle: Oracle, length: int):
    """B02: with the whole prompt cached and its length a multiple of the page size, something must be left to run."""
    engine, own, prompt = engine_for(tiny_dir), salt(), prompt_of(length)
    others = [prompt_of(6, 1), prompt_of(9, 2)]
    for turn in range(3):
        output = run(engine, [prompt], greedy(6), cache_salt=own)[0]
        same(tiny_oracle, prompt, output)
        assert output.num_cached_tokens == (0 if turn == 0 else (length - 1) // 4 * 4)
    mixed = run(engine, [others[0], prompt, others[1]], greedy(6), cache_salt=own)
    for own_prompt, output in zip([others[0], prompt, others[1]], mixed, strict=True):
        same(tiny_oracle, own_prompt, output)
    if length == 8:
        longer = prompt + prompt_of(4, 3)
        output = run(engine, [longer], greedy(6), cache_salt=own)[0]
        same(tiny_oracle, longer, output)
        assert output.num_cached_tokens == 8


def test_equal_prompts_in_one_step_do_not_read_unwritten_pages(tiny_dir: Path, tiny_oracle: Oracle):
    """B04: allocated, findable and written are three states; four copies arrive together, a fifth while the first decodes."""
    engine, own, prompt = engine_for(tiny_dir, max_num_batched_tokens=8, max_num_seqs=5), salt(), prompt_of(12, 4)
    first = [add(engine, prompt, greedy(20), cache_salt=own) for _ in range(4)]
    late, done = None, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
            elif late is None and output.request_id == first[0]:
                late = add(engine, prompt, greedy(20), cache_salt=own)
    assert late is not None
    for output in done.values():
        same(tiny_oracle, prompt, output)
    assert len(done) == 5 and done[late].num_cached_tokens >= 8
    check_rest(engine)


def test_an_edited_history_does_not_hit_the_old_one(tiny_dir: Path, tiny_oracle: Oracle):
    """B05: the page keys of a conversation follow its tokens, also where the last one was edited."""
    engine, own, prompt = engine_for(tiny_dir), salt(), prompt_of(7, 5)
    said = tokens(run(engine, [prompt], greedy(1), cache_salt=own)[0])[0]
    other = said + 1 if said < 63 else said - 1
    edited, kept = [*prompt, other, *prompt_of(8, 6)], [*prompt, said, *prompt_of(8, 6)]
    output = run(engine, [edited], greedy(8), cache_salt=own)[0]
    same(tiny_oracle, edited, output)
    assert output.num_cached_tokens <= 4
    output = run(engine, [kept], greedy(8), cache_salt=own)[0]
    same(tiny_oracle, kept, output)
    assert output.num_cached_tokens <= 4, "the page with a sampled token that never ran is not findable"


def test_a_second_turn_on_trimmed_text(tiny_dir: Path, tiny_oracle: Oracle):
    """B05: turn 1 ends on a stop token inside a page; turn 2 sends the turn without it and a new question."""
    engine, own, prompt = engine_for(tiny_dir), salt(), prompt_of(6, 7)
    ids, _ = tiny_oracle.greedy(prompt, 7)
    stop = ids[6]
    turn = run(engine, [prompt], greedy(20, stop_token_ids=[stop]), cache_salt=own)[0]
    assert turn.outputs[0].finish_reason == "stop" and turn.outputs[0].stop_reason == stop
    following = prompt + tokens(turn)[:-1] + prompt_of(5, 8)
    output = run(engine, [following], greedy(8), cache_salt=own)[0]
    same(tiny_oracle, following, output)
    assert output.num_cached_tokens > 0


def test_salts_keep_tenants_apart(tiny_dir: Path, tiny_oracle: Oracle):
    engine, prompt = engine_for(tiny_dir), prompt_of(13, 9)
    mine, yours = salt(), salt()
    assert run(engine, [prompt], greedy(4), cache_salt=mine)[0].num_cached_tokens == 0
    assert run(engine, [prompt], greedy(4), cache_salt=yours)[0].num_cached_tokens == 0
    output = run(engine, [prompt], greedy(4), cache_salt=mine)[0]
    assert output.num_cached_tokens == 12
    same(tiny_oracle, prompt, output)


def test_a_pinned_beginning_survives_pressure(tiny_dir: Path, tiny_oracle: Oracle):
    engine = fresh_engine(tiny_dir, num_pages=13)
    pinned = prompt_of(9, 10)
    assert engine.pin_prefix({"prompt_token_ids": pinned}) == 2
    ask = pinned + prompt_of(6, 11)
    run(engine, [ask], greedy(4))
    for seed in range(20, 26):  # far more than the pool holds
        prompt = prompt_of(30, seed)
        same(tiny_oracle, prompt, run(engine, [prompt], greedy(10))[0])
    output = run(engine, [ask], greedy(4))[0]
    same(tiny_oracle, ask, output)
    assert output.num_cached_tokens == 8
    with pytest.raises(CapacityError, match=r"may need 12 pages.*13, 2 of them pinned"):
        add(engine, prompt_of(30, 27), greedy(19))
    with pytest.raises(InvalidRequestError, match="pinned already"):
        engine.pin_prefix({"prompt_token_ids": pinned})
    engine.unpin_prefix({"prompt_token_ids": pinned})
    prompt = prompt_of(30, 28)
    same(tiny_oracle, prompt, run(engine, [prompt], greedy(20))[0])
    assert run(engine, [ask], greedy(4))[0].num_cached_tokens == 0, "an unpinned beginning is evicted like any other"


def test_pinning_needs_caching_and_a_full_page(tiny_dir: Path):
    with pytest.raises(InvalidRequestError, match="enable_prefix_caching is off"):
        engine_for(tiny_dir, enable_prefix_caching=False).pin_prefix({"prompt_token_ids": [1] * 8})
    with pytest.raises(InvalidRequestError, match="got 3 tokens, wants a full page"):
        engine_for(tiny_dir).pin_prefix({"prompt_token_ids": [1, 2, 3]})


def test_finishing_order_and_reports(tiny_dir: Path):
    """Every step reports the requests that moved; growing outputs are prefixes of the final one."""
    engine, own = engine_for(tiny_dir), salt()
    ids = [add(engine, prompt_of(5, seed), greedy(6 + seed), cache_salt=own) for seed in range(3)]
    quiet = add(engine, prompt_of(5, 3), greedy(6), cache_salt=own, final_only=True)
    seen: dict[str, list[list[int]]] = {request_id: [] for request_id in [*ids, quiet]}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(tokens(output))
    for seed, request_id in enumerate(ids):
        assert [len(part) for part in seen[request_id]] == list(range(1, 7 + seed))
        assert all(part == seen[request_id][-1][: len(part)] for part in seen[request_id])
    assert [len(part) for part in seen[quiet]] == [6]
    assert finish(engine) == {}


@pytest.mark.parametrize(("mode", "n"), [("recompute", 1), ("swap", 1), ("auto", 2)])
def test_who_shares_a_pinned_prefix_comes_back_to_it(tiny_dir: Path, mode: str, n: int):
    """Swapped in, it would have copies of the pinned pages beside them, for which there is no room: it is recomputed."""
    engine = fresh_engine(tiny_dir, page_size=4, num_pages=10, preemption_mode=mode, swap_space=0.001)
    prefix = list(range(3, 15))
    assert engine.pin_prefix(prefix) == 3
    run(engine, [[*prefix, 20]], greedy(2))
    add(engine, [30, 31, 32, 33], greedy(20))
    add(engine, [*prefix, 40, 41, 42], greedy(17) if n == 1 else greedy(8, n=n))
    for _ in range(100):
        engine.step()
    assert not engine.has_unfinished_requests() and engine.stats().num_used_pages == 0
    assert engine.stats().num_preemptions > 0
    engine.check_integrity()
