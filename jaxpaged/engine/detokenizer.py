"""Text from tokens: whole for finished sequences, growing for streamed ones.

The streamed text is always a prefix of the final text: characters whose bytes have not all arrived are held back, and pieces
are decoded together with enough of their left neighbours that joining rules (spaces, byte fallback) apply.
"""

import dataclasses

from jaxpaged.weights.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_UTF8_BYTES = 4


@dataclasses.dataclass(slots=True)
class _Stream:
    text: str = ""
    start: int = 0  # first token of the window that is decoded again
    done: int = 0  # tokens whose text is in ``text``


class Detokenizer:
    """Keeps the growing text of streamed sequences.

    Args:
        tokenizer: of the model; None gives empty texts.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._streams: dict[int, _Stream] = {}

    def final_text(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of a finished sequence (its stop token left out by the caller)."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def growing_text(self, seq_id: int, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text known for sure so far of a running sequence.

        Args:
            seq_id: the sequence.
            token_ids: all its generated tokens so far.
        """
        if self._tokenizer is None:
            return ""
        stream = self._streams.setdefault(seq_id, _Stream())

        def decode(ids: list[int]) -> str:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)  # type: ignore[union-attr]

        if stream.done < len(token_ids):
            old = decode(token_ids[stream.start : stream.done])
            new = decode(token_ids[stream.start :])
            waiting = len(token_ids) - stream.done
            incomplete = new.endswith(_REPLACEMENT) and waiting < _MAX_UTF8_BYTES
            if len(new) > len(old) and not incomplete and new.startswith(old):
                stream.text += new[len(old) :]
                stream.start, stream.done = stream.done, len(token_ids)
        return stream.text

    def forget(self, seq_id: int) -> None:
        """Drops the state of a sequence that has ended."""
        self._streams.pop(seq_id, None)
