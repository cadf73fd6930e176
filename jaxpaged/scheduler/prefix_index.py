"""Finds pages by what they hold: equal prompt beginnings share pages.

The key of a page is the SHA-256 of a length-prefixed, tagged encoding of its parent's key, its tokens and the extra keys
(salt, format of the pool). The chain through the parent makes a key stand for the whole beginning, so the same words after
another beginning have another key. Keys are the same in every process. Nothing rests on the hash alone: parent, position
and tokens are compared on a hit.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

ROOT_KEY = b"\0" * 32
"""Parent key of a sequence's first page."""

_LENGTH = struct.Struct("<Q")


def _field(tag: bytes, payload: bytes) -> bytes:
    return tag + _LENGTH.pack(len(payload)) + payload


def extra_keys(*, cache_salt: str = "", kv_dtype: str = "", adapter: str = "") -> bytes:
    """Encodes what else must agree for two pages to be the same, each under its own tag.

    Args:
        cache_salt: tenants with different salts never share.
        kv_dtype: the pool's format.
        adapter: name of a weight adapter; "" for none.

    Returns:
        Bytes for ``page_key``: the same string under two names gives different bytes.
    """
    fields = ((b"S", cache_salt), (b"D", kv_dtype), (b"A", adapter))
    return b"".join(_field(tag, value.encode()) for tag, value in fields if value)


def page_key(parent: bytes, token_ids: Sequence[int], extras: bytes) -> bytes:
    """Key of one full page.

    Args:
        parent: key of the page before it in its sequence; ``ROOT_KEY`` for the first.
        token_ids: the page's tokens, each in [0, 2**63).
        extras: from ``extra_keys``.

    Returns:
        32 bytes.

    Source: SHA-256, FIPS 180-4.
    """
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.sha256(_field(b"P", parent) + _field(b"T", tokens) + extras).digest()


class PrefixEntry(NamedTuple):
    """What the index knows of one findable page.

    Attributes:
        page: the page (on the device, or on the host in the host's index).
        parent: key of the page before it.
        depth: logical index of the page in its sequence.
        token_ids: its tokens.
    """

    page: int
    parent: bytes
    depth: int
    token_ids: tuple[int, ...]


class PrefixIndex:
    """Maps keys to findable pages, both ways."""

    __slots__ = ("_by_key", "key_of")

    def __init__(self) -> None:
        self._by_key: dict[bytes, PrefixEntry] = {}
        self.key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def get(self, key: bytes) -> PrefixEntry | None:
        """The entry under ``key``, unverified; None where there is none."""
        return self._by_key.get(key)

    def find(self, key: bytes, parent: bytes, depth: int, token_ids: Sequence[int]) -> PrefixEntry | None:
        """The entry under ``key`` if it really is that page: parent, position and tokens are compared."""
        entry = self._by_key.get(key)
        if entry is None or entry.depth != depth or entry.parent != parent or entry.token_ids != tuple(token_ids):
            return None
        return entry

    def add(self, key: bytes, entry: PrefixEntry) -> bool:
        """Makes a page findable. Returns False, changing nothing, where the key is taken (the first page stays)."""
        if key in self._by_key:
            return False
        self._by_key[key] = entry
        self.key_of[entry.page] = key
        return True

    def remove(self, page: int) -> tuple[bytes, PrefixEntry]:
        """Makes a page unfindable. Returns what it was known as."""
        key = self.key_of.pop(page)
        return key, self._by_key.pop(key)

    def items(self) -> list[tuple[bytes, PrefixEntry]]:
        """All keys and entries, oldest first."""
        return list(self._by_key.items())
