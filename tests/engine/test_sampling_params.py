"""What a request may ask of the sampler, end to end. CHAIN scripts the logits (see ``tests.kit.chain``)."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.engine.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.kit.bytes_tokenizer import EOS, write_bytes_tokenizer
from tests.kit.chain import chain_logits, write_chain
from tests.kit.engines import add, check_rest, engine_for, finish, fresh_engine, greedy, logprobs, run, salt, tokens
from tests.kit.oracle import Oracle
from tests.kit.tiny import write_tiny

FLAT = 3  # a token after which all tokens are equally likely


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """CHAIN with flat logits after every token."""
    directory = write_chain(tmp_path_factory.mktemp("flat") / "m", np.zeros((64, 64), np.float32))
    return engine_for(directory)


def many(engine: Engine, count: int, params: SamplingParams) -> list[int]:
    """First tokens of ``count`` requests."""
    return [tokens(output)[0] for output in run(engine, [[FLAT]] * count, params)]


def test_temperature_alone_samples(flat: Engine):
    """B21: nothing but the default temperature 1: many tokens; every spelling of "top_k off" is the same; top_k=1 is not."""
    assert len(set(many(flat, 200, SamplingParams(max_tokens=1)))) > 10
    runs = [
        tokens(run(flat, [[FLAT]], SamplingParams(max_tokens=30, seed=5, top_k=off, ignore_eos=True))[0])
        for off in (None, 0, -1)
    ]
    assert runs[0] == runs[1] == runs[2] and len(set(runs[0])) > 5


def test_the_noise_follows_the_request_not_its_place(flat: Engine):
    """B24: seed 7 gives the same 16 tokens alone, among unseeded neighbours at any place, after a hit, in chunks."""
    params = SamplingParams(seed=7, max_tokens=16, ignore_eos=True)
    prompt = [FLAT] * 20
    lone = tokens(run(flat, [prompt], params, cache_salt=salt())[0])
    free = SamplingParams(max_tokens=16, ignore_eos=True)
    for place in range(4):
        each = [free] * 4
        each[place] = params
        assert tokens(run(flat, [prompt] * 4, each)[place]) == lone
    together = run(flat, [prompt] * 8, params)
    assert all(tokens(output) == lone for output in together), "one seeded object for all: the same noise for each"
    several = run(flat, [prompt], dataclasses.replace(params, n=4))[0]
    assert tokens(several) == lone and len({tuple(tokens(several, i)) for i in range(4)}) == 4
    again = run(flat, [prompt], dataclasses.replace(params, n=4))[0]
    assert [tokens(several, i) for i in range(4)] == [tokens(again, i) for i in range(4)]
    unseeded = {tuple(tokens(output)) for output in run(flat, [prompt] * 4, free)}
    assert len(unseeded) == 4


def test_unseeded_runs_repeat_with_the_engine_seed(tiny_dir: Path):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        engine = fresh_engine(tiny_dir, seed=seed)
        runs.append([tokens(output) for output in run(engine, [[5, 6]] * 3, params)])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tiny_temperatures(tmp_path: Path, dtype: str):
    """B22: logits 0, 1, 2, ...: any temperature just above zero takes the best token, beside a greedy and a warm row."""
    logits = np.tile(np.arange(64, dtype=np.float32), (64, 1)) / 4
    engine = fresh_engine(write_chain(tmp_path, logits), dtype=dtype, max_num_seqs=8)
    cold = [SamplingParams(temperature=t, seed=1, max_tokens=3, ignore_eos=True) for t in (1e-39, 1e-12, 1e-5, 1e-4, 1e-3)]
    outputs = run(engine, [[5]] * 7, [*cold, greedy(3), SamplingParams(seed=1, max_tokens=3, logprobs=0, ignore_eos=True)])
    assert all(tokens(output) == [63] * 3 for output in outputs[:6])
    assert all(np.isfinite(logprobs(outputs[6])))
    for bad in (-1.0, float("nan"), float("inf"), "hot", True):
        with pytest.raises(InvalidRequestError, match="temperature: got"):
            SamplingParams(temperature=bad)  # type: ignore[arg-type]


def test_greedy_row_with_its_best_tokens_banned(tmp_path: Path):
    """B22, B33: min_tokens bans EOS and stop ids: the greedy row takes the best of the others, beside a warm row."""
    logits = np.tile(np.arange(64, dtype=np.float32) / 4, (64, 1))
    engine = fresh_engine(write_chain(tmp_path, logits, eos_token_id=63))
    first = SamplingParams(temperature=0, min_tokens=2, max_tokens=6, stop_token_ids=[62], logprobs=1)
    outputs = run(engine, [[5], [5]], [first, SamplingParams(seed=1, max_tokens=3)])
    assert tokens(outputs[0]) == [61, 61, 63] and outputs[0].outputs[0].finish_reason == "stop"
    rows = outputs[0].outputs[0].logprobs
    assert rows is not None and rows[0][63].rank == 1 and rows[0][61].rank is None, "log-probabilities are the raw ones"


def test_min_tokens_counts_generated_tokens(tmp_path: Path):
    """B33: EOS is best from the start: exactly 3 others, then EOS."""
    logits = chain_logits({t: 2 for t in range(64)})
    logits[:, 9] = 5.0
    engine = fresh_engine(write_chain(tmp_path, logits))
    for scheduled in ([5], [5] * 18):  # one chunk, two chunks
        output = run(engine, [scheduled], SamplingParams(temperature=0, min_tokens=3, max_tokens=8))[0]
        assert tokens(output) == [9, 9, 9, 2] and output.outputs[0].finish_reason == "stop"
    output = run(engine, [[5]], SamplingParams(temperature=0, min_tokens=3, max_tokens=8, ignore_eos=True, stop_token_ids=[9]))[
        0
    ]
    assert tokens(output)[:3] == [2, 2, 2], "ignore_eos leaves EOS an ordinary token; the stop id is banned instead"
    with pytest.raises(InvalidRequestError, match="min_tokens: got 9, wants at most max_tokens"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_which_eos_and_when_it_is_the_last_token(tmp_path: Path):
    """B34: EOS as the last allowed token is "stop"; both lists of EOS count; ignore_eos leaves explicit stop ids alone."""
    script = {5: 6, 6: 7, 7: 8, 8: 2, 2: 10, 10: 11, 11: 12}
    directory = write_chain(tmp_path, script, generation_config={"eos_token_id": [2, 7]})
    engine = fresh_engine(directory)

    def ask(prompt: list[int], **fields: Any):
        output = run(engine, [prompt], SamplingParams(**({"temperature": 0, "max_tokens": 6} | fields)))[0].outputs[0]
        return output.token_ids, output.finish_reason, output.stop_reason

    assert ask([5]) == ([6, 7], "stop", None)
    assert ask([5], max_tokens=2) == ([6, 7], "stop", None)
    assert ask([8]) == ([2], "stop", None)
    assert ask([5], max_tokens=1) == ([6], "length", None)
    assert ask([5], ignore_eos=True) == ([6, 7, 8, 2, 10, 11], "length", None)
    assert ask([5], ignore_eos=True, stop_token_ids=[7]) == ([6, 7], "stop", 7)
    assert ask([5], stop_token_ids=[6]) == ([6], "stop", 6)


def test_text_leaves_the_stop_token_out(tmp_path: Path):
    directory = write_chain(tmp_path, {97: 98, 98: 99, 99: EOS}, vocab_size=266, eos_token_id=EOS, bos_token_id=256)
    write_bytes_tokenizer(directory, add_bos=False)
    engine = fresh_engine(directory)
    output = run(engine, ["a"], SamplingParams(temperature=0))[0].outputs[0]
    assert (output.token_ids, output.text) == ([98, 99, EOS], "bc")
    output = run(engine, ["a"], SamplingParams(temperature=0, stop_token_ids=[99]))[0].outputs[0]
    assert (output.token_ids, output.text, output.stop_reason) == ([98, 99], "b", 99)


def test_not_finite_logits_fail_one_request_alone(tmp_path: Path):
    """A request whose logits turn NaN is ended with an error; its neighbours and followers on its pages are right."""
    logits = chain_logits({5: 6, 6: 7, 7: 8, 8: 9, 9: 10, 20: 21, 21: 22, 22: 23, 23: 24})
    engine = fresh_engine(write_chain(tmp_path, logits, nan_tokens=[8]), num_pages=6)
    for _ in range(3):
        bad, good = run(engine, [[5], [20]], greedy(4))
        assert bad.outputs[0].finish_reason == "error" and bad.error and tokens(bad) == [6, 7, 8]
        assert tokens(good) == [21, 22, 23, 24] and good.error is None


def _mixed(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        n=int(rng.choice([1, 1, 2])), temperature=float(rng.choice([0.0, 0.7, 1.5])), top_k=int(rng.choice([0, 5, 20])),
        top_p=float(rng.choice([1.0, 0.8])), min_p=float(rng.choice([0.0, 0.1])), seed=int(rng.integers(1000)),
        max_tokens=int(rng.integers(1, 14)), min_tokens=0, stop_token_ids=rng.integers(0, 64, 2).tolist(),
        logprobs=[None, 0, 3][int(rng.integers(3))], ignore_eos=bool(rng.integers(2)),
    )  # fmt: skip


def _answer(output):
    return [(o.token_ids, o.finish_reason, o.logprobs and len(o.logprobs[0])) for o in output.outputs]


def test_settings_of_a_finished_request_do_not_reach_the_next(tiny_dir: Path):
    """B28: 30 random schedules of 12 requests with random settings and aborts: each equals its lone run."""
    lone = engine_for(tiny_dir, enable_prefix_caching=False)
    engine = engine_for(tiny_dir, num_pages=20)
    rng = np.random.default_rng(8)
    for _ in range(30):
        jobs = {}
        order = []
        for _ in range(12):
            params = _mixed(rng)
            if rng.integers(2):
                params = dataclasses.replace(params, min_tokens=min(3, params.max_tokens or 0))
            prompt = rng.integers(3, 64, int(rng.integers(1, 20))).tolist()
            request_id = add(engine, prompt, params, cache_salt=str(rng.integers(2)))
            jobs[request_id] = (prompt, params)
            order.append(request_id)
            if rng.integers(3) == 0:
                engine.step()
        for request_id in rng.choice(order, 3, replace=False):
            engine.abort_request(str(request_id))
        for request_id, output in finish(engine).items():
            prompt, params = jobs[request_id]
            assert _answer(output) == _answer(run(lone, [prompt], params)[0]), (prompt, params)


CHANGED: dict[str, Any] = {
    "n": 2, "best_of": 3, "temperature": 0.0, "top_k": 1, "top_p": 0.2, "min_p": 0.9, "seed": 99, "max_tokens": 5,
    "min_tokens": 12, "stop_token_ids": None, "ignore_eos": True, "logprobs": 2, "skip_special_tokens": False,
}  # fmt: skip


def test_every_parameter_changes_the_output(tmp_path: Path):
    """Apply or reject: each field of ``SamplingParams`` is iterated over; a new one without an entry here fails."""
    directory = write_tiny(tmp_path, vocab_size=266, eos_token_id=EOS, bos_token_id=256)
    write_bytes_tokenizer(directory)
    engine = fresh_engine(directory)
    base: dict[str, Any] = {"seed": 1, "max_tokens": 12}

    def ask(**fields: Any):
        outputs = run(engine, ["abc"], SamplingParams(**(base | fields)))[0].outputs
        return [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in outputs]

    plain = ask()
    assert plain == ask()
    first = plain[0][0]
    for field in dataclasses.fields(SamplingParams):
        if field.name == "stop_token_ids":
            changed, before = ask(stop_token_ids=[first[4]]), plain
        elif field.name in ("ignore_eos", "skip_special_tokens", "min_tokens"):
            stops = {"stop_token_ids": [first[2]]} if field.name == "min_tokens" else {}
            # An EOS on the way: the third token of the plain run is made one by asking for it as a second EOS.
            engine._door.eos_token_ids = frozenset({EOS, first[2]})
            if field.name == "skip_special_tokens":
                engine._door.eos_token_ids = frozenset()
                before, changed = _special(engine, True), _special(engine, False)
            else:
                before, changed = ask(**stops), ask(**stops, **{field.name: CHANGED[field.name]})
            engine._door.eos_token_ids = frozenset({EOS})
        else:
            before, changed = plain, ask(**{field.name: CHANGED[field.name]})
        assert changed != before, field.name
    ranked = ask(best_of=4, logprobs=0)
    everyone = ask(n=4, logprobs=0)
    totals = [sum(row[t].logprob for row, t in zip(o[3], o[0], strict=True)) for o in everyone]
    assert ranked[0][0] == everyone[int(np.argmax(totals))][0], "best_of returns the most likely of the samples"


def _special(engine: Engine, skip: bool) -> str:
    """Completions drawn almost uniformly, so that special tokens are among them."""
    params = SamplingParams(seed=3, temperature=1e6, n=4, max_tokens=50, ignore_eos=True, skip_special_tokens=skip)
    outputs = run(engine, ["abc"], params)[0].outputs
    assert any(t in (256, EOS) for o in outputs for t in o.token_ids), "no special token was drawn: the test shows nothing"
    return "".join(o.text for o in outputs)


def test_unsupported_parameters_are_named():
    for name in ("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "prompt_logprobs"):
        with pytest.raises(InvalidRequestError, match=f"sampling.{name}: not supported"):
            SamplingParams.from_dict({name: 1})
    with pytest.raises(InvalidRequestError, match="did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1})
    for field, value in {"early_stopping": "sometimes", "length_penalty": float("nan"), "beam_width": 0}.items():
        with pytest.raises(InvalidRequestError, match=f"{field}: got"):
            BeamSearchParams(**({"beam_width": 2} | {field: value}))


def test_logprobs_are_the_oracles(tiny_dir: Path, tiny_oracle: Oracle):
    engine = engine_for(tiny_dir)
    prompt = [9, 8, 7]
    output = run(engine, [prompt], SamplingParams(seed=2, max_tokens=6, logprobs=5, ignore_eos=True))[0]
    rows = output.outputs[0].logprobs
    assert rows is not None
    sequence = prompt + tokens(output)
    want = tiny_oracle.logprobs(sequence)
    for i, row in enumerate(rows):
        true = want[len(prompt) + i - 1]
        best = np.argsort(-true)[:5].tolist()
        assert [t for t, e in sorted(row.items(), key=lambda x: x[1].rank or 99) if e.rank] == best
        for token, entry in row.items():
            assert entry.logprob == pytest.approx(true[token], abs=1e-5)
        assert len(row) in (5, 6) and tokens(output)[i] in row
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(logprobs(output)), abs=1e-5)
    check_rest(engine)
