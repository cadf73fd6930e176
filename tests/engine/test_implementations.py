"""The whole engine on every kernel implementation: the same tokens (Pallas kernels interpreted on CPU)."""

from pathlib import Path

import numpy as np
import pytest

from jaxpaged.sampling_params import SamplingParams
from tests.kit.engines import engine_for, fresh_engine, greedy, logprobs, run, tokens
from tests.kit.oracle import Oracle
from tests.kit.tiny import write_mistral, write_tiny

OPTIONS = {"page_size": 16, "num_pages": 6, "max_num_seqs": 3, "max_model_len": 64}
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # a KV row of 128 elements: legal for the kernels


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with wider heads."""
    return write_tiny(tmp_path_factory.mktemp("wide") / "m", **WIDE)


def work() -> tuple[list[list[int]], list[SamplingParams]]:
    """A long prompt in two chunks, samples that copy a page, and a short prompt; together they exceed the pool."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 64, length).tolist() for length in (30, 7, 3)]
    return prompts, [greedy(10), SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True, logprobs=0), greedy(30)]


def check(directory: Path, implementation: str, **options) -> None:
    prompts, params = work()
    want = run(engine_for(directory, **OPTIONS), prompts, params)
    engine = fresh_engine(directory, implementation=implementation, **OPTIONS, **options)
    for one, other in zip(want, run(engine, prompts, params), strict=True):
        for i in range(len(one.outputs)):
            assert tokens(one, i) == tokens(other, i)
            np.testing.assert_allclose(logprobs(one, i), logprobs(other, i), atol=2e-5)
    assert engine.stats().num_page_copies > 0


@pytest.mark.parametrize("implementation", ["reference", "triton", "mosaic_tpu"])
def test_every_implementation(directory: Path, implementation: str):
    check(directory, implementation)


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["xla", "reference", "triton", "mosaic_tpu"])
def test_every_implementation_swaps(directory: Path, implementation: str):
    check(directory, implementation, preemption_mode="swap", swap_space=0.001)


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["reference", "triton", "mosaic_tpu"])
def test_freed_pages_behind_the_window_are_never_read(tmp_path: Path, implementation: str):
    """B43: with NaN in every page that was given back behind the window."""
    directory = write_mistral(tmp_path, window=20, **WIDE)
    oracle = Oracle(directory)
    engine = fresh_engine(directory, implementation=implementation, **OPTIONS)
    prompts, _ = work()
    for prompt, output in zip(prompts, run(engine, prompts, greedy(30)), strict=True):
        assert tokens(output) == oracle.greedy(prompt, 30)[0]
