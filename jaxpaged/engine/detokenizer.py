"""Text from tokens: whole for finished sequences, growing for streamed ones.

The streamed text is always a prefix of the final text: what later tokens may still change is held back, and pieces are
decoded together with enough of their left neighbours that joining rules (spaces, byte fallback) apply. Two things may change:
the U+FFFD that stands for a character whose bytes have not all arrived, and a run of byte-fallback tokens (``<0xE2>``), which
is decoded as one whole.
"""

import dataclasses
import re

from jaxpaged.weights.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclasses.dataclass(slots=True)
class _Stream:
    text: str = ""
    start: int = 0  # first token of the window that is decoded again
    clean: int = 0  # tokens up to here end a character; the next window starts here
    shown: str = ""  # the part of the window's text that is in ``text``


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
            skip_special_tokens: as in every other call for this sequence.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            return ""
        stream = self._streams.setdefault(seq_id, _Stream())
        end = len(token_ids)
        while end > stream.clean and self._is_open(token_ids[end - 1]):
            end -= 1
        if end <= stream.clean:
            return stream.text
        new = tokenizer.decode(token_ids[stream.start : end], skip_special_tokens=skip_special_tokens)
        sure = new.removesuffix(_REPLACEMENT)
        if len(sure) >= len(stream.shown) and sure.startswith(stream.shown):
            stream.text += sure[len(stream.shown) :]
            stream.shown = sure
            if sure == new:
                stream.start, stream.clean = stream.clean, end
                stream.shown = tokenizer.decode(token_ids[stream.start : end], skip_special_tokens=skip_special_tokens)
        return stream.text

    def _is_open(self, token_id: int) -> bool:
        """Whether a token at the end may be decoded otherwise once more follow: a byte, or a special one behind a byte."""
        assert self._tokenizer is not None
        piece = self._tokenizer.id_to_piece(token_id)
        return self._tokenizer.is_special(token_id) or (piece is not None and _BYTE_PIECE.fullmatch(piece) is not None)

    @property
    def seq_ids(self) -> list[int]:
        """Sequences with a growing text."""
        return list(self._streams)

    def forget(self, seq_id: int) -> None:
        """Drops the state of a sequence that has ended."""
        self._streams.pop(seq_id, None)
