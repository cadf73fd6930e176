"""Streamed text: always a prefix of the final text, whole characters only, equal in the end."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from jaxpaged.engine.detokenizer import Detokenizer
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.weights.checkpoint import open_checkpoint
from jaxpaged.weights.tokenizer import Tokenizer
from tests.kit import smollm2
from tests.kit.bytes_tokenizer import BOS, EOS, bytes_tokenizer, write_bytes_tokenizer
from tests.kit.chain import successors, write_chain
from tests.kit.engines import add, check_rest, fresh_engine
from tests.kit.tiny import write_tiny

BYTES = Tokenizer(bytes_tokenizer(), special_tokens={"bos": BOS, "eos": EOS})


def check_stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    """Feeds tokens one by one; every text is a prefix of the next and of the final one. Returns the texts."""
    detokenizer = Detokenizer(tokenizer)
    final = detokenizer.final_text(ids, skip_special_tokens=skip)
    texts = [detokenizer.growing_text(0, ids[: i + 1], skip_special_tokens=skip) for i in range(len(ids))]
    for before, after in zip(["", *texts], [*texts, final], strict=True):
        assert after.startswith(before), (ids, before, after)
    return texts


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 265), max_size=40), st.booleans())
def test_any_bytes(ids: list[int], skip: bool):
    check_stream(BYTES, ids, skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_any_text_arrives_whole(text: str):
    """Valid UTF-8: what is held back is at most the bytes of one character; no text holds U+FFFD unless it was there."""
    ids = list(text.encode("utf-8", "ignore"))
    texts = check_stream(BYTES, ids)
    if ids:
        assert texts[-1] == text.encode("utf-8", "ignore").decode()
        assert all("\ufffd" not in t for t in texts) or "\ufffd" in text


def test_a_broken_byte_does_not_stop_the_stream():
    """B31: one byte that is no character: one U+FFFD, and the stream goes on."""
    ids = [*b"ab", 0xFF, *b"cdefgh"]
    texts = check_stream(BYTES, ids)
    assert texts[-1] == "ab\ufffdcdefgh"


def byte_fallback_tokenizer() -> Tokenizer:
    """A SentencePiece-like tokenizer: words with a leading space, and ``<0xNN>`` pieces for everything else."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"<s>": 256, "</s>": 257, "▁a": 258, "▁": 259, "b": 260, "é": 261}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, special_tokens={"bos": 256, "eos": 257})


FALLBACK = byte_fallback_tokenizer()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(256, 261), st.sampled_from([*"你🙂".encode(), 0x41, 0xFF])), max_size=30), st.booleans())
def test_byte_fallback(ids: list[int], skip: bool):
    """A run of byte tokens is decoded as a whole: one broken byte turns all of it into U+FFFD."""
    check_stream(FALLBACK, ids, skip)


def test_byte_fallback_streams_words():
    texts = check_stream(FALLBACK, [258, 260, *"你".encode(), 258, 261, 259])
    assert texts == ["a", "ab", "ab", "ab", "ab", "ab你 a", "ab你 aé", "ab你 aé "]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    tokenizer = open_checkpoint(str(smollm2.gguf_path())).tokenizer()
    assert tokenizer is not None
    return tokenizer


def test_real_text(smollm: Tokenizer):
    texts = [item["output_text"] for item in smollm2.goldens()["items"]]
    texts += ["naïve café 🙂🚂 日本語 x  =  1\n\n\tfor i in range(3): print(i)", "👩‍👩‍👧 é ́ ﷽"]
    for text in texts:
        ids = smollm.encode(text)
        streamed = check_stream(smollm, ids)
        assert streamed[-1] == text


def test_random_tokens_of_a_real_vocabulary(smollm: Tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(100):
        check_stream(smollm, rng.integers(0, smollm.vocab_size, 20).tolist(), bool(rng.integers(2)))


def test_streams_of_the_engine(tmp_path: Path):
    """B31: the bytes of a text with 2- and 4-byte characters, one a token: no delta holds U+FFFD, joined they are the text."""
    text = "né🙂!".encode()
    directory = write_chain(tmp_path, successors([ord("a"), *text, EOS]), vocab_size=266, eos_token_id=EOS, bos_token_id=BOS)
    write_bytes_tokenizer(directory, add_bos=False)
    engine = fresh_engine(directory)

    def stream(max_tokens: int) -> tuple[list[str], str]:
        add(engine, "a", SamplingParams(temperature=0, max_tokens=max_tokens))
        seen, final = [], ""
        while engine.has_unfinished_requests():
            for output in engine.step():
                seen.append(output.outputs[0].text)
                final = output.outputs[0].text
                if output.finished:
                    assert len(output.outputs[0].token_ids) == min(max_tokens, len(text) + 1)
        return seen, final

    seen, final = stream(50)
    assert final == "né🙂!" and not any("\ufffd" in part for part in seen)
    assert all(after.startswith(before) for before, after in itertools.pairwise(seen))
    seen, final = stream(5)  # cut after 2 of the 4 bytes of the last character
    assert final == "né\ufffd" and not any("\ufffd" in part for part in seen[:-1])
    check_rest(engine)


def test_growing_texts_of_random_generations(tmp_path: Path):
    """Whatever a random model says, each report's text is a prefix of the next one's."""
    directory = write_tiny(tmp_path, vocab_size=266, eos_token_id=EOS, bos_token_id=BOS)
    write_bytes_tokenizer(directory)
    engine = fresh_engine(directory)
    params = SamplingParams(temperature=5.0, n=2, max_tokens=40, ignore_eos=True, seed=4)
    for _ in range(6):
        add(engine, "x", params)
    last: dict[tuple[str, int], str] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            for completion in output.outputs:
                key = (output.request_id, completion.index)
                assert completion.text.startswith(last.get(key, ""))
                last[key] = completion.text
    assert len(last) == 12
    check_rest(engine)
