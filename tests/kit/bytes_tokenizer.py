"""BYTES: a byte-level tokenizer. Ids 0..255 are the bytes, 256 is BOS, 257 is EOS, then spare pieces.

Encoding a text gives BOS and its UTF-8 bytes (no merges); the spare pieces only occur in scripted outputs, so that a text
can be cut inside characters, words and stop strings while every token is used once.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS = 256, 257
FIRST_PIECE = 258
PIECES: tuple[bytes, ...] = (b"on", b"e ", b"tw", b"o t", b"hr", b"ee", b"xENDy", b"a: ")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_symbols() -> list[str]:
    """The printable character byte-level BPE uses for each byte 0..255 (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [table[b] for b in range(256)]


def piece_id(piece: bytes, pieces: Sequence[bytes] = PIECES) -> int:
    """Token id of a spare piece."""
    return FIRST_PIECE + list(pieces).index(piece)


def bytes_tokenizer(pieces: Sequence[bytes] = PIECES, *, add_bos: bool = True) -> Tokenizer:
    """The tokenizer as a ``tokenizers`` object; ``add_bos`` puts one BOS before every encoded text."""
    symbols = byte_symbols()
    vocab = {symbol: i for i, symbol in enumerate(symbols)} | {"<s>": BOS, "</s>": EOS}
    for i, piece in enumerate(pieces):
        vocab["".join(symbols[b] for b in piece)] = FIRST_PIECE + i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def write_bytes_tokenizer(
    directory: str | Path,
    pieces: Sequence[bytes] = PIECES,
    *,
    add_bos: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
    pad_token: str | None = None,
) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``directory`` (beside a model, if one is there)."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    bytes_tokenizer(pieces, add_bos=add_bos).save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if pad_token is not None:
        settings["pad_token"] = pad_token
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
