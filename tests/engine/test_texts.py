"""Texts, conversations and token ids at the door of ``LLM``."""

from pathlib import Path
from typing import Any

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.llm import LLM
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.kit.bytes_tokenizer import write_bytes_tokenizer
from tests.kit.engines import add, check_rest, engine_for, finish, fresh_engine, greedy, run, tokens
from tests.kit.oracle import Oracle
from tests.kit.tiny import write_tiny


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
            texts[False].generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type] - wrong on purpose
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
