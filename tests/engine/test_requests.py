"""The door and the queue: limits, refusals, fairness, ids. A refused request leaves the engine as it was."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.errors import CapacityError, CheckpointError, ConfigError, InvalidRequestError, InvariantError
from jaxpaged.llm import LLM
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.kit.bytes_tokenizer import write_bytes_tokenizer
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


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, LLM]:
    """TINY with the byte tokenizer, without and with BOS."""
    made = {}
    for bos in (False, True):
        directory = write_tiny(tmp_path_factory.mktemp("texts") / str(bos), vocab_size=266, eos_token_id=257, bos_token_id=256)
        write_bytes_tokenizer(directory, add_bos=bos)
        made[bos] = _llm(directory)
    return made


def _llm(directory: Path) -> LLM:
    llm = LLM.__new__(LLM)
    llm.engine, llm._count = engine_for(directory), 0
    return llm


@pytest.mark.parametrize("prompt", ["", [""], [[]], {"prompt": ""}, {"prompt_token_ids": []}])
def test_empty_prompts(texts: dict[bool, LLM], prompt: Any):
    """B53: empty prompts are refused where there is no BOS, and everything goes on."""
    with pytest.raises(InvalidRequestError, match="empty"):
        texts[False].generate(prompt, greedy(3), use_tqdm=False)
    assert len(texts[False].generate("x", greedy(3), use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_empty_prompts_with_bos_and_empty_lists(texts: dict[bool, LLM]):
    output = texts[True].generate("", greedy(1), use_tqdm=False)[0]
    assert output.prompt_token_ids == [256] and len(tokens(output)) == 1
    assert texts[True].generate([], greedy(1), use_tqdm=False) == []
    for conversation in ([], [[]], [{"role": "user"}], ["hi"]):
        with pytest.raises(InvalidRequestError):
            texts[True].chat(conversation, greedy(1), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="max_tokens: got 0"):
        SamplingParams(max_tokens=0)
    output = texts[True].generate("abc", greedy(max_tokens=None), use_tqdm=False)[0]
    assert len(output.prompt_token_ids) + len(tokens(output)) == 64
    check_rest(texts[True].engine)


def test_one_wrong_prompt_among_many_names_its_index_and_leaves_nothing(texts: dict[bool, LLM]):
    with pytest.raises(InvalidRequestError, match="prompt 2: prompt: got an empty text"):
        texts[False].generate(["a", "b", "", "c"], greedy(3), use_tqdm=False)
    for prompts, params, message in (
        (None, None, "prompts: got NoneType"),
        (5, None, "prompts: got int"),
        ("a", 5, "params: got int"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            texts[False].generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"prompt 0: prompt: got int.*prompt_token_ids"):
        texts[False].generate([5, 6], greedy(3), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="sampling_params: got 2, wants 1 or 3 like prompts"):
        texts[False].generate(["a", "b", "c"], [greedy(3)] * 2, use_tqdm=False)
    check_rest(texts[False].engine)


def test_three_choices_of_one_conversation_share_its_pages(texts: dict[bool, LLM], monkeypatch):
    """R12: three choices; while they run, each has pages of its own only for its tail."""
    llm = texts[True]
    engine, page_size = llm.engine, llm.engine.config.page_size or 0
    used, original = [], engine.step

    def step():
        done = original()
        used.append((engine.stats().num_used_pages, engine.stats().num_logical_pages))
        return done

    monkeypatch.setattr(engine, "step", step)
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=6, ignore_eos=True)
    output = llm.chat([{"role": "user", "content": "tell me about pages and tables"}], params, use_tqdm=False)[0]
    assert [choice.index for choice in output.outputs] == [0, 1, 2] and len({tuple(c.token_ids) for c in output.outputs}) == 3
    prompt = len(output.prompt_token_ids)
    shared, whole = prompt // page_size, -(-(prompt + 6) // page_size)
    assert shared >= 2 and max(pages for pages, _ in used) <= shared + 3 * (whole - shared)
    assert max(logical for _, logical in used) >= 3 * shared
    check_rest(engine)


def test_exactly_one_bos(texts: dict[bool, LLM]):
    """B51: template and tokenizer both write BOS, one arrives; token ids are taken as they are."""
    llm = texts[True]
    output = llm.chat([{"role": "user", "content": "hi"}], greedy(2), use_tqdm=False)[0]
    assert output.prompt_token_ids == [256, *b"[user]hi[assistant]"]
    assert llm.generate("hi", greedy(2), use_tqdm=False)[0].prompt_token_ids == [256, *b"hi"]
    assert llm.generate({"prompt_token_ids": [104]}, greedy(2), use_tqdm=False)[0].prompt_token_ids == [104]


@pytest.mark.parametrize("pad", [None, "</s>"])
def test_an_eos_inside_a_prompt_is_a_token_like_any_other(tmp_path: Path, pad: str | None):
    """B51: pad absent or equal to EOS: a batch of unequal prompts with an EOS inside equals lone runs."""
    directory = write_tiny(tmp_path, vocab_size=266, eos_token_id=257, bos_token_id=256)
    write_bytes_tokenizer(directory, pad_token=pad)
    oracle, engine = Oracle(directory), fresh_engine(directory)
    prompts = [[5, 257, 6], [5, 6]]
    for prompt, output in zip(prompts, run(engine, prompts, greedy(8)), strict=True):
        assert tokens(output) == oracle.greedy(prompt, 8)[0]


def test_outputs_come_in_the_order_of_the_prompts(texts: dict[bool, LLM]):
    prompts = [f"prompt {i}" for i in range(12)]
    outputs = texts[True].generate(prompts, [greedy(12 - i) for i in range(12)], use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(tokens(output)) for output in outputs] == list(range(12, 0, -1))


def test_padded_vocabulary_is_never_sampled(tmp_path: Path):
    """B25: ids between the tokenizer's size and the head's rows are never drawn."""
    directory = write_tiny(tmp_path, vocab_size=320, eos_token_id=257, bos_token_id=256)
    write_bytes_tokenizer(directory)
    engine = fresh_engine(directory)
    params = SamplingParams(temperature=50.0, n=4, max_tokens=50, ignore_eos=True, seed=3)
    drawn = {t for completion in run(engine, [[5]], params)[0].outputs for t in completion.token_ids}
    assert len(drawn) > 60 and max(drawn) < 266
    beams = run(engine, [[5]], BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True))[0]
    assert max(t for beam in beams.outputs for t in beam.token_ids) < 266


def test_chat_without_a_template_and_half_characters_are_that_requests_own_fault(tmp_path: Path):
    """B56: in a job such a line becomes an error record; the lines around it are served."""
    directory = write_tiny(tmp_path, vocab_size=320, eos_token_id=257, bos_token_id=256)
    write_bytes_tokenizer(directory, chat_template=None)
    engine = fresh_engine(directory)
    good = add(engine, "abc", greedy(4))
    for prompt, message in (
        ({"messages": [{"role": "user", "content": "x"}]}, "messages: this model has no chat template"),
        ("a\ud800b", "prompt: holds .* at 1, half a character"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            engine.add_request("bad", prompt, greedy(4))
    assert list(finish(engine)) == [good]
    check_rest(engine)
