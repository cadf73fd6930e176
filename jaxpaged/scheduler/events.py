r"""The page-event log: one line of JSON for everything that happens to a page, append-only.

A log is a sequence of lines. The first line of a run is its header; an existing file is continued with a new header, so one
file may hold several runs. Every other line is one event with ``step`` (the scheduler step), ``t_us`` (microseconds since
the log was opened, from a monotonic clock), ``kind`` and those of the fields below that apply. Everything but ``t_us``
depends on the requests and their seeds alone. There are no token ids and no text; request ids are the callers' own.

Fields: ``request`` (id), ``seq`` (sequence id), ``logical`` (index in the sequence's block table), ``page`` (device page),
``src`` (source page), ``host`` (host page), ``before`` and ``after`` (a page's reference count, or what the table says),
``why`` (the condition).

What each kind does to the block table ``table[seq]``, the reference counts ``ref[page]`` (number of table entries naming
the page), and the host pool. A page is *findable* while the prefix index has a key for it. It is *free* when ``ref`` is 0
and it is not findable, *cached* when ``ref`` is 0 and it is findable, *owned* when ``ref`` is 1, *shared* when ``ref`` > 1.

========== ==========================================================================================================
kind       meaning
========== ==========================================================================================================
admit      ``request`` enters the running set (again after a preemption). Optional: ``seq``, ``prompt`` (its tokens),
           ``cached`` (tokens found in the prefix index). Changes no table.
alloc      ``table[seq][logical] = page``; ``page`` was free; ``ref`` 0 -> 1.
share      ``table[seq][logical] = page``; ``ref`` before -> before + 1. ``why``: "fork" (same request, samples),
           "beam" (same request, beam search), "request_fork" (a request that continues another), "prefix" (prefix index),
           "pinned" (a pinned prefix). ``before`` is 0 only for a cached page. ``tokens`` optional: tokens the sequence
           has in shared pages, where that is less than the pages hold.
           With ``host`` in place of ``page``: a swapped-out entry is added (a beam forked while on the host); the counts
           are those of the host page.
copy       copy-on-write: ``table[seq][logical]`` changes from ``src`` to ``page``. ``before``, ``after`` are the counts
           of ``src`` (``after = before - 1``); ``page`` was free and gets count 1. ``why``: "fork", "beam" or "prefix".
free       ``table[seq][logical]`` (which is ``page``) is removed; ``ref`` before -> before - 1. ``cached`` true: the page
           stays findable (matters when ``after`` is 0). ``why`` optional: "finish", "preempt", "window", "beam", ...
           With ``host`` in place of ``page``: a swapped-out entry is removed; the counts are those of the host page.
evict      a cached, unpinned page loses its prefix key and so is free. ``ref`` is and stays 0. With ``host`` in place of
           ``page``: an offloaded host page loses its key and so is free.
swap_out   the table entry moves to the host: ``table[seq][logical]`` changes from device ``page`` to host page ``host``.
           ``before``, ``after`` are the counts of ``page`` (``after = before - 1``). Entries that name one device page
           move to one host page. ``cached`` as for ``free``.
swap_in    the reverse: ``table[seq][logical]`` changes from host page ``host`` to device ``page``. ``before``, ``after``
           are the counts of ``page``: 0 -> 1 for a free page, or before -> before + 1 where another entry of the same
           host page came back to ``page`` already. A host page that no entry names is free.
offload    a cached page's content moves to the free host page ``host``, which becomes findable; ``page`` becomes free.
restore    the findable host page ``host`` comes back: ``table[seq][logical] = page``; ``page`` was free, ``ref`` 0 -> 1,
           ``host`` becomes free. With ``why`` "hit".
preempt    ``seq`` leaves the running set; ``why`` is the mode, "recompute" or "swap". Its ``free`` or ``swap_out`` events
           carry the change.
finish     ``seq`` ended (``why``: "stop", "length", "error", "beam"); ``tokens`` optional: its total length. It holds no page.
abort      ``request`` was aborted. It holds no page.
pin        ``page`` may not be evicted; ``before``, ``after`` are its pins.
unpin      the reverse.
step       the step was planned: ``tokens`` (query tokens), ``used`` (pages with ``ref`` > 0), ``shared`` (``ref`` > 1),
           ``cached``, ``free`` (page 0 is none of them), ``wasted`` (slots of used pages that hold no token after this
           step's writes), ``running``, ``waiting`` (sequences or requests), and ``writes``: ``[[seq, position, tokens], ...]``,
           the positions each sequence's key-value pairs are appended at. Tables are as the device sees them in this step.
========== ==========================================================================================================

Events stand in the order in which the tables changed. Those between ``begin_step(s)`` and the ``step`` event of ``s`` plan
step ``s``; those after it (finishes, frees) follow from results and count to ``s`` as well.
"""

import json
import os
import time
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as _quote
from typing import Any

from jaxpaged.config import SchedulerConfig
from jaxpaged.errors import ConfigError, InvariantError

SCHEMA_VERSION = 1
"""Version of the format; a reader refuses any other."""

KINDS = frozenset(
    [
        "admit",
        "alloc",
        "share",
        "copy",
        "free",
        "evict",
        "swap_out",
        "swap_in",
        "offload",
        "restore",
        "preempt",
        "finish",
        "abort",
        "pin",
        "unpin",
        "step",
    ]
)
"""Every kind of event, the header aside."""

CONFIG_FIELDS = (
    "page_size",
    "num_pages",
    "num_host_pages",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_prefix_caching",
    "policy",
    "preemption_mode",
    "offload_cached_pages",
    "sliding_window",
)
"""Fields of ``SchedulerConfig`` that the header repeats."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


class EventLog:
    """Writes one run of page events to a file.

    Lines are buffered and reach the file once per step and when nothing is left to do (``flush``), so a crash loses at most
    the events of the step in progress.

    Args:
        path: file to append to; made if absent. A torn last line left by a crash is ended first.
        config: pool and page sizes for the header; None leaves them out (a checker then cannot check bounds).
        clock: monotonic time in seconds.

    Raises:
        ConfigError: the file cannot be opened for appending.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: SchedulerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        try:
            torn = _ends_torn(path)
            self._file = open(path, "a", encoding="ascii", newline="\n")  # noqa: SIM115 - lives as long as the log
        except OSError as error:
            raise ConfigError(f"event_log: cannot open {os.fspath(path)!r}: {error.strerror}") from error
        self._clock = clock
        self._start = clock()
        self._step = 0
        self.num_events = 0
        header: dict[str, Any] = {"kind": "header", "schema": SCHEMA_VERSION}
        if config is not None:
            header |= {name: getattr(config, name) for name in CONFIG_FIELDS}
        self._lines = ["\n" if torn else "", _encode(header), "\n"]
        self.flush()

    def begin_step(self, step: int) -> None:
        """Starts step ``step`` (>= 0, never going back): later events carry it, earlier ones reach the file."""
        self.flush()
        self._step = step

    def emit(
        self,
        kind: str,
        *,
        request: str | None = None,
        seq: int | None = None,
        logical: int | None = None,
        page: int | None = None,
        src: int | None = None,
        before: int | None = None,
        after: int | None = None,
        why: str | None = None,
        **extra: Any,
    ) -> None:
        """Appends one event; the module's table says what each kind means and which fields it wants.

        Args:
            kind: one of ``KINDS``.
            request: the caller's request id.
            seq: sequence id.
            logical: index in the sequence's block table.
            page: device page.
            src: source device page of a copy.
            before: the count before the event.
            after: the count after it.
            why: the condition.
            **extra: further fields of the kind (``host``, ``cached``, ``writes``, ...); JSON values, never token ids.

        Raises:
            InvariantError: ``kind`` is unknown.
        """
        if kind not in KINDS:
            raise InvariantError(f"event kind: got {kind!r}, wants one of {', '.join(sorted(KINDS))}")
        line = f'{{"step":{self._step},"t_us":{int((self._clock() - self._start) * 1e6)},"kind":"{kind}"'
        if request is not None:
            line += f',"request":{_quote(request)}'
        if seq is not None:
            line += f',"seq":{seq}'
        if logical is not None:
            line += f',"logical":{logical}'
        if page is not None:
            line += f',"page":{page}'
        if src is not None:
            line += f',"src":{src}'
        if before is not None:
            line += f',"before":{before}'
        if after is not None:
            line += f',"after":{after}'
        if why is not None:
            line += f',"why":{_quote(why)}'
        if extra:
            line += f",{_encode(extra)[1:-1]}"
        self._lines.append(line + "}\n")
        self.num_events += 1

    def close(self) -> None:
        """Writes what is buffered and closes the file. Closing twice is allowed."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def flush(self) -> None:
        """Writes what is buffered to the file.

        Raises:
            ConfigError: the file cannot be written (a full disk).
        """
        if self._lines:
            try:
                self._file.write("".join(self._lines))
                self._lines.clear()
                self._file.flush()
            except OSError as error:
                raise ConfigError(f"event_log: cannot write {os.fspath(self._path)!r}: {error.strerror}") from error


def _ends_torn(path: str | os.PathLike[str]) -> bool:
    """Whether the file exists and its last line has no end."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
