"""The door and the queue: limits, refusals, fairness, ids. A refused request leaves the engine as it was."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.errors import CapacityError, CheckpointError, ConfigError, InvalidRequestError, InvariantError
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.kit.engines import add, check_rest, engine_for, finish, fresh_engine, greedy, run, salt, tokens
from tests.kit.oracle import Oracle
from tests.kit.tiny import write_tiny


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    return np.random.default_rng(seed).integers(3, 64, length).tolist()


@pytest.mark.parametrize("length", [16, 17, 40])
def test_prompts_that_leave_no_room_are_refused(tiny_dir: Path, tiny_oracle: Oracle, length: int):
    """B15: prompt + output <= max_model_len; a longer prompt is refused at once and blocks nobody."""
    engine = engine_for(tiny_dir, max_model_len=16)
    with pytest.raises(InvalidRequestError, match=f"prompt: got {length} tokens, wants at most 15.*max_model_len = 16"):
        add(engine, prompt_of(length), greedy(1))
    check_rest(engine)
    assert tokens(run(engine, [prompt_of(5)], greedy(4))[0]) == tiny_oracle.greedy(prompt_of(5), 4)[0]


@pytest.mark.parametrize(
    ("length", "asked", "got", "pages"), [(15, 100, 1, 4), (15, None, 1, 4), (12, 100, 4, 4), (8, 1, 1, 2)]
)
def test_lengths_at_the_limit(tiny_dir: Path, tiny_oracle: Oracle, length: int, asked: int | None, got: int, pages: int):
    """B15: exactly the tokens that fit; the last sampled one needs no slot."""
    engine = engine_for(tiny_dir, max_model_len=16)
    request_id = add(engine, prompt_of(length, 1), greedy(max_tokens=asked), cache_salt=salt())
    most = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id == request_id
                assert tokens(output) == tiny_oracle.greedy(prompt_of(length, 1), got)[0]
                assert output.outputs[0].finish_reason == "length"
        most = max(most, engine.stats().num_used_pages)
    assert most <= pages
    check_rest(engine)


def test_a_request_that_can_never_fit_is_refused_by_numbers(tiny_dir: Path, tiny_oracle: Oracle):
    """ "Never fits" is told at submit with both numbers, and the request behind it runs."""
    engine = engine_for(tiny_dir, num_pages=10)
    with pytest.raises(CapacityError, match=r"may need 11 pages .*but the pool has 10"):
        add(engine, prompt_of(30), greedy(12))
    with pytest.raises(InvalidRequestError, match="n or best_of: got 5, wants at most max_num_seqs = 4"):
        add(engine, prompt_of(3), greedy(4, temperature=1.0, n=5))
    with pytest.raises(CapacityError, match="n, or give the pool more pages"):
        add(engine, prompt_of(8), SamplingParams(n=4, max_tokens=12))
    assert tokens(run(engine, [prompt_of(5)], greedy(4))[0]) == tiny_oracle.greedy(prompt_of(5), 4)[0]


def test_a_long_prompt_starves_nobody(tmp_path_factory: pytest.TempPathFactory):
    """B18: a decoding request gains a token in every step while a 200-token prompt is computed; a short newcomer is served."""
    directory = write_tiny(tmp_path_factory.mktemp("long") / "m")
    oracle = Oracle(directory)
    engine = engine_for(directory, max_num_batched_tokens=8, max_model_len=256, num_pages=128)
    prompts = {"decoding": prompt_of(5, 1), "long": prompt_of(200, 2), "short": prompt_of(3, 3)}
    engine.add_request("decoding", {"prompt_token_ids": prompts["decoding"]}, greedy(100))
    counts, done = [], {}
    while len(counts) < 3:
        counts += [len(tokens(output)) for output in engine.step()]
    engine.add_request("long", {"prompt_token_ids": prompts["long"]}, greedy(5))
    engine.add_request("short", {"prompt_token_ids": prompts["short"]}, greedy(5))
    first_short = None
    for step in range(300):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            if output.request_id == "decoding":
                assert len(tokens(output)) == counts[-1] + 1
                counts.append(len(tokens(output)))
            if output.request_id == "short" and first_short is None:
                first_short = step
            if output.finished:
                done[output.request_id] = output
        if "decoding" not in done:
            assert len(counts) == 3 + step + 1, "a step passed without a token for the decoding request"
    assert first_short is not None and first_short < 40
    for name, prompt in prompts.items():
        assert tokens(done[name]) == oracle.greedy(prompt, len(tokens(done[name])))[0]
    check_rest(engine)


def test_ids_can_be_used_again_but_not_twice_at_once(tiny_dir: Path, tiny_oracle: Oracle):
    """B20: a live id is refused; after an abort the same id at once belongs to the new request alone."""
    engine = engine_for(tiny_dir)
    old, new = prompt_of(9, 1), prompt_of(7, 2)
    engine.add_request("x", {"prompt_token_ids": old}, greedy(30))
    for _ in range(3):
        engine.step()
    with pytest.raises(InvalidRequestError, match="request_id: got 'x', which a live request has"):
        engine.add_request("x", {"prompt_token_ids": new}, greedy(5))
    aborted = engine.abort_request("x")
    assert aborted is not None and aborted.outputs[0].finish_reason == "abort"
    assert tokens(aborted) == tiny_oracle.greedy(old, len(tokens(aborted)))[0]
    engine.add_request("x", {"prompt_token_ids": new}, greedy(12))
    assert engine.abort_request("y") is None
    done = finish(engine)
    assert list(done) == ["x"] and tokens(done["x"]) == tiny_oracle.greedy(new, 12)[0]
    assert engine.abort_request("x") is None


def test_aborting_at_every_moment(tiny_dir: Path, tiny_oracle: Oracle):
    """Aborts while queued, in chunked prefill, while decoding, and with a step in flight; the neighbour is untouched."""
    engine = engine_for(tiny_dir, max_num_batched_tokens=8)
    for steps in range(8):
        own = salt()
        stays = add(engine, prompt_of(6, 1), greedy(10), cache_salt=own)
        goes = add(engine, prompt_of(30, 2), greedy(10, n=2, temperature=1.0), cache_salt=own)
        for _ in range(steps):
            engine.step()
        engine.abort_request(goes)
        done = finish(engine)
        assert tokens(done[stays]) == tiny_oracle.greedy(prompt_of(6, 1), 10)[0]


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([64], r"prompt_token_ids\[0\]: got 64, wants an integer in \[0, 64\)"),
    ([5, -1], r"prompt_token_ids\[1\]: got -1"),
    ([5, 1.5], r"prompt_token_ids\[1\]: got 1.5"),
    ([True], r"prompt_token_ids\[0\]: got True"),
    ([], "prompt_token_ids: got an empty list"),
    ({"prompt_token_ids": []}, "prompt_token_ids: got an empty list"),
    ({"prompt_token_ids": [1], "prompt": "x"}, "prompt: got keys .* wants exactly one of"),
    ({"tokens": [1]}, "prompt: got keys"),
    ({}, "prompt: got keys"),
    (7, "prompt: got int, wants text, token ids or messages"),
    (None, "prompt: got NoneType"),
    ("text", "the model has no tokenizer; give prompt_token_ids"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages: the model has no tokenizer"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_wrong_prompts_are_refused_by_name(tiny_dir: Path, tiny_oracle: Oracle, prompt: Any, message: str):
    """B25, B53: the error names field and value; a request already running is not disturbed."""
    engine = engine_for(tiny_dir)
    running = add(engine, prompt_of(6, 3), greedy(6), cache_salt=salt())
    engine.step()
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request("bad", prompt, greedy(4))
    done = finish(engine)
    assert list(done) == [running] and tokens(done[running]) == tiny_oracle.greedy(prompt_of(6, 3), 6)[0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop_token_ids=[64]), "stop_token_ids: got 64, wants ids below the vocabulary size 64"),
        (SamplingParams(min_tokens=1, stop_token_ids=list(range(40))), "min_tokens: with 40 stop and EOS ids"),
        (SamplingParams(min_tokens=1, max_tokens=None, stop_token_ids=[2**40]), "stop_token_ids: got 1099511627776"),
        (BeamSearchParams(beam_width=5), "beam_width: got 5, wants at most max_num_seqs = 4"),
        ({"temperature": 0.5}, "sampling_params: got dict, wants SamplingParams or BeamSearchParams"),
    ],
)
def test_wrong_parameters_are_refused_by_name(tiny_dir: Path, params: Any, message: str):
    engine = engine_for(tiny_dir)
    with pytest.raises(InvalidRequestError, match=message):
        add(engine, [1, 2], params)
    for name, value in (("priority", "high"), ("cache_salt", 3)):
        with pytest.raises(InvalidRequestError, match=f"{name}: got {value!r}"):
            add(engine, [1, 2], greedy(1), **{name: value})
    with pytest.raises(InvalidRequestError, match="request_id: got ''"):
        engine.add_request("", [1], greedy(1))
    for name, options in (("cache_salt", {"cache_salt": "\ud800"}), ("request_id", {"request_id": "x\ud800"})):
        with pytest.raises(InvalidRequestError, match=f"{name}: holds .* half a character"):
            engine.add_request(**({"request_id": "y", "prompt": [1], "params": greedy(1)} | options))
    check_rest(engine)


HUGE = 10**400
BAD_FIELDS: list[tuple[type, dict[str, Any], str]] = [
    *((SamplingParams, {name: HUGE}, f"{name}: got an integer of 1329 bits") for name in ("temperature", "top_p", "min_p")),
    (SamplingParams, {"temperature": 1e39}, r"temperature: got 1e\+39, wants a number in \[0, 1e\+06\]"),
    (SamplingParams, {"top_k": 2**31}, "top_k: got 2147483648"),
    (SamplingParams, {"min_tokens": 2**31, "max_tokens": None}, "min_tokens: got 2147483648"),
    (BeamSearchParams, {"beam_width": 2, "length_penalty": HUGE}, "length_penalty: got an integer of"),
    (BeamSearchParams, {"beam_width": 2, "length_penalty": 2000}, r"length_penalty: got 2000, wants a number in \[-32, 32\]"),
    (BeamSearchParams, {"beam_width": 2, "length_penalty": -2000.0}, "length_penalty: got -2000.0"),
    (BeamSearchParams, {"beam_width": 2, "early_stopping": 1}, "early_stopping: got 1"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), BAD_FIELDS)
def test_numbers_no_device_or_float_can_hold_are_refused_at_the_door(kind: type, fields: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        kind(**fields)


def test_extreme_numbers_that_are_allowed_run(tiny_dir: Path):
    engine = engine_for(tiny_dir)
    extremes = [
        SamplingParams(temperature=1e6, top_k=2**31 - 1, max_tokens=5, seed=2**63 - 1),
        SamplingParams(temperature=1e6, min_tokens=5, max_tokens=5, stop_token_ids=list(range(30)), seed=0),
        BeamSearchParams(beam_width=2, length_penalty=32.0, max_tokens=5),
        BeamSearchParams(beam_width=2, length_penalty=-32, max_tokens=5),
    ]
    for params in extremes:
        output = run(engine, [prompt_of(5)], params)[0]
        assert 1 <= len(tokens(output)) <= 5 and not (
            isinstance(params, SamplingParams) and params.min_tokens and min(tokens(output)) < 30
        )


def test_a_step_that_was_planned_but_not_run_ends_the_engine_with_the_reason(tmp_path: Path):
    """The books then name pages that were never written; serving from them would answer with foreign text."""
    engine = fresh_engine(write_tiny(tmp_path))
    engine.add_request("a", [5] * 9, greedy(4))
    start = engine.runner.dispatch

    def fails(*_):
        raise MemoryError("no room")

    engine.runner.dispatch = fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        engine.step()
    engine.runner.dispatch = start  # type: ignore[method-assign]
    for call in (engine.step, lambda: engine.add_request("b", [5] * 9, greedy(4)), lambda: engine.fork("a", "c")):
        with pytest.raises(InvariantError, match=r"cannot go on: step \d+ was planned but not run \(MemoryError: no room\)"):
            call()


def test_an_interrupted_wait_loses_no_step(tiny_dir: Path, tiny_oracle: Oracle):
    """Ctrl-C while results are awaited: the step is awaited again."""
    engine = engine_for(tiny_dir)
    request_id = add(engine, prompt_of(6, 3), greedy(6), cache_salt=salt())
    engine.step()
    wait = engine.runner.resolve

    def interrupted(_):
        raise KeyboardInterrupt

    engine.runner.resolve = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    finally:
        engine.runner.resolve = wait  # type: ignore[method-assign]
    assert tokens(finish(engine)[request_id]) == tiny_oracle.greedy(prompt_of(6, 3), 6)[0]
    check_rest(engine)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_len": 500}, ConfigError, "max_model_len: got 500, the model was made for 256 tokens"),
        ({"max_num_seq": 3}, ConfigError, "max_num_seq: unknown key; did you mean 'max_num_seqs'"),
        ({"kv_cache_dtype": "int4"}, ConfigError, "kv_cache_dtype: got 'int4'"),
        ({"page_size": 0}, ConfigError, "page_size: got 0"),
        ({"swap_space": 1e-9}, ConfigError, "swap_space: got 1e-09 GiB, one page takes"),
        ({"model": "/nowhere/at/all"}, CheckpointError, "/nowhere/at/all"),
    ],
)
def test_wrong_options_are_refused_by_name(tiny_dir: Path, options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        fresh_engine(**({"model": tiny_dir} | options))
