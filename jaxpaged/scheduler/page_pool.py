"""The device's pages: which are free, which are named by tables (and how often), which are cached.

A page is in exactly one state: *free* (no table names it, nothing can find it), *cached* (no table names it, the prefix
index can find it, it may be taken), *kept* (cached but pinned: it may not be taken) or *used* (``ref_cnt`` tables name it).
Page 0 is the scratch page padding rows point at; it is never handed out.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

from jaxpaged.errors import InvariantError


class PagePool:
    """Free queue, reference counts and least-recently-used order of the pages of one device pool.

    Args:
        num_pages: pages of the pool, the scratch page included; ids are ``1 .. num_pages - 1``.
        free_order: the first order of the free queue; None is ascending.
        on_evict: called with a cached page about to be taken, before it changes hands.

    Attributes:
        ref_cnt: by page id, the number of block-table entries that name the page.
        findable: by page id, whether the prefix index has a key for the page.
        num_used: pages with ``ref_cnt`` > 0.

    Source: reference-counted physical blocks: Kwon et al. 2023 (PagedAttention), section 4.4.
    """

    __slots__ = (
        "_busy",
        "_cached",
        "_deferred",
        "_free",
        "_freed",
        "_on_evict",
        "findable",
        "num_pages",
        "num_used",
        "pins",
        "ref_cnt",
    )

    def __init__(
        self, num_pages: int, *, free_order: Iterable[int] | None = None, on_evict: Callable[[int], None] | None = None
    ) -> None:
        self.num_pages = num_pages
        self.ref_cnt = [0] * num_pages
        self.findable = [False] * num_pages
        self.pins: dict[int, int] = {}
        self.num_used = 0
        self._free = deque(range(1, num_pages) if free_order is None else free_order)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict
        self._busy: set[int] = set()
        self._deferred: list[int] = []
        self._freed: list[int] = []

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Free pages, those held back until the end of the step included."""
        return len(self._free) + len(self._deferred)

    @property
    def num_cached(self) -> int:
        """Pages no table names but the prefix index can find, pinned ones included."""
        return len(self._cached) + sum(1 for page in self.pins if not self.ref_cnt[page])

    @property
    def usable(self) -> int:
        """Pages that sequences may own."""
        return self.num_pages - 1

    def allocate(self) -> int:
        """Hands out one page with count 1: the oldest free one, else the least recently used cached one.

        Raises:
            InvariantError: nothing is available (callers check ``num_available`` first).
        """
        if self._free:
            page = self._free.popleft()
        elif self._cached:
            page = next(iter(self._cached))
            if self._on_evict is not None:
                self._on_evict(page)
            del self._cached[page]
            self.findable[page] = False
        else:
            raise InvariantError("a page was taken from an empty pool")
        self.ref_cnt[page] = 1
        self.num_used += 1
        return page

    def share(self, page: int) -> int:
        """Adds one table entry naming ``page`` (used, cached or kept). Returns the count before."""
        before = self.ref_cnt[page]
        if before == 0:
            if not self.findable[page]:
                raise InvariantError(f"page {page} is free and cannot be shared")
            self._cached.pop(page, None)
            self.num_used += 1
        self.ref_cnt[page] = before + 1
        return before

    def release(self, page: int) -> int:
        """Removes one table entry naming ``page``. Returns the count after; at 0 the page is cached, kept or free.

        Raises:
            InvariantError: no table names the page; nothing is changed.
        """
        after = self.ref_cnt[page] - 1
        if after < 0 or page <= 0:
            raise InvariantError(f"page {page} was freed once too often")
        self.ref_cnt[page] = after
        if after == 0:
            self.num_used -= 1
            if page in self._busy:
                self._deferred.append(page)
            else:
                self._retire(page)
        return after

    def release_all(self, pages: list[int]) -> None:
        """Releases every entry of ``pages`` in order, or, where one would be freed too often, none.

        Raises:
            InvariantError: as ``release``; nothing is changed.
        """
        for page, times in Counter(pages).items():
            named = self.ref_cnt[page] if 0 < page < self.num_pages else 0
            if named < times:
                raise InvariantError(f"page {page} is to be freed {times} times but {named} tables name it")
        for page in pages:
            self.release(page)

    def _retire(self, page: int) -> None:
        if not self.findable[page]:
            self._free.append(page)
            self._freed.append(page)
        elif page not in self.pins:
            self._cached[page] = None

    def hold_back(self, page: int) -> None:
        """Keeps ``page`` from being handed out in this step, even if it is released: a copy of this step reads it."""
        self._busy.add(page)

    def end_step(self, freed_before: int) -> tuple[int, ...]:
        """Ends a step's plan: held-back pages become available.

        Args:
            freed_before: length of the list of freed pages when the plan began (``num_freed``).

        Returns:
            The pages freed before the plan began and still free: their content may be destroyed.
        """
        freed: tuple[int, ...] = ()
        if freed_before:
            ref, findable = self.ref_cnt, self.findable
            self._freed, earlier = self._freed[freed_before:], self._freed[:freed_before]
            late = set(self._freed)
            freed = tuple(dict.fromkeys(p for p in earlier if not ref[p] and not findable[p] and p not in late))
        if self._busy:
            self._busy.clear()
            for page in dict.fromkeys(self._deferred):
                if self.ref_cnt[page] == 0:
                    self._retire(page)
            self._deferred.clear()
        return freed

    @property
    def num_freed(self) -> int:
        """Length of the list of pages freed since they were last reported."""
        return len(self._freed)

    def mark_findable(self, page: int) -> None:
        """The prefix index now has a key for ``page``, which a table names."""
        self.findable[page] = True

    def touch(self, page: int) -> None:
        """Makes a cached page the most recently used one."""
        if page in self._cached:
            self._cached.move_to_end(page)

    def pin(self, page: int) -> int:
        """Adds a pin to a findable page: while it has one it is never taken. Returns the pins before."""
        before = self.pins.get(page, 0)
        self.pins[page] = before + 1
        self._cached.pop(page, None)
        return before

    def unpin(self, page: int) -> int:
        """Removes a pin. Returns the pins after; at 0 the page may be taken once no table names it."""
        after = self.pins[page] - 1
        if after:
            self.pins[page] = after
        else:
            del self.pins[page]
            if self.ref_cnt[page] == 0 and page not in self._deferred:
                self._cached[page] = None
        return after

    def check(self, counts: Counter[int]) -> None:
        """Compares every page's state with the tables.

        Args:
            counts: by page, the number of table entries that name it.

        Raises:
            InvariantError: a count differs, or a page is in no state or in two.
        """
        for page in range(self.num_pages):
            if self.ref_cnt[page] != counts.get(page, 0):
                raise InvariantError(f"page {page}: count {self.ref_cnt[page]}, but {counts.get(page, 0)} tables name it")
        kept = {page for page in self.pins if not self.ref_cnt[page]}
        states = Counter(self._free) + Counter(list(self._cached)) + Counter(self._deferred) + Counter(kept)
        states.update(page for page in range(1, self.num_pages) if self.ref_cnt[page])
        for page in range(1, self.num_pages):
            if states[page] != 1:
                raise InvariantError(f"page {page} is in {states[page]} states (free, cached, kept or used), wants exactly one")
        if len(states) != self.num_pages - 1:
            raise InvariantError(f"page ids {sorted(set(states) - set(range(1, self.num_pages)))} do not belong to the pool")
        if self.num_used != sum(1 for c in self.ref_cnt if c):
            raise InvariantError(f"used pages counted {self.num_used}, are {sum(1 for c in self.ref_cnt if c)}")
        for page in self._free:
            if self.findable[page]:
                raise InvariantError(f"page {page} is free but findable")
        for page in [*self._cached, *self.pins]:
            if not self.findable[page]:
                raise InvariantError(f"page {page} is cached or pinned but not findable")
