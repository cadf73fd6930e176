"""The tokenizer: text to ids and back, special tokens, chat templates. Built without torch from any kind of checkpoint."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.weights.chat_template import render_chat

ROLES = ("bos", "eos", "unk", "pad")
"""Special tokens that a chat template may name as ``<role>_token``."""


class Tokenizer:
    """A ``tokenizers`` backend with the model's special tokens and chat template.

    Attributes:
        backend: the wrapped ``tokenizers.Tokenizer``.
        vocab_size: number of ids it knows (highest id + 1). A model's output layer may be wider.
        bos_token_id, eos_token_id, pad_token_id: ids or None.
        eos_token_ids: every id that ends a generation (tokenizer, model config and generation config together).
        chat_template: Jinja source or None.
        adds_bos: whether :meth:`encode` puts BOS first.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, int | None],
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ):
        """Wrap a backend whose post-processor already adds what :meth:`encode` shall add.

        Args:
            backend: the tokenizer proper.
            special_tokens: role ("bos", "eos", "unk", "pad") -> id.
            eos_token_ids: further ids that end a generation.
            chat_template: Jinja source.
        """
        self.backend = backend
        self._vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values(), default=-1) + 1
        ids = {role: special_tokens.get(role) for role in ROLES}
        for role, token in ids.items():
            if token is not None and backend.id_to_token(token) is None:
                raise CheckpointError(f"tokenizer: {role} token id {token} is not in its vocabulary of {self.vocab_size}")
        self.bos_token_id, self.eos_token_id, self.pad_token_id = ids["bos"], ids["eos"], ids["pad"]
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = frozenset({*own, *eos_token_ids})
        self.chat_template = chat_template
        self._names = {f"{role}_token": backend.id_to_token(i) for role, i in ids.items() if i is not None}
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self.adds_bos = self.bos_token_id is not None and backend.encode("").ids[:1] == [self.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with ``add_special_tokens`` also what the model wants around it (usually one BOS)."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Bytes that are no valid UTF-8 become U+FFFD; ids without a token give no text."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_piece(self, token_id: int) -> str | None:
        """The vocabulary entry of an id (byte-level and SentencePiece symbols as stored), or None."""
        return self.backend.id_to_token(token_id)

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        return self._vocab.get(piece)

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a control token (left out of decoded text by default)."""
        return token_id in self._special

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a conversation; arguments and errors as in :meth:`apply_chat_template`."""
        if self.chat_template is None:
            raise ConfigError(
                "this model has no chat template; use a plain prompt, or give a model whose tokenizer has one "
                "(an instruction-tuned version)"
            )
        template = variables.pop("chat_template", None) or self.chat_template
        return render_chat(template, messages, add_generation_prompt=add_generation_prompt, **(self._names | variables))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, with exactly one BOS in front if the tokenizer adds BOS.

        A template may write BOS itself or leave it to the tokenizer; in both cases there is one.

        Args:
            messages: each with ``role`` and ``content``.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: more names for the template, e.g. ``tools``.

        Returns:
            The prompt's token ids.

        Raises:
            ConfigError: there is no chat template, or it is broken.
            InvalidRequestError: a message is malformed, or the template refuses the conversation.
        """
        text = self.render_chat(messages, add_generation_prompt, **variables)
        ids = self.encode(text, add_special_tokens=False)
        bos = self.bos_token_id
        if bos is not None and (self.adds_bos or ids[:2] == [bos, bos]):
            start = next((i for i, token in enumerate(ids) if token != bos), len(ids))
            ids = [bos, *ids[start:]]
        return ids

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` that :func:`read_tokenizer` and ``transformers`` read back."""
        self.backend.save(str(directory / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._names}
        settings["clean_up_tokenization_spaces"] = False
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")


def set_special_tokens(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Make ``backend`` put these ids (None: nothing) before and after every encoded text, replacing its post-processor."""
    if bos is None and eos is None:
        backend.post_processor = processors.Sequence([])  # pyright: ignore[reportAttributeAccessIssue]
        return
    pairs = [(backend.id_to_token(i), i) for i in dict.fromkeys((bos, eos)) if i is not None]
    names = {i: name for name, i in pairs}
    single = [names[bos]] if bos is not None else []
    single += ["$A"] + ([names[eos]] if eos is not None else [])
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)  # pyright: ignore[reportAttributeAccessIssue]


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds tokenizer files."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def read_tokenizer(directory: Path, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
    """Read a Hugging Face tokenizer directory.

    Args:
        directory: holds ``tokenizer.json`` (read directly), or a SentencePiece model that ``transformers`` converts; and
            ``tokenizer_config.json`` with special tokens and the chat template (or ``chat_template.jinja``).
        eos_token_ids: further ids that end a generation.

    Returns:
        The tokenizer.

    Raises:
        CheckpointError: no or broken tokenizer files.
    """
    settings = _read_json(directory / "tokenizer_config.json")
    if (directory / "tokenizer.json").is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:
            raise CheckpointError(f"{directory / 'tokenizer.json'}: cannot be read as a tokenizer: {error}") from error
        extra = _read_json(directory / "special_tokens_map.json")
    else:
        backend, extra = _convert(directory)
    backend.no_padding()
    backend.no_truncation()
    ids: dict[str, int | None] = {}
    for role in ROLES:
        token = settings.get(f"{role}_token", extra.get(f"{role}_token"))
        name = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(name, str) and (found := backend.token_to_id(name)) is not None:
            ids[role] = found
    if "add_bos_token" in settings or "add_eos_token" in settings:
        wanted = {role: bool(settings.get(f"add_{role}_token")) for role in ("bos", "eos")}
        set_special_tokens(backend, *(ids.get(role) if wanted[role] else None for role in ("bos", "eos")))
    return Tokenizer(backend, special_tokens=ids, eos_token_ids=eos_token_ids, chat_template=_template(directory, settings))


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _convert(directory: Path) -> tuple[tokenizers.Tokenizer, Mapping[str, Any]]:
    """The tokenizer of a directory without ``tokenizer.json``, and its special tokens by role, as ``transformers`` has them."""
    from transformers import AutoTokenizer  # takes seconds to import, and only old checkpoints need it

    try:
        converted = AutoTokenizer.from_pretrained(directory, use_fast=True)
    except Exception as error:
        raise CheckpointError(
            f"{directory}: no tokenizer.json, and its other tokenizer files cannot be converted: {error}. "
            "SentencePiece models need the packages sentencepiece and protobuf"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"{directory}: its tokenizer ({type(converted).__name__}) has no tokenizer.json form")
    return backend, {name: str(token) for name, token in converted.special_tokens_map.items() if isinstance(token, str)}
