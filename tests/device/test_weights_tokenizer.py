"""Tokenizers from GGUF metadata and Hugging Face directories; chat templates."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece

from jaxpaged.errors import CheckpointError, ConfigError, InvalidRequestError
from jaxpaged.weights.chat_template import render_chat
from jaxpaged.weights.checkpoint import open_checkpoint
from jaxpaged.weights.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from jaxpaged.weights.tokenizer import Tokenizer, read_tokenizer
from tests.kit import bytes_tokenizer as byt
from tests.kit import smollm2


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    tokenizer = open_checkpoint(str(smollm2.gguf_path())).tokenizer()
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("index", range(12))
def test_golden_prompts_have_exactly_the_recorded_ids(smollm: Tokenizer, index: int):
    item = smollm2.goldens()["items"][index]
    messages = smollm2.golden_messages(item)
    ids = smollm.encode(item["prompt"]) if messages is None else smollm.apply_chat_template(messages)
    assert ids == item["prompt_token_ids"]
    assert smollm.decode(item["output_token_ids"]) == item["output_text"]


def test_demo_tokenizer_facts(smollm: Tokenizer):
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_id, smollm.pad_token_id) == (49152, 1, 2, 2)
    assert smollm.eos_token_ids == {2} and not smollm.adds_bos
    assert smollm.is_special(2) and not smollm.is_special(504)
    assert smollm.id_to_piece(2) == "<|im_end|>" and smollm.piece_to_id("<|im_end|>") == 2
    assert smollm.decode([504, 2], skip_special_tokens=False) == "The<|im_end|>"
    text = "Ünïcode 🙂 x = 12345\n\n\tif (a<b) {}  don't 的   "
    assert smollm.decode(smollm.encode(text)) == text
    assert smollm.encode("12") == [smollm.piece_to_id("1"), smollm.piece_to_id("2")]


def test_tokenizer_needs_no_torch_and_no_transformers():
    code = (
        "import sys\nfrom jaxpaged.weights.checkpoint import open_checkpoint\n"
        f"t = open_checkpoint({str(smollm2.gguf_path())!r}).tokenizer()\n"
        "t.apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------- Hugging Face directories


def test_bytes_tokenizer_directory(tmp_path):
    tokenizer = read_tokenizer(byt.write_bytes_tokenizer(tmp_path), eos_token_ids=[7])
    assert tokenizer.vocab_size == byt.FIRST_PIECE + len(byt.PIECES)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (256, 257, {257, 7})
    assert tokenizer.adds_bos and tokenizer.encode("né🙂!") == [256, *"né🙂!".encode()]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.decode([256, 97, byt.piece_id(b"xENDy"), 257]) == "axENDy"
    assert tokenizer.decode([0xF0, 0x9F]) == "\ufffd"  # two bytes of a four-byte character


@pytest.mark.parametrize("writes_bos", [True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_prompt_has_one_bos(tmp_path, writes_bos: bool, adds_bos: bool):
    """Template and tokenizer may both add BOS: there is exactly one; neither: none."""
    template = byt.CHAT_TEMPLATE if writes_bos else byt.CHAT_TEMPLATE.replace("{{ bos_token }}", "")
    tokenizer = read_tokenizer(byt.write_bytes_tokenizer(tmp_path, add_bos=adds_bos, chat_template=template))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert ids.count(256) == (1 if writes_bos or adds_bos else 0)
    assert ids[-len("[user]x[assistant]") :] == list(b"[user]x[assistant]")
    assert tokenizer.encode("x").count(256) == adds_bos


def test_template_that_doubles_bos(tmp_path):
    tokenizer = read_tokenizer(byt.write_bytes_tokenizer(tmp_path, chat_template="<s>" + byt.CHAT_TEMPLATE))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]).count(256) == 1


def test_pad_equal_to_eos_or_absent(tmp_path):
    assert read_tokenizer(byt.write_bytes_tokenizer(tmp_path / "a")).pad_token_id is None
    assert read_tokenizer(byt.write_bytes_tokenizer(tmp_path / "b", pad_token="</s>")).pad_token_id == 257


@pytest.mark.parametrize("explicit", [True, False])
def test_add_bos_token_setting_overrides_the_post_processor(tmp_path, explicit: bool):
    byt.write_bytes_tokenizer(tmp_path, add_bos=not explicit)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_bos_token": explicit}))
    assert read_tokenizer(tmp_path).encode("x") == ([256] if explicit else []) + [120]


def test_template_files_and_named_templates(tmp_path):
    byt.write_bytes_tokenizer(tmp_path, chat_template=None)
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(ConfigError, match="no chat template"):
        read_tokenizer(tmp_path).apply_chat_template(message)
    file = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ messages[0].content }}"}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    assert read_tokenizer(tmp_path).render_chat(message) == "dx"
    (tmp_path / "chat_template.jinja").write_text("j{{ messages[0].content }}")
    assert read_tokenizer(tmp_path).render_chat(message) == "jx"


def test_broken_tokenizer_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        read_tokenizer(tmp_path)
    byt.write_bytes_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, got list"):
        read_tokenizer(tmp_path)


def test_save_and_read_back(smollm: Tokenizer, tmp_path):
    smollm.save(tmp_path)
    again = read_tokenizer(tmp_path)
    message = [{"role": "user", "content": "Hi 🙂 12"}]
    assert again.apply_chat_template(message) == smollm.apply_chat_template(message)
    assert again.eos_token_ids == smollm.eos_token_ids and again.vocab_size == smollm.vocab_size


# ----------------------------------------------------------------------------------------------------- chat templates


def test_template_helpers():
    user = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "é"}]}]
    template = (
        "{% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m['content'] | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%%') }}{{ tools is none }}"
    )
    assert render_chat(template, user * 2, add_generation_prompt=False) == '"a\\né"%True'  # parts are lines, as in a job


def test_template_errors():
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequestError, match="refuses these messages: no user please"):
        render_chat("{{ raise_exception('no user please') }}", message)
    with pytest.raises(ConfigError, match="broken at line 1"):
        render_chat("{% if %}", message)
    with pytest.raises(InvalidRequestError, match="cannot render"):
        render_chat("{{ ''.__class__.__mro__ }}", message)  # the sandbox
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        render_chat("x", [])
    with pytest.raises(InvalidRequestError, match=r"messages\[1\] must be an object with a string role, got 5"):
        render_chat("x", [*message, 5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content holds .*image"):
        render_chat("x", [{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content must be text"):
        render_chat("x", [{"role": "user", "content": None}])


# ------------------------------------------------------------------------------------------------------ GGUF metadata


def byte_level_metadata(pre: str, **extra) -> dict:
    symbols = byt.byte_symbols()
    words = ["ab", "abc", "12", "123", "Ġa", "the"]
    tokens = [*symbols, "<s>", "</s>", *words]
    merges = ["a b", "ab c", "1 2", "12 3", "Ġ a"]
    types = [1] * 256 + [3, 3] + [1] * len(words)
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    fields |= {"bos_token_id": 256, "eos_token_id": 257} | extra
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "abc123 a", ["abc", "1", "2", "3", "Ġa"]),
        ("gpt-2", "abc123 a", ["abc", "123", "Ġa"]),
        ("llama-bpe", "abc1234the", ["<s>", "abc", "123", "4", "the"]),  # "the" whole although no merge makes it
        ("qwen2", "abc123", ["abc", "1", "2", "3"]),
        ("tekken", "abc123", ["<s>", "abc", "1", "2", "3"]),
        ("default", "abc123 a", ["abc", "123", "Ġa"]),
        ("default", "abc.abc", ["abc", ".", "abc"]),
    ],
)
def test_pre_tokenizer_types(pre: str, text: str, pieces: list[str]):
    tokenizer = gguf_tokenizer(byte_level_metadata(pre), "m.gguf")
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    assert [tokenizer.id_to_piece(i) for i in ids] == pieces
    assert tokenizer.decode(ids) == text


def test_pre_tokenizers_lose_nothing():
    text = "I'm  the\n\n  naïve 東京 user-42; 3.14159 🙂\t!!\r\n x"
    for pre in PRE_TOKENIZERS:
        tokenizer = gguf_tokenizer(byte_level_metadata(pre), "m.gguf")
        assert tokenizer is not None and tokenizer.decode(tokenizer.encode(text)) == text


def test_add_bos_and_add_eos_fields():
    tokenizer = gguf_tokenizer(byte_level_metadata("smollm", add_bos_token=True, add_eos_token=True), "m.gguf")
    assert tokenizer is not None and tokenizer.adds_bos and tokenizer.encode("a") == [256, 97, 257]


def test_control_tokens_are_matched_whole_and_user_defined_ones_stay_text():
    metadata = byte_level_metadata("smollm")
    metadata["tokenizer.ggml.tokens"].append("<tool>")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = gguf_tokenizer(metadata, "m.gguf")
    assert tokenizer is not None
    user = tokenizer.piece_to_id("<tool>")
    assert tokenizer.encode("a</s>b<tool>") == [97, 257, 98, user]
    assert tokenizer.decode([97, 257, user]) == "a<tool>" and not tokenizer.is_special(user)


def sentencepiece_metadata(**extra) -> dict:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3] + [6] * 256
    words = ["▁", "h", "e", "l", "o", "he", "ll", "▁he", "llo", "▁hello", "el"]
    scores = [0.0] * len(tokens) + [-20.0, -21, -22, -23, -24, -1, -3, -2, -4, -5, -0.5]
    fields = {"model": "llama", "tokens": tokens + words, "token_type": types + [1] * len(words), "scores": scores}
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | extra
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def test_sentencepiece_merges_by_score_with_byte_fallback_and_space_prefix():
    tokenizer = gguf_tokenizer(sentencepiece_metadata(), "m.gguf")
    assert tokenizer is not None and tokenizer.adds_bos
    # "el" has the best score, so it merges before "he": no "hello" is ever formed
    assert [tokenizer.id_to_piece(i) for i in tokenizer.encode("hello")] == ["<s>", "▁", "h", "el", "l", "o"]
    assert [tokenizer.id_to_piece(i) for i in tokenizer.encode("heé")] == ["<s>", "▁he", "<0xC3>", "<0xA9>"]
    for text in ("hello hello", "é 🙂  x", " lead"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    bare = gguf_tokenizer(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False), "m.gguf")
    assert bare is not None and [bare.id_to_piece(i) for i in bare.encode("he he")] == ["he", "▁he"]
    assert bare.decode(bare.encode(" he")) == " he"


def train_sentencepiece(folder: Path):
    """A small sentencepiece model, written to ``folder/tokenizer.model``."""
    corpus = folder / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\nhello world, hello there\n12 34 naïve café\n" * 30)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "tokenizer"), vocab_size=340, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", minloglevel=2, remove_extra_whitespaces=False, split_digits=True,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


TEXTS = ("hello quick world", "the the the", "brown  fox ", "Zebra 🙂 naïve 1234", "overlazy,dog")


def test_sentencepiece_equals_the_library_built_from_the_same_pieces(tmp_path):
    """The same vocabulary trained and run by sentencepiece itself gives the same ids."""
    model = train_sentencepiece(tmp_path)
    count = model.get_piece_size()
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(count)]
    fields = {
        "model": "llama", "tokens": [model.id_to_piece(i) for i in range(count)], "token_type": kinds,
        "scores": [model.get_score(i) for i in range(count)], "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False,
    }  # fmt: skip
    tokenizer = gguf_tokenizer({f"tokenizer.ggml.{k}": v for k, v in fields.items()}, "m.gguf")
    assert tokenizer is not None
    for text in (*TEXTS, " x"):
        assert tokenizer.encode(text) == model.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_directory_with_nothing_but_a_sentencepiece_model(tmp_path):
    """Older Llama and Vicuna checkpoints have ``tokenizer.model`` and no ``tokenizer.json``."""
    model = train_sentencepiece(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False})
    )
    tokenizer = read_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *model.encode(text)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unsupported_or_inconsistent_gguf_tokenizers():
    with pytest.raises(CheckpointError, match=r"m\.gguf: tokenizer\.ggml\.pre 'klingon' is not supported; supported: .*smollm"):
        gguf_tokenizer(byte_level_metadata("klingon"), "m.gguf")
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.model 'bert' is not supported; supported: gpt2, llama"):
        gguf_tokenizer(byte_level_metadata("smollm", model="bert"), "m.gguf")
    with pytest.raises(CheckpointError, match="tokens has 264 entries, token_type 3"):
        gguf_tokenizer(byte_level_metadata("smollm", token_type=[1, 1, 1]), "m.gguf")
    with pytest.raises(CheckpointError, match="merges do not fit together"):
        gguf_tokenizer(byte_level_metadata("smollm", merges=["q zz"]), "m.gguf")
    with pytest.raises(CheckpointError, match="eos token id 999 is not in its vocabulary"):
        gguf_tokenizer(byte_level_metadata("smollm", eos_token_id=999), "m.gguf")
    with pytest.raises(CheckpointError, match=r"scores has 0 entries, tokens 270"):
        gguf_tokenizer(sentencepiece_metadata(scores=[]), "m.gguf")
    assert gguf_tokenizer({}, "m.gguf") is None
