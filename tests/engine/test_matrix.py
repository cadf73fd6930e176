"""The engine gives the dense oracle's tokens under every page size, budget, caching, pressure and scheduling mode."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jaxpaged.engine.host_pool import HostPool
from jaxpaged.sampling_params import SamplingParams
from tests.kit.engines import engine_for, fresh_engine, greedy, logprobs, run, salt, tokens
from tests.kit.oracle import Oracle

LENGTHS = (1, 5, 6, 17, 30, 4, 13)
SHARED = 8  # tokens that all but the shortest prompts begin with
NEW_TOKENS = 20


@functools.cache
def prompts() -> tuple[list[int], ...]:
    """Prompts of ``LENGTHS``, sharing their beginning."""
    rng = np.random.default_rng(3)
    base = rng.integers(3, 64, SHARED).tolist()
    return tuple((base + rng.integers(3, 64, 64).tolist())[:length] for length in LENGTHS)


@functools.cache
def expected(directory: Path) -> list[tuple[list[int], list[float]]]:
    """What the oracle generates for each prompt."""
    oracle = Oracle(directory)
    return [oracle.greedy(prompt, NEW_TOKENS) for prompt in prompts()]


def check(directory: Path, **options: Any):
    """All prompts together, then each alone in the same engine; returns the engine and its statistics after the first part."""
    engine = engine_for(directory, **options)
    before, own = engine.stats(), salt()
    together = run(engine, prompts(), greedy(NEW_TOKENS), cache_salt=own)
    after = engine.stats()
    alone = [run(engine, [prompt], greedy(NEW_TOKENS), cache_salt=own)[0] for prompt in prompts()[:4]]
    for output, (ids, values) in zip([*together, *alone], [*expected(directory), *expected(directory)[:4]], strict=True):
        assert tokens(output) == ids
        np.testing.assert_allclose(logprobs(output), values, atol=1e-5)
    return engine, before, after


def test_the_whole_ladder_of_buckets(tiny_dir: Path):
    check(tiny_dir, few_buckets=False)


@pytest.mark.parametrize("page_size", [1, pytest.param(2, marks=pytest.mark.long), 4, 16, 128])
def test_page_sizes(tiny_dir: Path, page_size: int):
    check(tiny_dir, page_size=page_size, num_pages=256 // page_size + 4)


@pytest.mark.parametrize("budget", [1, 3, 7, *(pytest.param(budget, marks=pytest.mark.long) for budget in (64, 2048))])
def test_token_budgets(tiny_dir: Path, budget: int):
    check(tiny_dir, max_num_batched_tokens=budget)


@pytest.mark.parametrize("caching", [True, False])
def test_prefix_caching_on_and_off(tiny_dir: Path, caching: bool):
    _, before, after = check(tiny_dir, enable_prefix_caching=caching)
    assert (after.num_cached_tokens > before.num_cached_tokens) == caching
    assert bool(after.num_cached_pages) == caching


@pytest.mark.parametrize("scheduling", [True, False])
def test_planning_ahead_on_and_off(tiny_dir: Path, scheduling: bool):
    check(tiny_dir, async_scheduling=scheduling, num_pages=13)


PRESSURE = {
    "recompute": {"preemption_mode": "recompute"},
    "recompute without caching": {"preemption_mode": "recompute", "enable_prefix_caching": False},
    "swap": {"preemption_mode": "swap", "swap_space": 0.001},
    "swap without caching": {"preemption_mode": "swap", "swap_space": 0.001, "enable_prefix_caching": False},
    "offload": {"preemption_mode": "recompute", "swap_space": 0.001, "offload_cached_pages": True},
}


@pytest.mark.parametrize("mode", PRESSURE)
def test_a_pool_that_just_holds_the_largest_request(tiny_dir: Path, mode: str):
    engine, before, after = check(tiny_dir, num_pages=13, **PRESSURE[mode])  # 30 + 20 tokens, the last one needs no slot
    assert after.num_preemptions - before.num_preemptions >= 5
    if mode.startswith("swap"):
        assert after.num_swapped_out_pages > before.num_swapped_out_pages
        assert after.num_swapped_in_pages > before.num_swapped_in_pages
    if mode == "offload":
        run(engine, [prompts()[4]], greedy(4), cache_salt="old")
        run(engine, [list(range(3, 40))], greedy(10))  # takes every page of the first
        with mock.patch.object(HostPool, "restore", autospec=True, side_effect=HostPool.restore) as restore:
            output = run(engine, [prompts()[4]], greedy(NEW_TOKENS), cache_salt="old")[0]
        assert tokens(output) == expected(tiny_dir)[4][0]
        assert output.num_cached_tokens == 28 and sum(len(call.args[2]) for call in restore.call_args_list) >= 6


@pytest.mark.long
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("mode", PRESSURE)
def test_pressure_at_every_page_size(tiny_dir: Path, mode: str, page_size: int):
    """R17, R22: swapped, offloaded or recomputed, at every page size the stream is the oracle's."""
    _, before, after = check(tiny_dir, page_size=page_size, num_pages=-(-49 // page_size), **PRESSURE[mode])
    assert after.num_preemptions > before.num_preemptions or page_size == 64  # one page each: they run one by one


def test_seeded_samples_are_the_same_under_every_mode(tiny_dir: Path):
    params = [
        SamplingParams(temperature=1.0, seed=11, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0.7, top_p=0.9, seed=12, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=1.3, top_k=7, seed=13, n=2, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0),
        greedy(NEW_TOKENS),
    ]
    chosen = prompts()[:3] + prompts()[5:6]
    lone = [run(engine_for(tiny_dir, enable_prefix_caching=False), [p], own)[0] for p, own in zip(chosen, params, strict=True)]
    for options in ({}, {"max_num_batched_tokens": 3}, *({"num_pages": 13} | mode for mode in PRESSURE.values())):
        together = run(engine_for(tiny_dir, **options), chosen, params, cache_salt=salt())
        for one, other in zip(lone, together, strict=True):
            for index in range(len(one.outputs)):
                assert tokens(one, index) == tokens(other, index), options
                np.testing.assert_allclose(logprobs(one, index), logprobs(other, index), atol=1e-5)


def test_equal_runs_are_equal_to_the_bit(tiny_dir: Path):
    first, second = (run(fresh_engine(tiny_dir, num_pages=13), prompts(), greedy(8)) for _ in range(2))
    assert [(tokens(a), logprobs(a)) for a in first] == [(tokens(b), logprobs(b)) for b in second]
