"""Page pools of fewer bits: close to float, of the promised size, and right under sharing and pressure."""

from pathlib import Path

import numpy as np
import pytest

from jaxpaged.sampling_params import SamplingParams
from tests.kit.engines import engine_for, fresh_engine, greedy, logprobs, run, tokens
from tests.kit.oracle import Oracle

# Mean and largest error allowed in the log-probability of the float model's own tokens.
BOUNDS = {
    "float32": (1e-6, 1e-5), "bfloat16": (0.02, 0.15), "float16": (0.003, 0.03), "int8": (0.03, 0.25), "fp8": (0.12, 0.8),
    "fp8_e4m3": (0.12, 0.8), "fp8_e5m2": (0.25, 1.6),
}  # fmt: skip


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    return np.random.default_rng(seed).integers(3, 64, length).tolist()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_output_stays_close_to_float(tiny_dir: Path, tiny_oracle: Oracle, kv_dtype: str):
    """Each first token is drawn after a prompt read from quantised pages; its log-probability is the float model's, nearly."""
    engine = engine_for(tiny_dir, kv_cache_dtype=kv_dtype)
    errors = []
    prompts = [prompt_of(length, length) for length in range(2, 34)]
    for prompt, output in zip(prompts, run(engine, prompts, greedy(8, logprobs=20)), strict=True):
        sequence = prompt + tokens(output)
        true = tiny_oracle.logprobs(sequence)[len(prompt) - 1 : -1]
        got = logprobs(output)
        errors += [abs(value - row[token]) for value, row, token in zip(got, true, tokens(output), strict=True)]
    mean, most = float(np.mean(errors)), float(np.max(errors))
    print(f"{kv_dtype:>9}: log-probability error over {len(errors)} tokens: mean {mean:.2e}, largest {most:.2e}")
    assert mean < BOUNDS[kv_dtype][0] and most < BOUNDS[kv_dtype][1]
    if kv_dtype != "float32":
        assert mean > 1e-6, "nothing was rounded: the option had no effect"


SIZES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@pytest.mark.parametrize("kv_dtype", SIZES)
def test_the_pool_has_exactly_the_promised_bytes(tiny_dir: Path, kv_dtype: str):
    """Bytes of a token = 2 * layers * KV heads * head width * element size; 8-bit pools add a float per token, head and K/V."""
    engine = engine_for(tiny_dir, kv_cache_dtype=kv_dtype)
    pool, slots = engine.runner._pool, 65 * 4
    assert pool.data.nbytes == slots * 2 * 2 * 2 * 8 * SIZES[kv_dtype]
    assert (pool.scales is None) == (SIZES[kv_dtype] > 1)
    if pool.scales is not None:
        assert pool.scales.nbytes == slots * 2 * 2 * 2 * 4


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8_e4m3"])
def test_pressure_swap_and_samples_change_nothing(tiny_dir: Path, kv_dtype: str):
    """The same rounding everywhere: preempted, swapped and copied pages give the tokens of an unpressured run."""
    params = [greedy(12), SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True), greedy(12)]
    prompts = [prompt_of(9, s) for s in range(3)]
    free = run(engine_for(tiny_dir, kv_cache_dtype=kv_dtype), prompts, params)
    engine = fresh_engine(tiny_dir, kv_cache_dtype=kv_dtype, num_pages=11, preemption_mode="swap", swap_space=0.001)
    tight = run(engine, prompts, params)
    assert engine.stats().num_swapped_in_pages > 0
    for one, other in zip(free, tight, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
