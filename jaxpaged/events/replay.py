"""Replays one run of a page-event log: rebuilds every block table and reference count, and rejects what cannot have been.

The replay trusts nothing it can compute: counts, free and cached pages, the fill of every page and the per-step summary come
from the events alone and are compared with what the log claims. What each event means is defined in
``jaxpaged.scheduler.events``; the rules are listed in ``docs/events.md``.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

from jaxpaged.events.pool import Pool
from jaxpaged.events.reader import LogViolation, read_events
from jaxpaged.scheduler.events import KINDS

_ENTRY = ("seq", "logical", "page", "before", "after")
REQUIRED: dict[str, tuple[str, ...]] = {
    "admit": ("request",),
    "alloc": _ENTRY,
    "share": ("seq", "logical", "before", "after", "why"),
    "copy": (*_ENTRY, "src", "why"),
    "free": ("seq", "logical", "before", "after"),
    "evict": (),
    "swap_out": (*_ENTRY, "host"),
    "swap_in": (*_ENTRY, "host"),
    "offload": ("page", "host"),
    "restore": (*_ENTRY, "host"),
    "preempt": ("seq", "why"),
    "finish": ("seq", "why"),
    "abort": ("request",),
    "pin": ("page", "before", "after"),
    "unpin": ("page", "before", "after"),
    "step": ("tokens", "used", "shared", "cached", "free", "running", "waiting"),
}
"""Fields each kind must have."""

SHARE_REASONS = ("fork", "beam", "request_fork", "prefix", "pinned")
"""Conditions under which a page may be shared."""

_TEXT = ("request", "why")
_COUNTS = ("tokens", "used", "shared", "cached", "free", "wasted", "running", "waiting", "prompt")
_NUMBERS = frozenset(("step", "t_us", "seq", "logical", "page", "src", "host", "before", "after", *_COUNTS))


class Replay(Pool):
    """One run of a log, applied event by event.

    Attributes:
        step: the latest step.
        finished: sequences that ended.
        writes: whether ``step`` events list their writes; without them fills and waste are unknown.
    """

    def __init__(self, line: int, header: dict[str, Any]) -> None:
        super().__init__(line, header)
        self.step = 0
        self.finished: set[int] = set()
        self.writes = True
        self._window: int | None = header.get("sliding_window")
        self._t_us = 0
        self._planned = -1
        self._copies: list[tuple[int, int, int, int]] = []  # (line, seq, logical, page) since the last step event
        self._came_from: dict[int, int] = {}  # page -> the host page it was swapped in from
        self._went_to: dict[int, int] = {}  # host page -> the page that was swapped out to it
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {kind: getattr(self, f"_on_{kind}") for kind in KINDS}

    def apply(self, line: int, event: dict[str, Any]) -> None:
        """Applies one event.

        Args:
            line: its line number, for messages.
            event: the parsed line.

        Raises:
            LogViolation: the event breaks a rule. The replay may stand part-way through it and must not go on.
        """
        self._line = line
        kind = event.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            self.fail("fields", f"kind: got {kind!r}, wants one of {', '.join(sorted(KINDS))}")
        self._check_fields(kind, event)
        if event["step"] < self.step:
            self.fail("step-order", f"step goes back from {self.step} to {event['step']}")
        if event["t_us"] < self._t_us:
            self.fail("time-order", f"t_us goes back from {self._t_us} to {event['t_us']}")
        self.step, self._t_us = event["step"], event["t_us"]
        seq, request = event.get("seq"), event.get("request")
        if seq is not None:
            if seq in self.finished:
                self.fail("finished", f"sequence {seq} has ended and takes no further event")
            if request is not None and self.request_of.setdefault(seq, request) != request:
                self.fail("request", f"sequence {seq} belongs to {self.request_of[seq]!r}, the log says {request!r}")
        self._handlers[kind](event)
        self.stats.count(kind, event)

    def end(self) -> "Replay":
        """Closes the run's totals. Returns: itself."""
        self.stats.close(self.filled)
        return self

    def _check_fields(self, kind: str, event: dict[str, Any]) -> None:
        for name in ("step", "t_us", *REQUIRED[kind]):
            if name not in event:
                self.fail("fields", f"{kind}: lacks {name}")
        for name, value in event.items():
            number = name in _NUMBERS and not (name == "cached" and isinstance(value, bool))
            if number and (type(value) is not int or value < 0):
                self.fail("fields", f"{kind}.{name}: got {value!r}, wants an integer >= 0")
            if name in _TEXT and not isinstance(value, str):
                self.fail("fields", f"{kind}.{name}: got {value!r}, wants text")

    def _on_admit(self, event: dict[str, Any]) -> None:
        self.stats.admitted(event["request"])

    def _on_alloc(self, event: dict[str, Any]) -> None:
        self.require_free(event["page"])
        self.check_counts(event, 0, 1)
        self.set_entry(event["seq"], event["logical"], event["page"], new=True)

    def _on_share(self, event: dict[str, Any]) -> None:
        page, why, seq = event.get("page"), event["why"], event["seq"]
        if page is None:
            self._share_host_entry(event)
            return
        self.check_page(page)
        before = self.ref.get(page, 0)
        if before == 0 and page not in self.cached:
            self.fail("free-page", f"page {page} is free and holds nothing to share")
        self.check_counts(event, before, before + 1)
        if why not in SHARE_REASONS:
            self.fail("why", f"share: got {why!r}, wants one of {', '.join(SHARE_REASONS)}")
        if why in ("fork", "beam"):
            request = self.request_of.get(seq)
            owners = {self.request_of.get(s) for s in self.owners.get(page, ())}
            if before == 0 or (request is not None and None not in owners and request not in owners):
                self.fail("isolation", f"{why}: no sequence of request {request!r} names page {page}")
        elif why == "request_fork":
            if before == 0:
                self.fail("isolation", f"{why}: no sequence names page {page}")
        elif self.writes and self.stats.steps and self.filled.get(page, 0) != self.page_size:
            self.fail(
                "partial-page", f"{why} hit on page {page}, which has {self.filled.get(page, 0)} of {self.page_size} tokens"
            )
        if why == "pinned" and not self.pins.get(page):
            self.fail("pin", f"share: page {page} is not pinned")
        self.cached.discard(page)
        tokens = event["logical"] * self.page_size + self.filled.get(page, 0)
        self.set_entry(seq, event["logical"], page, tokens=min(tokens, event.get("tokens", tokens)))

    def _share_host_entry(self, event: dict[str, Any]) -> None:
        host = event.get("host", -1)
        before = self.host_ref.get(host, 0)
        if not before:
            self.fail("host-page", f"share: no sequence has host page {host}")
        if event["why"] not in ("fork", "beam"):
            self.fail("why", f"share of a host page: got {event['why']!r}, wants fork or beam")
        self.check_counts(event, before, before + 1)
        self.set_host_entry(event["seq"], event["logical"], host)

    def _on_copy(self, event: dict[str, Any]) -> None:
        seq, logical, src, page = event["seq"], event["logical"], event["src"], event["page"]
        self.check_entry(seq, logical, src)
        before = self.ref[src]
        if before < 2:
            self.fail("needless-copy", f"page {src} has one owner, which writes in place")
        self.check_counts(event, before, before - 1)
        self.require_free(page)
        self.drop_entry(seq, logical, cached=False)
        self.set_entry(seq, logical, page, new=True)
        self._copies.append((self._line, seq, logical, page))

    def _on_free(self, event: dict[str, Any]) -> None:
        seq, logical, page, host = event["seq"], event["logical"], event.get("page"), event.get("host")
        if page is not None:
            self.check_entry(seq, logical, page)
            self.check_counts(event, self.ref[page], self.ref[page] - 1)
            self.drop_entry(seq, logical, cached=bool(event.get("cached")))
        elif host is not None:
            self.check_host_entry(seq, logical, host)
            self.check_counts(event, self.host_ref[host], self.host_ref[host] - 1)
            self.drop_host_entry(seq, logical)
        else:
            self.fail("fields", "free: wants page or host")
        self.forget_if_empty(seq)

    def _on_evict(self, event: dict[str, Any]) -> None:
        page, host = event.get("page"), event.get("host")
        if host is not None:
            if host not in self.offloaded:
                self.fail("evict", f"host page {host} is not offloaded")
            self.offloaded.remove(host)
            self.host_filled.pop(host, None)
        elif page is not None:
            self.require_cached(page, "evict")
            self.cached.remove(page)
        else:
            self.fail("fields", "evict: wants page or host")

    def _on_swap_out(self, event: dict[str, Any]) -> None:
        seq, logical, page, host = event["seq"], event["logical"], event["page"], event["host"]
        self.check_entry(seq, logical, page)
        self.check_counts(event, self.ref[page], self.ref[page] - 1)
        filled = self.filled.get(page, 0)
        if host not in self.host_ref:
            self.take_host_page(host)
            self.host_filled[host] = filled
            self._went_to[host] = page
        elif self._went_to[host] != page:
            self.fail("host-page", f"host page {host} holds page {self._went_to[host]}, not {page}")
        self.drop_entry(seq, logical, cached=bool(event.get("cached")))
        self.set_host_entry(seq, logical, host)
        self.stats.host_used(len(self.host_ref) + len(self.offloaded))

    def _on_swap_in(self, event: dict[str, Any]) -> None:
        seq, logical, page, host = event["seq"], event["logical"], event["page"], event["host"]
        self.check_host_entry(seq, logical, host)
        before = self.ref.get(page, 0)
        if before == 0:
            self.require_free(page)
        elif self._came_from.get(page) != host:
            self.fail("host-page", f"swap_in: page {page} is owned and did not come from host page {host}")
        self.check_counts(event, before, before + 1)
        self.drop_host_entry(seq, logical)
        self.set_entry(seq, logical, page, new=not before)
        self._came_from[page] = host

    def _on_offload(self, event: dict[str, Any]) -> None:
        page, host = event["page"], event["host"]
        self.require_cached(page, "offload")
        self.take_host_page(host)
        self.cached.remove(page)
        self.offloaded.add(host)
        self.host_filled[host] = self.filled.get(page, 0)
        self.stats.host_used(len(self.host_ref) + len(self.offloaded))

    def _on_restore(self, event: dict[str, Any]) -> None:
        page, host = event["page"], event["host"]
        if host not in self.offloaded:
            self.fail("host-page", f"restore: host page {host} is not offloaded")
        self.require_free(page)
        self.check_counts(event, 0, 1)
        tokens = event["logical"] * self.page_size + self.host_filled.pop(host)
        self.set_entry(event["seq"], event["logical"], page, new=True, tokens=tokens)
        self.offloaded.remove(host)

    def _on_preempt(self, event: dict[str, Any]) -> None:
        if event["why"] not in ("recompute", "swap"):
            self.fail("why", f"preempt: got {event['why']!r}, wants recompute or swap")

    def _on_finish(self, event: dict[str, Any]) -> None:
        self._require_nothing_held(event["seq"], "finish")
        self.finished.add(event["seq"])
        self.stats.ended(event["seq"], event.get("tokens"))

    def _on_abort(self, event: dict[str, Any]) -> None:
        for seq in [*self.tables, *self.host_tables]:
            if self.request_of.get(seq) == event["request"]:
                self._require_nothing_held(seq, "abort")

    def _require_nothing_held(self, seq: int, what: str) -> None:
        held = sorted({*self.tables.get(seq, {}).values()})
        host = sorted({*self.host_tables.get(seq, {}).values()})
        if held or host:
            self.fail("held", f"{what}: sequence {seq} still holds pages {held} and host pages {host}")

    def _on_pin(self, event: dict[str, Any]) -> None:
        page, pins = event["page"], self.pins.get(event["page"], 0)
        self.check_page(page)
        if page not in self.ref and page not in self.cached:
            self.fail("pin", f"page {page} is free")
        self.check_counts(event, pins, pins + 1)
        self.pins[page] = pins + 1

    def _on_unpin(self, event: dict[str, Any]) -> None:
        page, pins = event["page"], self.pins.get(event["page"], 0)
        if not pins:
            self.fail("pin", f"unpin: page {page} is not pinned")
        self.check_counts(event, pins, pins - 1)
        if pins == 1:
            del self.pins[page]
        else:
            self.pins[page] = pins - 1

    def _on_step(self, event: dict[str, Any]) -> None:
        if event["step"] <= self._planned:
            self.fail("step-order", f"step {event['step']} is planned twice")
        self._planned = event["step"]
        writes = event.get("writes")
        self.writes = self.writes and writes is not None
        if self.writes:
            self._apply_writes(event)
        self._copies.clear()
        used = len(self.ref)
        found: dict[str, int | None] = {
            "used": used,
            "shared": self.num_shared,
            "cached": len(self.cached),
            "free": self.num_pages - 1 - used - len(self.cached) if self.num_pages else None,
            "wasted": used * self.page_size - self.filled_used if self.writes else None,
        }
        for name, value in found.items():
            if value is not None and event.get(name, value) != value:
                self.fail("summary", f"step {event['step']}: {name} {event[name]}, the tables say {value}")
        self.stats.planned(event, used, self.num_entries, len(self.tables), self.filled_used)

    def _apply_writes(self, event: dict[str, Any]) -> None:
        tokens, written = 0, set()
        for entry in event["writes"]:
            if not (isinstance(entry, list) and len(entry) == 3 and all(type(v) is int and v >= 0 for v in entry)):
                self.fail("fields", f"step.writes: got {entry!r}, wants [seq, position, tokens]")
            seq, position, count = entry
            if seq in self.finished or seq in written:
                self.fail(
                    "finished" if seq in self.finished else "fields", f"step.writes: sequence {seq} may not write (again)"
                )
            self.write(seq, position, count, self._window)
            self.stats.written(seq, position, count)
            written.add(seq)
            tokens += count
        if tokens != event["tokens"]:
            self.fail("summary", f"step {event['step']}: tokens {event['tokens']}, its writes add up to {tokens}")
        for name, got in (("max_num_batched_tokens", tokens), ("max_num_seqs", len(written))):
            if got > (self.header.get(name) or got):
                self.fail("limits", f"step {event['step']}: {got} exceeds {name} {self.header[name]}")
        starts = {seq: position // self.page_size for seq, position, _ in event["writes"]}
        for line, seq, logical, page in self._copies:
            if self.tables.get(seq, {}).get(logical) == page and starts.get(seq) != logical:
                raise LogViolation(
                    line, "needless-copy", f"sequence {seq} does not write into the copied page {page} in this step"
                )


def replay(path: str | os.PathLike[str], *, each_step: Callable[[Replay], None] | None = None) -> Iterator[Replay]:
    """Replays a log run by run.

    Args:
        path: a log written by ``EventLog``.
        each_step: called after every ``step`` event, with the tables as the device sees them in that step.

    Yields:
        Each run after its last event; ``stats.torn`` tells whether it was cut short.

    Raises:
        LogViolation: the first broken rule.
        OSError: the file cannot be read.
    """
    run: Replay | None = None
    for line, event in read_events(path):
        if event.get("kind") == "torn":
            if run is not None:
                run.stats.torn = line
        elif run is None or event.get("kind") == "header":
            if run is not None:
                yield run.end()
            run = Replay(line, event)
        else:
            run.apply(line, event)
            if each_step is not None and event["kind"] == "step":
                each_step(run)
    if run is None:
        raise LogViolation(1, "header", "the log is empty")
    yield run.end()
