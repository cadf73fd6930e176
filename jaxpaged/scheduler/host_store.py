"""Host memory for pages: swapped-out sequences (they must come back) and offloaded cached pages (they may be dropped)."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from jaxpaged.errors import InvariantError
from jaxpaged.scheduler.prefix_index import PrefixEntry, PrefixIndex


class HostStore:
    """A bounded set of host pages.

    Args:
        num_pages: pages of host memory; ids are ``0 .. num_pages - 1``.
        on_drop: called with an offloaded host page that is dropped to make room.

    Attributes:
        ref_cnt: by host page, table entries of swapped-out sequences that name it.
        index: the offloaded pages, by key.
    """

    __slots__ = ("_busy", "_deferred", "_free", "_lru", "_on_drop", "index", "num_pages", "ref_cnt")

    def __init__(self, num_pages: int, *, on_drop: Callable[[int], None] | None = None) -> None:
        self.num_pages = num_pages
        self.ref_cnt = [0] * num_pages
        self.index = PrefixIndex()
        self._free = deque(range(num_pages))
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._busy: set[int] = set()
        self._deferred: list[int] = []
        self._on_drop = on_drop

    @property
    def num_available(self) -> int:
        """Pages a swap can take now: free ones, and offloaded ones that may be dropped."""
        return len(self._free) + sum(1 for page in self._lru if page not in self._busy)

    @property
    def num_swapped(self) -> int:
        """Pages that hold swapped-out sequences."""
        return sum(1 for count in self.ref_cnt if count)

    def _take(self) -> int | None:
        if self._free:
            return self._free.popleft()
        page = next((p for p in self._lru if p not in self._busy), None)
        if page is None:
            return None
        self._forget(page)
        if self._on_drop is not None:
            self._on_drop(page)
        return page

    def _forget(self, page: int) -> PrefixEntry:
        del self._lru[page]
        return self.index.remove(page)[1]

    def allocate(self) -> int:
        """Takes a page for a swap, with count 0 until ``share``.

        Raises:
            InvariantError: none is available (callers check ``num_available`` first).
        """
        page = self._take()
        if page is None:
            raise InvariantError("a host page was taken from a full store")
        return page

    def share(self, page: int) -> None:
        """Adds one swapped-out table entry naming ``page``."""
        self.ref_cnt[page] += 1

    def release(self, page: int) -> int:
        """Removes one entry. Returns the count after; at 0 the page is free (from the next step on, if held back)."""
        after = self.ref_cnt[page] - 1
        if after < 0:
            raise InvariantError(f"host page {page} was freed once too often")
        self.ref_cnt[page] = after
        if after == 0:
            self._give_back(page)
        return after

    def _give_back(self, page: int) -> None:
        (self._deferred if page in self._busy else self._free).append(page)

    def put(self, key: bytes, entry: PrefixEntry) -> int | None:
        """Makes room for an offloaded page. Returns the host page, or None where no room can be made or the key is there."""
        if key in self.index:
            return None
        page = self._take()
        if page is not None:
            self.index.add(key, entry._replace(page=page))
            self._lru[page] = None
        return page

    def hold_back(self, page: int) -> None:
        """Keeps ``page`` as it is until the end of the step: a restore of this step reads it."""
        self._busy.add(page)

    def restored(self, page: int) -> PrefixEntry:
        """An offloaded page went back to the device: it is free from the next step on. Returns what it was."""
        entry = self._forget(page)
        self._busy.add(page)
        self._deferred.append(page)
        return entry

    def end_step(self) -> None:
        """Ends a step's plan: held-back pages become available."""
        self._busy.clear()
        if self._deferred:
            self._free.extend(self._deferred)
            self._deferred.clear()

    def check(self, counts: Counter[int]) -> None:
        """Compares every host page's state with the swapped-out tables.

        Raises:
            InvariantError: a count differs, or a page is in no state or in two.
        """
        states = Counter(self._free) + Counter(list(self._lru)) + Counter(self._deferred)
        for page in range(self.num_pages):
            if self.ref_cnt[page] != counts.get(page, 0):
                raise InvariantError(f"host page {page}: count {self.ref_cnt[page]}, but {counts.get(page, 0)} entries name it")
            if states[page] + (self.ref_cnt[page] > 0) != 1:
                raise InvariantError(f"host page {page} is not in exactly one state")
        if set(self.index.key_of) != set(self._lru):
            raise InvariantError("offloaded host pages and their index differ")
