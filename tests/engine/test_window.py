"""Sliding windows in the engine: exact at the edge, pages behind given back."""

from pathlib import Path

import numpy as np
import pytest

from tests.kit.engines import add, engine_for, greedy, logprobs, run, tokens
from tests.kit.oracle import Oracle
from tests.kit.tiny import write_mistral


@pytest.mark.parametrize("window", [4, *(pytest.param(w, marks=pytest.mark.long) for w in (1, 3, 5, 8, 200))])
@pytest.mark.parametrize("budget", [16, pytest.param(5, marks=pytest.mark.long)])
def test_the_window_is_exact(tmp_path: Path, window: int, budget: int):
    """B41: position p sees p - W + 1 .. p: in prefill, any chunk and decode; W below, at and above the page size."""
    directory = write_mistral(tmp_path, window=window)
    oracle = Oracle(directory)
    engine = engine_for(directory, max_num_batched_tokens=budget)
    rng = np.random.default_rng(window)
    prompts = [rng.integers(3, 64, length).tolist() for length in (1, 3, 4, 5, 9, 30)]
    for prompt, output in zip(prompts, run(engine, prompts, greedy(14)), strict=True):
        ids, values = oracle.greedy(prompt, 14)
        assert tokens(output) == ids
        np.testing.assert_allclose(logprobs(output), values, atol=1e-5)


def test_a_long_sequence_holds_only_its_window(tmp_path: Path):
    directory = write_mistral(tmp_path, window=4)
    engine = engine_for(directory)
    add(engine, [5] * 3, greedy(60))
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, engine.stats().num_used_pages)
    assert most <= 3
