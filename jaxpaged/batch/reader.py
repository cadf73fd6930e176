"""Reads the input file line by line: bytes to ``Item`` or ``BadLine``, with true line numbers and little memory.

Rules: lines end at ``\\n`` (a ``\\r`` before it is dropped, the last line needs none); blank lines are skipped and get no
record; a byte-order mark is dropped; every other line yields exactly one entry, in order. Of several lines with one id
the first is served and each later one is an error that names the first.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxpaged.batch.formats import LineFormat
from jaxpaged.batch.items import BadLine, Item
from jaxpaged.errors import ConfigError

BOM = b"\xef\xbb\xbf"
SNIFFED_LINES = 100


def raw_lines(path: str | os.PathLike[str], on_bytes: Callable[[int], None] | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields ``(line number from 1, content)`` of every line that is not blank.

    Args:
        path: the file.
        on_bytes: called with each line's length in bytes, blank ones too (for progress).

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if on_bytes is not None:
                    on_bytes(len(raw))
                content = raw.removeprefix(BOM) if number == 1 else raw
                content = content.removesuffix(b"\n").removesuffix(b"\r")
                if content.strip():
                    yield number, content
    except FileNotFoundError as error:
        raise ConfigError(f"input.path: {os.fspath(path)!r} does not exist (relative paths start at {os.getcwd()})") from error
    except OSError as error:
        raise ConfigError(f"input.path: cannot read {os.fspath(path)!r}: {error.strerror or error}") from error


def survey(path: str | os.PathLike[str]) -> tuple[int, str]:
    """One pass over the file: how many lines are not blank, and the SHA-256 of its bytes in hex.

    Raises:
        ConfigError: the file cannot be read.
    """
    digest, count = hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                digest.update(raw)
                count += bool((raw.removeprefix(BOM) if number == 1 else raw).strip())
    except FileNotFoundError as error:
        raise ConfigError(f"input.path: {os.fspath(path)!r} does not exist (relative paths start at {os.getcwd()})") from error
    except OSError as error:
        raise ConfigError(f"input.path: cannot read {os.fspath(path)!r}: {error.strerror or error}") from error
    return count, digest.hexdigest()


def detect_format(path: str | os.PathLike[str]) -> str:
    """Tells "openai", "jsonl" and "text" apart by the first line that is not blank.

    A JSON object with ``custom_id``, or with ``url`` and ``body``, is an OpenAI batch line; any other object is jsonl. In a
    file named ``.jsonl``, ``.ndjson`` or ``.json`` damaged lines are passed over and the first object decides. A file whose
    first line starts with ``{`` is taken for (damaged) jsonl; what remains is text.
    """
    named_json = Path(path).suffix.lower() in (".jsonl", ".ndjson", ".json")
    first: bytes | None = None
    for _, (_, content) in zip(range(SNIFFED_LINES if named_json else 1), raw_lines(path), strict=False):
        first = content if first is None else first
        value = _decode_json(0, content)
        if isinstance(value, dict):
            return "openai" if "custom_id" in value or {"url", "body"} <= value.keys() else "jsonl"
    return "jsonl" if named_json or (first is not None and first.lstrip().startswith(b"{")) else "text"


def read_items(
    path: str | os.PathLike[str], line_format: LineFormat, on_bytes: Callable[[int], None] | None = None
) -> Iterator[Item | BadLine]:
    """Yields one entry for every line that is not blank, in order.

    Args:
        path: the input file.
        line_format: how a line is understood.
        on_bytes: called with each line's length in bytes.

    Raises:
        ConfigError: the file cannot be read.
    """
    first_lines: dict[str, int] = {}
    for number, content in raw_lines(path, on_bytes):
        entry = parse_line(number, content, line_format)
        if entry.id is not None and line_format.wants_json:  # text lines have their numbers, which differ
            first = first_lines.setdefault(str(entry.id), number)
            if first != number:
                entry = BadLine(number, entry.id, "duplicate_id", f"id {entry.id!r} was already used on line {first}")
        yield entry


def parse_line(number: int, content: bytes, line_format: LineFormat) -> Item | BadLine:
    """One line's bytes to its entry.

    Args:
        number: line number, from 1.
        content: the line without its line end, not blank.
        line_format: how it is understood.
    """
    if line_format.wants_json:
        value = _decode_json(number, content)
        try:
            return value if isinstance(value, BadLine) else line_format.parse(number, value)
        except RecursionError:  # deeper than what a check or a message can walk, though not than what the JSON reader can
            return BadLine(number, None, "invalid_json", "not JSON this reader takes: nested too deeply")
    try:
        return line_format.parse(number, content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadLine(number, None, "invalid_utf8", f"byte {error.start + 1} of the line is not UTF-8")


def _decode_json(number: int, content: bytes) -> dict[str, Any] | BadLine:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadLine(number, None, "invalid_utf8", f"byte {error.start + 1} of the line is not UTF-8")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        if "\\ud" in text.lower():  # an escaped half of a surrogate pair has no UTF-8 form and could not be written back
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        return BadLine(number, None, "invalid_json", f"not JSON: {error.msg} at column {error.colno}")
    except UnicodeEncodeError:
        return BadLine(number, None, "invalid_json", "not valid text: a \\uD800-\\uDFFF escape without its other half")
    except RecursionError:
        return BadLine(number, None, "invalid_json", "not JSON this reader takes: nested too deeply")
    except ValueError as error:
        return BadLine(number, None, "invalid_json", f"not JSON: {error}")
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")
        return BadLine(number, None, "not_an_object", f"got {kind}, wants a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
