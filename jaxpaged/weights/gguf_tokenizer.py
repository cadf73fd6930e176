"""The tokenizer kept in a GGUF file's metadata, rebuilt with the ``tokenizers`` library.

Source: the ``tokenizer.ggml.*`` keys of the GGUF specification; the pre-tokenizers' patterns are those of the models named.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxpaged.errors import CheckpointError
from jaxpaged.weights.tokenizer import Tokenizer, set_special_tokens

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", r"\p{N}+", r"[0-9][0-9][0-9]")


def _by_pattern(pattern: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


def _default() -> list[Any]:
    first, *rest = (pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _DEFAULT)
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
    return [first, pre_tokenizers.Split(Regex(words), "isolated"), *rest, pre_tokenizers.ByteLevel(False, use_regex=False)]


PRE_TOKENIZERS: dict[str, Any] = {
    "default": _default,
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(False, use_regex=True)],
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=True)],
    "llama-bpe": lambda: _by_pattern(_LLAMA3),
    "qwen2": lambda: _by_pattern(_QWEN2),
    "tekken": lambda: _by_pattern(_TEKKEN),
}
"""``tokenizer.ggml.pre`` -> the steps that cut a text into words before byte-pair merging."""

_ALIASES = {
    "gpt2": "gpt-2", "gpt-2": "gpt-2", "starcoder": "smollm", "refact": "smollm", "llama3": "llama-bpe",
    "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "pixtral": "llama-bpe",
}  # fmt: skip
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Pre-tokenizers whose models take a word that is in the vocabulary as it is, before any merge."""


def gguf_tokenizer(metadata: Mapping[str, Any], where: str, eos_token_ids: Iterable[int] = ()) -> Tokenizer | None:
    """Build the tokenizer of a GGUF file.

    Args:
        metadata: all metadata fields.
        where: the file, for messages.
        eos_token_ids: further ids that end a generation.

    Returns:
        The tokenizer, or None if the file has none.

    Raises:
        CheckpointError: a tokenizer or pre-tokenizer type that is not supported, or fields missing or inconsistent.
    """
    fields = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")}
    kind = fields.get("model")
    if kind in (None, "no_vocab", "none"):
        return None
    tokens: list[str] = fields.get("tokens", [])
    types: list[int] = fields.get("token_type") or [_NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens has {len(tokens)} entries, token_type {len(types)}")
    if kind == "gpt2":
        pre = str(fields.get("pre", "default"))
        pre = _ALIASES.get(pre, pre)
        if pre not in PRE_TOKENIZERS:
            known = ", ".join(sorted({*PRE_TOKENIZERS, *_ALIASES}))
            raise CheckpointError(f"{where}: tokenizer.ggml.pre {pre!r} is not supported; supported: {known}")
        backend = _byte_level(tokens, fields.get("merges", []), pre, where)
        add_bos = pre in ("llama-bpe", "tekken")
    elif kind == "llama":
        scores = fields.get("scores", [])
        if len(scores) != len(tokens):
            raise CheckpointError(f"{where}: tokenizer.ggml.scores has {len(scores)} entries, tokens {len(tokens)}")
        unknown = fields.get("unknown_token_id", 0)
        backend = _sentencepiece(tokens, scores, types, unknown, bool(fields.get("add_space_prefix", True)))
        add_bos = True
    else:
        raise CheckpointError(f"{where}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    # A control token must never be cut by the pre-tokenizer; user-defined tokens neither, but those are plain text.
    marked = (_CONTROL, _UNKNOWN) if kind == "llama" else (_CONTROL,)
    backend.add_special_tokens([_whole(t) for t, n in zip(tokens, types, strict=True) if n in marked])
    backend.add_tokens([_whole(t) for t, n in zip(tokens, types, strict=True) if n == _USER])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: fields.get(f"{name}_token_id") for role, name in names.items()}
    add_bos, add_eos = bool(fields.get("add_bos_token", add_bos)), bool(fields.get("add_eos_token", False))
    set_special_tokens(backend, ids["bos"] if add_bos else None, ids["eos"] if add_eos else None)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, special_tokens=ids, eos_token_ids=eos_token_ids, chat_template=template)


def _whole(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: str, where: str) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _WHOLE_WORDS)  # pyright: ignore[reportArgumentType]
    except Exception as error:
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens and merges do not fit together: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre]())  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown: int, space_prefix: bool
) -> tokenizers.Tokenizer:
    """SentencePiece BPE: adjacent pieces whose join has the best score merge first; unknown characters become bytes."""
    vocab = {token: i for i, token in enumerate(tokens)}
    mergeable = {t: s for t, s, n in zip(tokens, scores, types, strict=True) if n in (_NORMAL, _USER)}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score in mergeable.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    pairs = [(left, right) for *_, left, right in merges]
    model = models.BPE(vocab=vocab, merges=pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    mark = "\u2581"
    prefix = [normalizers.Prepend(mark)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", mark)])  # pyright: ignore[reportAttributeAccessIssue]
    steps: list[Any] = [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if space_prefix else []))  # pyright: ignore[reportAttributeAccessIssue]
    return backend
