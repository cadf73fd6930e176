"""Preemption: nothing lost, nothing doubled, nothing leaked, and always progress."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpaged.engine.host_pool import pages_per_call
from jaxpaged.model.kv_pages import PoolSpec, gather_pages
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler.scheduler_output import SchedulerOutput
from tests.kit.engines import add, check_rest, engine_for, greedy, logprobs, run, salt, tokens
from tests.kit.oracle import Oracle
from tests.kit.tiny import write_mistral

SWAP = {"preemption_mode": "swap", "swap_space": 0.001}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    return np.random.default_rng(seed).integers(3, 64, length).tolist()


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, SWAP], ids=["recompute", "no caching", "swap"])
def test_four_requests_in_a_pool_for_one_and_a_half(tiny_dir: Path, options: dict):
    """B16: preempted outputs are whole and equal to lone runs; the oldest is never the victim; no endless eviction."""
    engine = engine_for(tiny_dir, num_pages=10, **options)
    lone = engine_for(tiny_dir, enable_prefix_caching=False)
    prompts = [prompt_of(6, seed) for seed in range(4)]
    warm = [SamplingParams(temperature=1.0, seed=s, max_tokens=20, ignore_eos=True, logprobs=0) for s in (1, 2)]
    params = [greedy(20), warm[0], greedy(20), warm[1]]
    before = engine.stats()
    own = salt()
    ids = [add(engine, prompt, each, cache_salt=own) for prompt, each in zip(prompts, params, strict=True)]
    victims: set[int] = set()
    start, oldest = engine.runner.run, engine._scheduler._requests[ids[0]].states[0].seq.seq_id

    def spy(output, *rest, **options):
        victims.update(output.preempted)
        return start(output, *rest, **options)

    engine.runner.run = spy  # type: ignore[method-assign]
    try:
        done = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step() if output.finished}
    finally:
        engine.runner.run = start  # type: ignore[method-assign]
    check_rest(engine)
    after = engine.stats()
    assert after.num_steps - before.num_steps < 400
    assert after.num_preemptions > before.num_preemptions and victims and oldest not in victims
    for request_id, prompt, each in zip(ids, prompts, params, strict=True):
        alone = run(lone, [prompt], each)[0]
        assert tokens(done[request_id]) == tokens(alone) and len(tokens(alone)) == 20
        np.testing.assert_allclose(logprobs(done[request_id]), logprobs(alone), atol=1e-5)
        assert done[request_id].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("cached_prefix", [False, True])
def test_preempting_at_every_unaligned_length_leaks_nothing(tiny_dir: Path, cached_prefix: bool):
    """B10: a preemption at any prompt and output length, then an abort: all pages are back each of the 81 times."""
    engine = engine_for(tiny_dir, num_pages=10, scheduling_policy="priority")
    head = [9, 8, 7, 6] if cached_prefix else []
    for prompt_len in range(1, 10):
        for generated in range(1, 10):
            own = salt()
            if cached_prefix:
                run(engine, [[*head, 5]], greedy(1), cache_salt=own)
            before = engine.stats().num_preemptions
            victim = add(engine, head + prompt_of(prompt_len, 2), greedy(generated + 16), priority=1, cache_salt=own)
            count = 0
            while count < generated:
                count += sum(output.request_id == victim for output in engine.step())
            # It outranks the victim, fits beside it, and soon needs a page more.
            room = 4 * (10 - -(-(len(head) + prompt_len + count + 4) // 4))
            urgent = add(engine, prompt_of(room - 1, 1), greedy(8), cache_salt=own)
            while engine.stats().num_preemptions == before:
                assert engine.has_unfinished_requests()
                engine.step()
            engine.abort_request(victim)
            engine.abort_request(urgent)
            while engine.has_unfinished_requests():
                engine.step()
            check_rest(engine)
    assert engine.stats().num_preemptions >= 81


def test_freed_pages_are_poisoned_and_never_read(tiny_dir: Path, tiny_oracle: Oracle):
    """B43: with NaN in every freed page between 20 requests, and in the pages themselves, all answers stay right."""
    engine = engine_for(tiny_dir, num_pages=13)
    own = salt()
    for turn in range(20):
        prompts = [prompt_of(3 + turn, 100 + turn), prompt_of(5, 200 + turn)]
        for prompt, output in zip(prompts, run(engine, prompts, greedy(9), cache_salt=own), strict=True):
            assert tokens(output) == tiny_oracle.greedy(prompt, 9)[0]
    data = np.asarray(engine.runner._pool.data)
    assert np.isnan(data[1:]).any(), "debug mode left no NaN in freed pages: the test shows nothing"


def test_swapped_windows(tmp_path: Path):
    """Sliding windows give back pages while sequences are preempted, swapped and resumed."""
    directory = write_mistral(tmp_path, window=6)
    oracle = Oracle(directory)
    prompts = [prompt_of(6, seed) for seed in range(4)]
    for options in ({}, SWAP):
        engine = engine_for(directory, num_pages=7, **options)
        for prompt, output in zip(prompts, run(engine, prompts, greedy(20)), strict=True):
            assert tokens(output) == oracle.greedy(prompt, 20)[0]
        assert engine.stats().num_preemptions > 0


def test_pages_move_in_a_step_in_which_nobody_runs(tiny_dir: Path, monkeypatch):
    """A plan without rows still saves, restores and copies, in this order."""
    engine = engine_for(tiny_dir, num_pages=12, preemption_mode="swap", swap_space=0.001)
    run(engine, [list(range(3, 20))], greedy(3))
    runner = engine.runner

    def pages() -> np.ndarray:
        return np.asarray(jax.tree.leaves(jax.jit(gather_pages)(runner._pool, np.arange(12, dtype=np.int32)))[0])

    before = pages()
    assert not np.array_equal(before[:, 1], before[:, 2])
    plan = SchedulerOutput(99, saves=((1, 0),), restores=((0, 7),), copies=((7, 8), (2, 9)))
    monkeypatch.setattr(engine._scheduler, "schedule", lambda: plan)
    assert engine.step() == []
    after = pages()
    for page, source in ((7, 1), (8, 1), (9, 2), (1, 1), (2, 2), (3, 3)):
        np.testing.assert_array_equal(after[:, page], before[:, source])


def test_large_pages_are_swapped_few_at_a_time():
    """A call is padded to a fixed number of pages, and the padding is moved too: at most 16 MiB of it."""
    small = PoolSpec(30, 100, 16, 3, 64, "bfloat16")
    assert pages_per_call(small) == 16
    assert pages_per_call(dataclasses.replace(small, page_size=256)) == 2
    assert pages_per_call(PoolSpec(32, 100, 16, 8, 128, "bfloat16")) == 8
    assert pages_per_call(PoolSpec(80, 100, 256, 8, 128, "bfloat16")) == 1
