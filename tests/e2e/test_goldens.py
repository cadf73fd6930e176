"""The demo model reproduces its recorded greedy outputs exactly, whatever pages, budgets, caching or pressure."""

from typing import Any

import numpy as np
import pytest

from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams
from tests.kit import smollm2
from tests.kit.engines import engine_for, logprobs, run, tokens

OPTIONS: dict[str, Any] = {
    "page_size": 16, "num_pages": 80, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 320, "debug": False,
}  # fmt: skip


def engine(**options: Any):
    """An engine of the demo model."""
    return engine_for(smollm2.gguf_path(), **(OPTIONS | options))


def items() -> list[dict[str, Any]]:
    """The recorded items."""
    return smollm2.goldens()["items"]


def prompts() -> list[list[int]]:
    """Their prompts."""
    return [item["prompt_token_ids"] for item in items()]


def params() -> list[SamplingParams]:
    """Their parameters."""
    return [SamplingParams(temperature=0.0, max_tokens=item["max_tokens"], logprobs=0) for item in items()]


def check(outputs: list[RequestOutput], *, alone: bool = False) -> None:
    for item, output in zip(items(), outputs, strict=True):
        assert tokens(output) == item["output_token_ids"], item["prompt"]
        np.testing.assert_allclose(logprobs(output), item["logprobs"], atol=1e-3)
        assert output.outputs[0].finish_reason == item["finish_reason"]
        if item["finish_reason"] == "length":
            assert output.outputs[0].text == item["output_text"]


def test_all_together():
    check(run(engine(), prompts(), params()))


@pytest.mark.long
def test_each_alone():
    check([run(engine(), [prompt], own)[0] for prompt, own in zip(prompts(), params(), strict=True)])


@pytest.mark.long
@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_for_one_request_and_a_little(caching: bool):
    """The longest needs 17 pages; requests are preempted many times."""
    small = engine(num_pages=17, max_num_seqs=8, enable_prefix_caching=caching)
    check(run(small, prompts(), params()))
    # Long answers of short prompts together outgrow the pool.
    before = small.stats().num_preemptions
    chosen = [
        i for i, item in enumerate(items()) if item["kind"] != "chat_shared_system" and len(item["output_token_ids"]) >= 48
    ]
    many = chosen * 3
    outputs = run(small, [prompts()[i] for i in many], [params()[i] for i in many])
    for i, output in zip(many, outputs, strict=True):
        assert tokens(output) == items()[i]["output_token_ids"]
    assert small.stats().num_preemptions - before >= 10


@pytest.mark.long
@pytest.mark.parametrize("page_size", [1, 4, 128])
def test_page_sizes(page_size: int):
    check(run(engine(page_size=page_size, num_pages=1280 // page_size), prompts(), params()))


@pytest.mark.long
@pytest.mark.parametrize("budget", [16, 2048])
def test_token_budgets(budget: int):
    check(run(engine(max_num_batched_tokens=budget), prompts(), params()))


@pytest.mark.long
def test_prefix_caching_off():
    check(run(engine(enable_prefix_caching=False), prompts(), params()))


@pytest.mark.long
def test_the_second_time_from_the_cache():
    one = engine()
    run(one, prompts(), params())
    before = one.stats().num_cached_tokens
    check(run(one, prompts(), params()))
    assert one.stats().num_cached_tokens - before > 500


@pytest.mark.long
def test_bfloat16_agrees_at_first():
    """bf16 weights and pool: the first 8 tokens of every golden agree; the error of log-probabilities is printed."""
    outputs = run(engine(dtype="bfloat16"), prompts(), params())
    print(f"\n{'prompt':<40} {'agreeing tokens':>16} {'mean error':>11} {'largest':>8}")
    for item, output in zip(items(), outputs, strict=True):
        got, want = tokens(output), item["output_token_ids"]
        agree = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
        errors = np.abs(np.array(logprobs(output)[:agree]) - np.array(item["logprobs"][:agree]))
        print(f"{item['prompt'][:40]!r:<42} {agree:>5} of {len(want):<6} {errors.mean():>11.4f} {errors.max():>8.4f}")
        assert got[:8] == want[:8]
