"""Parallel samples, forks and beams: shared pages never change an answer."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.host.beam_reference import beam_reference
from tests.kit.bytes_tokenizer import write_bytes_tokenizer
from tests.kit.engines import add, check_rest, engine_for, finish, greedy, logprobs, run, salt, tokens
from tests.kit.oracle import Oracle
from tests.kit.tiny import write_mistral, write_tiny

SWAP = {"preemption_mode": "swap", "swap_space": 0.001}


def prompt_of(length: int, seed: int = 0, vocab: int = 64) -> list[int]:
    """A random prompt."""
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


@pytest.mark.parametrize("length", [1, 4, 6, 8, 19])
def test_samples_of_one_prompt(tiny_dir: Path, length: int):
    """B08: n samples share the half-full page until they write; each sample equals the one drawn in other company."""
    engine = engine_for(tiny_dir)
    lone = engine_for(tiny_dir, enable_prefix_caching=False)
    params = SamplingParams(n=4, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)
    before = engine.stats().num_page_copies
    output = run(engine, [prompt_of(length)], params, cache_salt=salt())[0]
    copies = engine.stats().num_page_copies - before
    assert copies == (3 if length % 4 else 0), "all but the last writer of a partly filled page copy it"
    assert len({tuple(tokens(output, i)) for i in range(4)}) == 4
    for n in (1, 2, 3):
        fewer = run(lone, [prompt_of(length)], dataclasses.replace(params, n=n))[0]
        for i in range(n):
            assert tokens(fewer, i) == tokens(output, i)
            np.testing.assert_allclose(logprobs(fewer, i), logprobs(output, i), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"preemption_mode": "recompute"}, SWAP], ids=["auto", "recompute", "swap"])
def test_groups_under_pressure(tiny_dir: Path, options: dict):
    params = [SamplingParams(n=3, seed=s, max_tokens=10, ignore_eos=True, logprobs=0) for s in (1, 2, 3)]
    prompts = [prompt_of(7, s) for s in (1, 2, 3)]
    lone = engine_for(tiny_dir, enable_prefix_caching=False)
    engine = engine_for(tiny_dir, num_pages=16, max_num_seqs=8, **options)
    outputs = run(engine, prompts, params, cache_salt=salt())
    assert engine.stats().num_preemptions > 0
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        alone = run(lone, [prompt], each)[0]
        for i in range(3):
            assert tokens(alone, i) == tokens(output, i)


def test_samples_behind_a_window(tmp_path: Path):
    """Samples with a sliding window, pages given back while others still name them."""
    engine = engine_for(write_mistral(tmp_path, window=8))
    oracle = Oracle(tmp_path)
    output = run(engine, [prompt_of(14)], SamplingParams(n=3, seed=1, max_tokens=24, ignore_eos=True, logprobs=0))[0]
    for i in range(3):
        sequence = prompt_of(14) + tokens(output, i)
        want = oracle.logprobs(sequence)[13:-1]
        np.testing.assert_allclose(
            logprobs(output, i), [row[t] for row, t in zip(want, tokens(output, i), strict=True)], atol=1e-5
        )


def test_fork_continues_two_ways(tiny_dir: Path, tiny_oracle: Oracle):
    """A fork at any moment keeps the original's tokens and goes on by its own parameters."""
    engine, prompt = engine_for(tiny_dir), prompt_of(6, 1)
    want = tiny_oracle.greedy(prompt, 16)[0]
    for steps in range(2, 9):
        engine.add_request("original", {"prompt_token_ids": prompt}, greedy(16), cache_salt=salt())
        for _ in range(steps):
            engine.step()
        engine.fork("original", "same")
        warm = SamplingParams(seed=steps, max_tokens=16, ignore_eos=True, logprobs=0)
        engine.fork("original", "other", params=warm)
        done = finish(engine)
        assert tokens(done["original"]) == tokens(done["same"]) == want
        np.testing.assert_allclose(logprobs(done["same"]), logprobs(done["original"]), atol=1e-5)
        other = tokens(done["other"])
        shared = next((i for i, (a, b) in enumerate(zip(other, want, strict=True)) if a != b), 16)
        assert len(other) == 16 and other != want and shared >= steps - 2
        raw = tiny_oracle.logprobs(prompt + other)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(logprobs(done["other"]), [row[t] for row, t in zip(raw, other, strict=True)], atol=1e-5)


def test_forks_are_validated_like_requests(tiny_dir: Path):
    engine = engine_for(tiny_dir)
    one = add(engine, [5, 6], greedy(8))
    engine.step()
    for new_id, params, message in (
        ("x", SamplingParams(min_tokens=1, stop_token_ids=list(range(40))), "min_tokens: with 40"),
        ("x", SamplingParams(min_tokens=1, stop_token_ids=[2**40]), "stop_token_ids: got"),
        ("x", BeamSearchParams(beam_width=2), "params: got BeamSearchParams"),
        ("x", {"temperature": 0}, "params: got dict"),
        ("", None, "request_id: got ''"),
        (7, None, "request_id: got 7"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            engine.fork(one, new_id, params=params)  # type: ignore[arg-type]
    finish(engine)


def test_streamed_beams_leave_no_text_behind(tmp_path: Path):
    """Dropped beams are forgotten while the search runs, not kept until it ends."""
    directory = write_tiny(tmp_path, vocab_size=320, eos_token_id=257, bos_token_id=256)
    write_bytes_tokenizer(directory)
    engine = engine_for(directory)
    engine.add_request("b", [5, 6], BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True))
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, len(engine._outputs.seq_ids), len(engine._builder.seq_ids))
    assert 1 <= most <= 6
    check_rest(engine)


def test_a_fork_that_is_swapped_out_loses_nothing(tiny_dir: Path):
    """All pages shared, none to spare: the fork leaves for the host though nothing becomes free by it, and both go on."""
    for length in (6, 9, 10):
        engine = engine_for(tiny_dir, num_pages=4, preemption_mode="swap", swap_space=0.001, enable_prefix_caching=False)
        lone = engine_for(tiny_dir, enable_prefix_caching=False)
        prompt, params = prompt_of(length, 2), greedy(12 - length)
        want = tokens(run(lone, [prompt], params)[0])
        engine.add_request("a", {"prompt_token_ids": prompt}, params)
        engine.step()
        engine.fork("a", "b")
        done = finish(engine)
        assert tokens(done["a"]) == tokens(done["b"]) == want
        check_rest(engine)


def test_forks_that_cannot_be(tiny_dir: Path):
    engine = engine_for(tiny_dir)
    with pytest.raises(InvalidRequestError, match="request_id: got 'nobody', wants the id of a live request"):
        engine.fork("nobody", "x")
    beam = add(engine, [5, 6], BeamSearchParams(beam_width=2))
    with pytest.raises(InvalidRequestError, match="beam search, which cannot be forked"):
        engine.fork(beam, "x")
    one = add(engine, [5, 6], greedy(5, logprobs=None))
    engine.step()
    with pytest.raises(InvalidRequestError, match="index: got 3"):
        engine.fork(one, "x", index=3)
    with pytest.raises(InvalidRequestError, match=r"logprobs: got 2, wants None: more was not recorded"):
        engine.fork(one, "x", params=greedy(5, logprobs=2))
    finish(engine)


def test_a_fork_knows_the_log_probabilities_of_what_it_inherits(tiny_dir: Path):
    """They are those of the original, which asked for them; a step computes none where nobody does."""
    engine = engine_for(tiny_dir)
    lone = run(engine, [prompt_of(6, 2)], greedy(5, logprobs=1))[0].outputs[0]
    one = add(engine, prompt_of(6, 2), greedy(5, logprobs=1))
    engine.step()
    engine.step()
    with pytest.raises(InvalidRequestError, match="logprobs: got 2, wants at most 1"):
        engine.fork(one, "y", params=greedy(5, logprobs=2))
    with pytest.raises(InvalidRequestError, match="min_tokens: got 20, wants at most the 5"):
        engine.fork(one, "y", params=SamplingParams(max_tokens=None, min_tokens=20))
    engine.fork(one, "x", params=greedy(5, logprobs=1))
    engine.fork(one, "longer", params=greedy(9, logprobs=None))
    done = finish(engine)
    assert len(tokens(done["longer"])) == 9 and tokens(done["longer"])[:5] == lone.token_ids
    fork = done["x"].outputs[0]
    assert fork.token_ids == lone.token_ids and fork.logprobs is not None and lone.logprobs is not None
    for token, got, want in zip(fork.token_ids, fork.logprobs, lone.logprobs, strict=True):
        assert abs(got[token].logprob - want[token].logprob) < 1e-5
    assert fork.cumulative_logprob == pytest.approx(lone.cumulative_logprob, abs=1e-5)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_beams_on_a_tiny_vocabulary(tmp_path: Path, width: int):
    """B37: vocabulary 8: tokens, sums and scores equal a plain search over all tokens; width 1 is greedy."""
    directory = write_tiny(tmp_path, vocab_size=8)
    oracle, engine = Oracle(directory), engine_for(directory, max_num_seqs=5)
    for prompt in ([3, 4, 5], [7], prompt_of(9, 1, 8)):
        output = run(engine, [prompt], BeamSearchParams(beam_width=width, max_tokens=4))[0]
        want = beam_reference(prompt, width=width, max_tokens=4, stop_ids={2}, log_probs=lambda t: oracle.logprobs(t)[-1])
        assert [tokens(output, i) for i in range(len(output.outputs))] == [found for found, _, _ in want]
        sums = [o.cumulative_logprob for o in output.outputs]
        np.testing.assert_allclose(sums, [total for _, total, _ in want], atol=1e-5)
        for found, total in zip(output.outputs, sums, strict=True):
            rows = oracle.logprobs(prompt + found.token_ids)[len(prompt) - 1 : -1]
            assert total == pytest.approx(sum(row[t] for row, t in zip(rows, found.token_ids, strict=True)), abs=1e-5)
    if width == 1:
        assert tokens(output) == oracle.greedy(prompt, 4, {2})[0]


CASES = [(2, False, 1.0), (4, True, 1.0), (6, "never", 0.5)]
MORE = [(w, e, p) for w in (2, 4, 6) for e in (False, True, "never") for p in (0.0, 1.0, 2.0, -1.0)]


@pytest.mark.parametrize(("width", "early", "penalty"), [*CASES, *(pytest.param(*c, marks=pytest.mark.long) for c in MORE)])
def test_beams_equal_transformers(tiny_dir: Path, width: int, early: bool | str, penalty: float):
    """The same float32 weights, the same answers: tokens of all returned beams, and their scores."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    engine = engine_for(tiny_dir, max_num_seqs=8)
    for seed in range(3):
        prompt = prompt_of(5 + seed, seed)
        with torch.no_grad():
            want = model.generate(
                torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=14, early_stopping=early,
                length_penalty=penalty, eos_token_id=2, pad_token_id=1, do_sample=False, return_dict_in_generate=True,
                output_scores=True,
            )  # fmt: skip
        params = BeamSearchParams(beam_width=width, max_tokens=14, early_stopping=early, length_penalty=penalty)
        output = run(engine, [prompt], params, cache_salt=salt())[0]
        for i, row in enumerate(want.sequences[:, len(prompt) :].tolist()):
            got = tokens(output, i)
            assert got == row[: len(got)] and set(row[len(got) :]) <= {1}
        scores = [(o.cumulative_logprob or 0.0) / len(o.token_ids) ** penalty for o in output.outputs]
        np.testing.assert_allclose(scores, want.sequences_scores.numpy(), atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"preemption_mode": "recompute"}, SWAP], ids=["auto", "recompute", "swap"])
def test_beams_among_others_and_under_pressure(tiny_dir: Path, tiny_oracle: Oracle, options: dict):
    engine = engine_for(tiny_dir, num_pages=12, max_num_seqs=8, **options)
    lone = engine_for(tiny_dir, max_num_seqs=8)
    beams = BeamSearchParams(beam_width=3, max_tokens=10)
    prompts = [prompt_of(6, s) for s in range(4)]
    alone = [run(lone, [prompt], beams, cache_salt=salt())[0] for prompt in prompts[:3]]
    before = engine.stats()
    outputs = run(engine, prompts, [beams, beams, beams, greedy(10)], cache_salt=salt())
    assert engine.stats().num_preemptions > before.num_preemptions
    for one, other in zip(alone, outputs[:3], strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
    assert tokens(outputs[3]) == tiny_oracle.greedy(prompts[3], 10)[0]
    check_rest(engine)


def test_beams_can_be_aborted(tiny_dir: Path):
    engine = engine_for(tiny_dir, max_num_seqs=8)
    for steps in range(6):
        request_id = add(engine, prompt_of(6), BeamSearchParams(beam_width=4, max_tokens=10), cache_salt=salt())
        for _ in range(steps):
            engine.step()
        engine.abort_request(request_id)
        while engine.has_unfinished_requests():
            engine.step()
        check_rest(engine)
