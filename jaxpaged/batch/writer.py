"""The output file: whole records appended in order and forced to disk; nothing else ever touches it.

A record is one line. Records that are ready together share one write and one ``fsync``. If a write fails (disk full), the
file is cut back to its last whole record, so that it can always be resumed.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable
from typing import Any, Self

from jaxpaged.batch.errors import JobError


def encode_record(record: dict[str, Any]) -> bytes:
    """A record as one UTF-8 line, the same bytes for the same record."""
    return (json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n").encode("utf-8")


class RecordWriter:
    """Appends records to a file that only this process may write.

    Args:
        path: the output file; created if missing, its folders too, never truncated on opening.

    Raises:
        JobError: no permission, a file where a folder should be, or another job is writing the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JobError(_open_hint(path, error)) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise JobError(f"output.path: another job is writing {path!r}; wait for it or choose another path") from error
        except OSError:
            pass  # a file system without locks
        self._size = os.fstat(self._fd).st_size

    @property
    def size_bytes(self) -> int:
        """Length of the file: all of it whole records once ``truncate`` has mended the end."""
        return self._size

    def truncate(self, size_bytes: int) -> None:
        """Cuts the file to ``size_bytes``.

        Raises:
            JobError: the file system refuses.
        """
        if size_bytes == self._size:
            return
        try:
            os.ftruncate(self._fd, size_bytes)
            os.fsync(self._fd)
        except OSError as error:
            raise JobError(f"output.path: cannot cut {self.path!r} to {size_bytes} bytes: {error.strerror}") from error
        self._size = size_bytes

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Writes records and waits until they are on disk.

        Raises:
            JobError: the write failed; the file then ends after the last record written before this call.
        """
        data = b"".join(encode_record(record) for record in records)
        if not data:
            return
        if os.fstat(self._fd).st_nlink == 0:
            raise JobError(f"output.path: {self.path!r} was deleted while the job ran; its records are lost, start over")
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise JobError(
                f"cannot write {self.path!r}: {error.strerror}. The {self._size} bytes before stay valid: "
                "make room (or mend the cause) and run again with --resume"
            ) from error
        self._size += len(data)

    def close(self) -> None:
        """Releases the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_hint(path: str, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"output.path: no permission to write {path!r}; change its mode or choose another path"
    return f"output.path: cannot open {path!r}: {error.strerror}"
