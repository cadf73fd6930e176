"""What an existing output file already holds, checked against the input record by record."""

import collections
import dataclasses
import json
from collections.abc import Iterator
from typing import NoReturn

from jaxpaged.batch.errors import JobError
from jaxpaged.batch.formats import Identity, LineFormat
from jaxpaged.batch.items import BadLine, Item


@dataclasses.dataclass
class Done:
    """The part of a job that is on disk.

    Attributes:
        num_records: whole records.
        size_bytes: where the last whole record ends.
        torn_bytes: bytes after it, of a record cut off in the middle.
        errors: error records among them, by kind.
    """

    num_records: int = 0
    size_bytes: int = 0
    torn_bytes: int = 0
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def scan_output(path: str, entries: Iterator[Item | BadLine], line_format: LineFormat) -> Done:
    """Walks the records and the input side by side and leaves ``entries`` at the first line without a record.

    Args:
        path: the output file.
        entries: the input's entries from the start; one is taken for each record.
        line_format: how records are written.

    Raises:
        JobError: a record is damaged elsewhere than at the end, or belongs to no line or another one.
    """
    done = Done()
    try:
        with open(path, "rb") as file:
            raw = file.readline()
            while raw:
                following = file.readline()
                identity = _identity(raw, line_format)
                if identity is None:
                    if following:
                        _refuse(path, done.num_records + 1, "is no record of this job")
                    done.torn_bytes = len(raw)
                    break
                entry = next(entries, None)
                if entry is None:
                    _refuse(path, done.num_records + 1, "has no input line: the input is shorter than the output")
                _compare(path, done.num_records + 1, identity, entry)
                done.num_records += 1
                done.size_bytes += len(raw)
                if identity.error_kind is not None:
                    done.errors[identity.error_kind] += 1
                raw = following
    except FileNotFoundError:
        return done
    except OSError as error:
        raise JobError(f"output.path: cannot read {path!r}: {error.strerror}") from error
    return done


def _identity(raw: bytes, line_format: LineFormat) -> Identity | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        return line_format.identity(json.loads(raw))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _compare(path: str, number: int, identity: Identity, entry: Item | BadLine) -> None:
    same = identity.id == entry.id and identity.line in (None, entry.line)
    if isinstance(entry, BadLine):
        same = same and identity.error_kind == entry.kind
    if not same:
        _refuse(path, number, f"(id {identity.id!r}) does not belong to input line {entry.line} (id {entry.id!r})")


def _refuse(path: str, number: int, why: str) -> NoReturn:
    raise JobError(f"--resume: record {number} of {path!r} {why}; restore the file, or start over with --overwrite")
