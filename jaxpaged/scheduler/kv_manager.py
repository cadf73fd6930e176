"""Block tables: who names which page, what must be copied, saved or restored, what can be found again.

All table and count changes of the engine happen here, each with its event. The manager keeps the ordered plan of page
operations of the step being planned: ``saves`` (device to host), ``restores`` (host to device), ``copies``; the device
carries them out in this order before the step's writes. From that order follow the rules below: a page read by a copy is
not handed out again in the same step, nor is a host page read by a restore.
"""

from collections import Counter

from jaxpaged.config import SchedulerConfig
from jaxpaged.scheduler.events import EventLog
from jaxpaged.scheduler.prefix_cache import PrefixCache
from jaxpaged.scheduler.prefix_index import PrefixEntry
from jaxpaged.scheduler.sequence_state import SeqState, Status

NEVER = 1 << 62


class KVManager:
    """Pages and block tables of all sequences.

    Args:
        config: pool sizes and switches.
        events: where every change is told; None tells nobody.

    Attributes:
        page_size: tokens a page holds.
        cache: which pages can be found again.
        pool: the device's pages.
        host: host pages (swapped-out sequences, offloaded cached pages).
        saves, restores, copies: the plan of the current step.
        num_copies, num_swapped_out, num_swapped_in: pages since start.
    """

    def __init__(self, config: SchedulerConfig, events: EventLog | None = None) -> None:
        self.page_size = config.page_size
        self._window = config.sliding_window
        self._caching = config.enable_prefix_caching
        self._events = events
        self.cache = PrefixCache(config, events)
        self.pool, self.host = self.cache.pool, self.cache.host
        self.saves: list[tuple[int, int]] = self.cache.saves
        self.restores: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.num_copies = self.num_swapped_out = self.num_swapped_in = 0
        self._to_index: list[SeqState] = []
        self._freed_before = 0

    # --- one step's plan ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Starts the plan of a step."""
        self._freed_before = self.pool.num_freed
        self.cache.saves = self.saves = []
        self.restores, self.copies = [], []

    def end_step(self) -> tuple[int, ...]:
        """Ends the plan: pages this step fills become findable from the next step on. Returns pages that may be poisoned."""
        for state in self._to_index:
            if state.status is Status.RUNNING:
                self.cache.make_findable(state)
        self._to_index.clear()
        freed = self.pool.end_step(self._freed_before)
        self.host.end_step()
        return freed

    # --- growing -----------------------------------------------------------------------------------------------------

    def pages_needed(self, state: SeqState, end: int) -> int:
        """Pages to take so that positions ``num_computed_tokens .. end - 1`` can be written."""
        table = state.table
        computed = state.seq.num_computed_tokens
        need = -(-end // self.page_size) - len(table)
        if computed % self.page_size and self.pool.ref_cnt[table[computed // self.page_size]] > 1:
            need += 1
        return need

    def tokens_that_fit(self, state: SeqState, pages: int) -> int:
        """The end position that can be reached by taking ``pages`` pages."""
        computed = state.seq.num_computed_tokens
        if computed % self.page_size and self.pool.ref_cnt[state.table[computed // self.page_size]] > 1:
            pages -= 1
        return max(computed, (len(state.table) + pages) * self.page_size) if pages >= 0 else computed

    def grow(self, state: SeqState, end: int) -> None:
        """Makes positions up to ``end - 1`` writable: copies a shared, partly filled last page, takes new pages."""
        pool, table, events = self.pool, state.table, self._events
        page_size = self.page_size
        computed = state.seq.num_computed_tokens
        if computed % page_size:
            logical = computed // page_size
            source = table[logical]
            if pool.ref_cnt[source] > 1:
                target = pool.allocate()
                pool.hold_back(source)
                after = pool.release(source)
                table[logical] = target
                state.dirty = min(state.dirty, logical)
                self.copies.append((source, target))
                self.num_copies += 1
                if events is not None:
                    why = "beam" if state.owner.beam is not None else "fork"
                    events.emit(
                        "copy", request=state.owner.request.request_id, seq=state.seq.seq_id, logical=logical, page=target,
                        src=source, before=after + 1, after=after, why=why,
                    )  # fmt: skip
        wanted = -(-end // page_size)
        if len(table) < wanted:
            state.dirty = min(state.dirty, len(table))
            while len(table) < wanted:
                page = pool.allocate()
                table.append(page)
                if events is not None:
                    self._tell("alloc", state, len(table) - 1, page, 0, 1)

    def free_behind_window(self, state: SeqState) -> None:
        """Gives back the pages no later query can see: those that end before ``num_computed_tokens - window + 1``.

        Called when a step's plan is complete: its own queries still see them, and whoever is given them writes in a later step.
        """
        if self._window is None:
            return
        behind = (state.seq.num_computed_tokens - self._window + 1) // self.page_size
        for logical in range(state.num_behind, min(behind, len(state.table))):
            page = state.table[logical]
            if page:
                after = self.pool.release(page)
                state.table[logical] = 0
                if self._events is not None:
                    self._tell("free", state, logical, page, after + 1, after, why="window", cached=self.pool.findable[page])
            state.num_behind = logical + 1

    def peak_pages(self, num_tokens: int, chunk: int = 1) -> int:
        """Most pages a sequence of ``num_tokens`` written tokens holds when it grows by at most ``chunk`` tokens a step."""
        pages = -(-num_tokens // self.page_size)
        if self._window is not None:
            pages = min(pages, (self._window + chunk + self.page_size - 3) // self.page_size + 1)
        return pages

    # --- sharing -----------------------------------------------------------------------------------------------------

    def fork(self, parent: SeqState, child: SeqState, num_tokens: int, why: str) -> None:
        """Gives ``child`` a table naming the pages of the parent's first ``num_tokens`` tokens, the partly filled one too."""
        pool, events = self.pool, self._events
        pages = -(-num_tokens // self.page_size)
        child.table = parent.table[:pages]
        child.keys = parent.keys[: num_tokens // self.page_size]
        child.dirty = 0
        child.num_behind = min(parent.num_behind, pages)
        child.seq.num_computed_tokens = num_tokens
        child.index_at = NEVER if not self._caching else (num_tokens // self.page_size + 1) * self.page_size
        for logical, page in enumerate(child.table):
            if page:
                before = pool.share(page)
                if events is not None:
                    self._tell("share", child, logical, page, before, before + 1, why=why, tokens=num_tokens)

    def fork_swapped(self, parent: SeqState, child: SeqState) -> None:
        """As ``fork``, for a parent whose pages are on the host."""
        child.host_table = parent.host_table[:]
        child.keys = parent.keys[:]
        child.num_behind = parent.num_behind
        child.seq.num_computed_tokens = parent.seq.num_computed_tokens
        for logical, page in enumerate(child.host_table):
            if page >= 0:
                self.host.share(page)
                if self._events is not None:
                    self._events.emit(
                        "share", request=child.owner.request.request_id, seq=child.seq.seq_id, logical=logical, why="beam",
                        before=self.host.ref_cnt[page] - 1, after=self.host.ref_cnt[page], host=page,
                    )  # fmt: skip

    # --- finding -----------------------------------------------------------------------------------------------------

    def adopt(self, state: SeqState, found: list[tuple[PrefixEntry, bool]]) -> None:
        """Starts the sequence's table with the pages found. All are held on to before any page is taken to restore one."""
        pool, events, page_size = self.pool, self._events, self.page_size
        num_tokens = len(found) * page_size
        behind = 0 if self._window is None else max(0, (num_tokens - self._window + 1) // page_size)
        table = [0] * len(found)
        for logical, (entry, on_device) in enumerate(found):
            if logical < behind:
                continue
            if on_device:
                table[logical] = entry.page
                before = pool.share(entry.page)
                if events is not None:
                    why = "pinned" if entry.page in pool.pins else "prefix"
                    self._tell("share", state, logical, entry.page, before, before + 1, why=why)
            else:
                self.host.hold_back(entry.page)
        for logical, (entry, on_device) in enumerate(found):
            if logical >= behind and not on_device:
                self.host.restored(entry.page)
                page = table[logical] = pool.allocate()
                self.restores.append((entry.page, page))
                if events is not None:
                    self._tell("restore", state, logical, page, 0, 1, why="hit", host=entry.page)
        state.table, state.dirty, state.num_behind = table, 0, behind
        state.seq.num_computed_tokens = num_tokens
        restored = [logical for logical in range(behind, len(found)) if not found[logical][1]]
        first = restored[0] if restored else len(found)
        state.index_at = NEVER if not self._caching else (first + 1) * page_size

    def written(self, state: SeqState) -> None:
        """A page filled by the step being planned becomes findable when the plan ends."""
        self._to_index.append(state)

    # --- giving back -------------------------------------------------------------------------------------------------

    def release(self, state: SeqState, why: str) -> None:
        """Gives back all the sequence's pages, device or host, its last page first (so that it is evicted first)."""
        pool, events = self.pool, self._events
        table = state.table
        for logical in range(len(table) - 1, -1, -1):
            page = table[logical]
            if page:
                after = pool.release(page)
                if events is not None:
                    self._tell("free", state, logical, page, after + 1, after, why=why, cached=pool.findable[page])
        state.table = []
        state.num_behind = 0
        state.index_at = NEVER
        if state.host_table:
            for logical, page in enumerate(state.host_table):
                if page >= 0:
                    after = self.host.release(page)
                    if events is not None:
                        events.emit(
                            "free", request=state.owner.request.request_id, seq=state.seq.seq_id, logical=logical,
                            before=after + 1, after=after, why=why, host=page,
                        )  # fmt: skip
            state.host_table = []

    def can_swap_out(self, states: list[SeqState]) -> bool:
        """Whether the host has room for all pages of ``states``, and none of them is pinned.

        A pinned page stays on the device whoever leaves. Swapped in again, its sharers would have copies of their own beside
        it, for which nobody has made room; recomputed, they find it.
        """
        pages = {page for state in states for page in state.table if page}
        return len(pages) <= self.host.num_available and self.pool.pins.keys().isdisjoint(pages)

    def swap_out(self, states: list[SeqState]) -> None:
        """Moves all pages of ``states`` to the host, shared ones once."""
        pages = dict.fromkeys(page for state in states for page in state.table if page)
        to_host = {page: self.host.allocate() for page in pages}
        self.saves.extend(to_host.items())
        self.num_swapped_out += len(pages)
        for state in states:
            state.host_table = [to_host[page] if page else -1 for page in state.table]
            for logical in range(len(state.table) - 1, -1, -1):
                page = state.table[logical]
                if page:
                    self.host.share(to_host[page])
                    after = self.pool.release(page)
                    if self._events is not None:
                        self._tell(
                            "swap_out",
                            state,
                            logical,
                            page,
                            after + 1,
                            after,
                            host=to_host[page],
                            cached=self.pool.findable[page],
                        )
            state.table = []
            state.index_at = NEVER

    def swap_in_need(self, states: list[SeqState]) -> int:
        """Pages needed to bring ``states`` back and let each that has a token to write write one."""
        need = len({page for state in states for page in state.host_table if page >= 0})
        holders: Counter[int] = Counter()
        writers: Counter[int] = Counter()
        for state in states:
            computed = state.seq.num_computed_tokens
            writes = len(state.seq.token_ids) > computed
            if computed % self.page_size:
                holders[state.host_table[-1]] += 1
                writers[state.host_table[-1]] += writes
            elif writes:
                need += 1
        return need + sum(count - (count == holders[page] and count > 0) for page, count in writers.items())

    def swap_in(self, states: list[SeqState]) -> None:
        """Brings the pages of ``states`` back, shared ones once."""
        to_device: dict[int, int] = {}
        for state in states:
            state.table = [0] * len(state.host_table)
            for logical, host in enumerate(state.host_table):
                if host < 0:
                    continue
                page = to_device.get(host)
                if page is None:
                    self.host.hold_back(host)
                    page = to_device[host] = self.pool.allocate()
                    self.restores.append((host, page))
                    before = 0
                else:
                    before = self.pool.share(page)
                state.table[logical] = page
                self.host.release(host)
                if self._events is not None:
                    self._tell("swap_in", state, logical, page, before, before + 1, host=host)
            state.host_table = []
            state.dirty = 0
            state.index_at = (state.num_behind + 1) * self.page_size if self._caching else NEVER
            self.written(state)
        self.num_swapped_in += len(to_device)

    def _tell(self, kind: str, state: SeqState, logical: int, page: int, before: int, after: int, **extra: object) -> None:
        """Emits a table event; only called with an event log."""
        assert self._events is not None
        self._events.emit(
            kind, request=state.owner.request.request_id, seq=state.seq.seq_id, logical=logical, page=page,
            before=before, after=after, **extra,  # type: ignore[arg-type]
        )  # fmt: skip
