"""The pool as a log's events rebuild it: block tables, counts, fills, and the checked moves between states."""

from typing import Any, NoReturn

from jaxpaged.events.reader import LogViolation
from jaxpaged.events.stats import RunStats
from jaxpaged.scheduler.events import SCHEMA_VERSION


class Pool:
    """Block tables and reference counts of one run.

    Attributes:
        header: the run's header line.
        page_size: slots of a page.
        num_pages: pages in the pool, scratch page 0 included; 0 where the header names none (bounds are not checked then).
        num_host_pages: host pages.
        ref: ``ref[page]``, number of block-table entries naming the page; absent: 0.
        tables: ``tables[seq][logical] = page``; sequences without device pages are absent.
        host_tables: ``host_tables[seq][logical] = host page`` of swapped-out entries.
        host_ref: entries naming a host page; absent: 0.
        cached: findable pages that no table names.
        offloaded: findable host pages.
        pins: ``pins[page]``; absent: 0.
        filled: ``filled[page]``, slots of the page that hold a token; of a free page, a leftover.
        host_filled: likewise for host pages.
        lengths: ``lengths[seq]``, tokens of each sequence that have a slot, shared ones included.
        request_of: request of each sequence, where the log names it.
        num_shared: pages with more than one entry.
        num_entries: entries of all block tables, the logical pages.
        filled_used: slots with a token, over all pages with an entry.
        stats: totals of the run.
    """

    def __init__(self, line: int, header: dict[str, Any]) -> None:
        self._line = line
        if header.get("kind") != "header":
            self.fail("header", f"got {header.get('kind')!r}, wants the run's header first")
        if header.get("schema") != SCHEMA_VERSION:
            self.fail("header", f"schema: got {header.get('schema')!r}, this reader knows {SCHEMA_VERSION}")
        for name in ("page_size", "num_pages", "num_host_pages"):
            value = header.get(name, 0)
            if type(value) is not int or value < 0:
                self.fail("header", f"{name}: got {value!r}, wants an integer >= 0")
        if header.get("sliding_window") is not None and (
            type(header["sliding_window"]) is not int or header["sliding_window"] < 1
        ):
            self.fail("header", f"sliding_window: got {header['sliding_window']!r}, wants an integer >= 1 or null")
        self.header = header
        self.page_size: int = header.get("page_size", 0) or 1
        self.num_pages: int = header.get("num_pages", 0)
        self.num_host_pages: int = header.get("num_host_pages", 0)
        self.ref: dict[int, int] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.host_tables: dict[int, dict[int, int]] = {}
        self.host_ref: dict[int, int] = {}
        self.cached: set[int] = set()
        self.offloaded: set[int] = set()
        self.pins: dict[int, int] = {}
        self.filled: dict[int, int] = {}
        self.host_filled: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.request_of: dict[int, str] = {}
        self.num_shared = 0
        self.num_entries = 0
        self.filled_used = 0
        self.stats = RunStats(self.page_size, max(self.num_pages - 1, 0))
        self.owners: dict[int, set[int]] = {}
        self._place: dict[int, int] = {}  # page -> logical index its tokens belong to
        self._verified: dict[int, int] = {}  # seq -> position below which its pages are known to be full

    def fail(self, rule: str, detail: str) -> NoReturn:
        """Rejects the log at the current line."""
        raise LogViolation(self._line, rule, detail)

    def check_page(self, page: int) -> None:
        """A page a sequence may name: inside the pool, and not the scratch page."""
        if page == 0:
            self.fail("scratch-page", "page 0 is scratch and never owned")
        if self.num_pages and page >= self.num_pages:
            self.fail("page-range", f"page {page}: the pool has pages 0 to {self.num_pages - 1}")

    def check_entry(self, seq: int, logical: int, page: int) -> None:
        """``tables[seq][logical]`` is ``page``."""
        self.check_page(page)
        found = self.tables.get(seq, {}).get(logical)
        if found is None:
            self.fail("double-free", f"sequence {seq} has no page at logical {logical}, the log says {page}")
        if found != page:
            self.fail("table", f"sequence {seq} has page {found} at logical {logical}, the log says {page}")

    def check_counts(self, event: dict[str, Any], before: int, after: int) -> None:
        """The counts an event claims are those the replay has."""
        if (event["before"], event["after"]) != (before, after):
            what = f"{event['before']} -> {event['after']}, the tables say {before} -> {after}"
            self.fail("count", f"{event['kind']} of page {event.get('src', event.get('page'))}: count {what}")

    def require_free(self, page: int) -> None:
        """``page`` can be handed out: nobody names it and the prefix index does not know it."""
        self.check_page(page)
        if self.ref.get(page):
            self.fail("free-page", f"page {page} is handed out while {sorted(self.owners[page])} own it")
        if page in self.cached:
            self.fail("free-page", f"page {page} is handed out while cached, without an evict")

    def require_cached(self, page: int, what: str) -> None:
        """``page`` is cached and not pinned, so it may leave the prefix index."""
        self.check_page(page)
        if page not in self.cached:
            state = f"has {self.ref[page]} owners" if self.ref.get(page) else "is free"
            self.fail("evict", f"{what}: page {page} {state}, wants a cached page")
        if self.pins.get(page):
            self.fail("pin", f"{what}: page {page} is pinned")

    def take_host_page(self, host: int) -> None:
        """``host`` is a free page inside the host pool."""
        if not 0 <= host < self.num_host_pages:
            self.fail("host-bound", f"host page {host}: the host pool has {self.num_host_pages} pages")
        if host in self.host_ref or host in self.offloaded:
            self.fail("host-page", f"host page {host} is taken")

    def set_entry(self, seq: int, logical: int, page: int, *, new: bool = False, tokens: int = 0) -> None:
        """Names ``page`` in ``tables[seq][logical]``.

        Args:
            seq: the sequence.
            logical: index in its table.
            page: the page; checked by the caller.
            new: the page has new content, so its fill is that of this sequence.
            tokens: tokens the sequence has with this page, where that is more than before.
        """
        table = self.tables.setdefault(seq, {})
        if logical in table or logical in self.host_tables.get(seq, {}):
            self.fail("table", f"sequence {seq} already has a page at logical {logical}")
        owners = self.owners.setdefault(page, set())
        if seq in owners:
            self.fail("table", f"sequence {seq} names page {page} twice")
        if new:
            self._place[page] = logical
            self.filled[page] = 0
        elif self._place.get(page, logical) != logical:
            self.fail("table", f"page {page} holds tokens of logical {self._place[page]}, sequence {seq} names it at {logical}")
        table[logical] = page
        owners.add(seq)
        self._verified.pop(seq, None)
        self.num_entries += 1
        count = self.ref[page] = self.ref.get(page, 0) + 1
        if tokens > self.lengths.get(seq, 0):
            self.lengths[seq] = tokens
        if count == 1:
            self.filled_used += self.filled.get(page, 0)
            self.stats.page_taken(page, len(self.ref))
        elif count == 2:
            self.num_shared += 1
        fill = self._share_of(seq, logical)
        if fill > self.filled.get(page, 0):
            self._set_fill(page, fill)

    def drop_entry(self, seq: int, logical: int, *, cached: bool) -> None:
        """Removes ``tables[seq][logical]``; the page stays cached if ``cached`` and nobody else names it."""
        page = self.tables[seq].pop(logical)
        if not self.tables[seq]:
            del self.tables[seq]
        self.owners[page].remove(seq)
        self._verified.pop(seq, None)
        self.num_entries -= 1
        count = self.ref[page] - 1
        filled = self.filled.get(page, 0)
        if count:
            self.ref[page] = count
            self.num_shared -= count == 1
            if filled < self.page_size and self._share_of(seq, logical) == filled:  # the others may have fewer tokens
                self._set_fill(page, max(self._share_of(owner, logical) for owner in self.owners[page]))
            return
        del self.ref[page]
        self.filled_used -= filled
        self.stats.page_released(page, filled)
        if cached:
            self.cached.add(page)

    def forget_if_empty(self, seq: int) -> None:
        """A sequence without any page has no tokens in slots: it starts anew."""
        if seq not in self.tables and seq not in self.host_tables:
            self.lengths.pop(seq, None)

    def _share_of(self, seq: int, logical: int) -> int:
        """Slots of its page at ``logical`` that a sequence's tokens fill."""
        return min(self.page_size, max(0, self.lengths.get(seq, 0) - logical * self.page_size))

    def _set_fill(self, page: int, fill: int) -> None:
        self.filled_used += fill - self.filled.get(page, 0)
        self.filled[page] = fill

    def check_host_entry(self, seq: int, logical: int, host: int) -> None:
        """``host_tables[seq][logical]`` is ``host``."""
        found = self.host_tables.get(seq, {}).get(logical)
        if found != host:
            self.fail("table", f"sequence {seq} has host page {found} at logical {logical}, the log says {host}")

    def set_host_entry(self, seq: int, logical: int, host: int) -> None:
        """Names ``host`` in ``host_tables[seq][logical]``."""
        table = self.host_tables.setdefault(seq, {})
        if logical in table or logical in self.tables.get(seq, {}):
            self.fail("table", f"sequence {seq} already has a page at logical {logical}")
        table[logical] = host
        self.host_ref[host] = self.host_ref.get(host, 0) + 1

    def drop_host_entry(self, seq: int, logical: int) -> None:
        """Removes ``host_tables[seq][logical]``; a host page no entry names is free."""
        host = self.host_tables[seq].pop(logical)
        if not self.host_tables[seq]:
            del self.host_tables[seq]
        self.host_ref[host] -= 1
        if not self.host_ref[host]:
            del self.host_ref[host], self.host_filled[host]

    def write(self, seq: int, position: int, tokens: int, window: int | None) -> None:
        """Appends ``tokens`` positions of ``seq`` from ``position`` on: alone in each page, no gap, nothing written again."""
        size, table, length = self.page_size, self.tables.get(seq, {}), self.lengths.get(seq, 0)
        if position != length:
            rule = "write-gap" if position > length else "rewrite"
            self.fail(rule, f"sequence {seq} writes position {position}, it has {length} tokens")
        if self._verified.get(seq) != position:
            first = max(0, position - window + 1) // size if window else 0
            for logical in range(first, position // size):
                page = table.get(logical)
                if page is None:
                    self.fail("write", f"sequence {seq} writes position {position} but has no page at logical {logical}")
                if self.filled.get(page, 0) != size:
                    have = self.filled.get(page, 0)
                    self.fail(
                        "write-gap", f"sequence {seq} writes position {position}, page {page} before it has {have} tokens"
                    )
        end = position + tokens
        while position < end:
            logical, offset = divmod(position, size)
            page = table.get(logical)
            if page is None:
                self.fail("write", f"sequence {seq} writes position {position} but has no page at logical {logical}")
            if self.ref[page] > 1:
                self.fail("write-shared", f"sequence {seq} writes into page {page}, shared by {sorted(self.owners[page])}")
            count = min(end - position, size - offset)
            self._set_fill(page, offset + count)
            position += count
        self.lengths[seq] = self._verified[seq] = end
        if end // size + (end % size > 0) in table:
            self.fail("need", f"sequence {seq} holds a page beyond its {end} tokens")
