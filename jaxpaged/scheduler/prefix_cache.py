"""Pages that can be found again: who may be found, when, and what happens when such a page is taken.

A page has three separate states: allocated (a table names it), written (a dispatched step fills it) and findable (it is in the
index). It becomes findable only when the step that fills it has been dispatched and its tokens are known.
"""

from collections.abc import Iterable

from jaxpaged.config import SchedulerConfig
from jaxpaged.scheduler.events import EventLog
from jaxpaged.scheduler.host_store import HostStore
from jaxpaged.scheduler.page_pool import PagePool
from jaxpaged.scheduler.prefix_index import ROOT_KEY, PrefixEntry, PrefixIndex, page_key
from jaxpaged.scheduler.sequence_state import SeqState


class PrefixCache:
    """The prefix index of the device and of the host, and the pinned keys.

    Args:
        config: switches and page size.
        events: where changes are told; None tells nobody.

    Attributes:
        pool: the device's pages.
        host: the host's pages.
        index: findable device pages.
        pinned_keys: prefix keys that may not be evicted, with the number of pins.
        saves: the current step's moves from device to host; evictions of an offloading cache are added.
    """

    def __init__(self, config: SchedulerConfig, events: EventLog | None) -> None:
        self.page_size = config.page_size
        self._caching = config.enable_prefix_caching
        self._offload = config.offload_cached_pages
        self._events = events
        self.pool = PagePool(config.num_pages, on_evict=self._evict)
        self.host = HostStore(config.num_host_pages, on_drop=self._dropped)
        self.index = PrefixIndex()
        self.pinned_keys: dict[bytes, int] = {}
        self.saves: list[tuple[int, int]] = []

    def keys_of(self, state: SeqState, num_pages: int) -> list[bytes]:
        """Prefix keys of the sequence's first ``num_pages`` full pages; computed once each."""
        keys, page_size, token_ids = state.keys, self.page_size, state.seq.token_ids
        for logical in range(len(keys), num_pages):
            parent = keys[-1] if keys else ROOT_KEY
            keys.append(page_key(parent, token_ids[logical * page_size : (logical + 1) * page_size], state.owner.extras))
        return keys

    def find(self, state: SeqState) -> list[tuple[PrefixEntry, bool]]:
        """Longest run of findable pages from the sequence's beginning; one token at least is left to compute.

        Returns:
            Per page: its entry, and whether it is on the device (else on the host).
        """
        if not self._caching:
            return []
        page_size, token_ids = self.page_size, state.seq.token_ids
        found: list[tuple[PrefixEntry, bool]] = []
        parent = ROOT_KEY
        for logical in range((len(token_ids) - 1) // page_size):
            key = self.keys_of(state, logical + 1)[logical]
            on_device = key in self.index
            index = self.index if on_device else self.host.index
            if not on_device and key not in index:
                break
            entry = index.find(key, parent, logical, token_ids[logical * page_size : (logical + 1) * page_size])
            if entry is None:
                break
            found.append((entry, on_device))
            parent = key
        return found

    def make_findable(self, state: SeqState) -> None:
        """Enters the sequence's full pages, written by dispatched steps and of known tokens, into the index."""
        page_size, seq, table = self.page_size, state.seq, state.table
        known = min(seq.num_computed_tokens, len(seq.token_ids))
        while state.index_at <= known:
            logical = state.index_at // page_size - 1
            state.index_at += page_size
            page = table[logical]
            key = self.keys_of(state, logical + 1)[logical]
            if page and not self.pool.findable[page]:
                tokens = tuple(seq.token_ids[logical * page_size : (logical + 1) * page_size])
                parent = state.keys[logical - 1] if logical else ROOT_KEY
                if self.index.add(key, PrefixEntry(page, parent, logical, tokens)):
                    self.pool.mark_findable(page)
                    if key in self.pinned_keys:
                        self._pin(page)

    def _evict(self, page: int) -> None:
        key, entry = self.index.remove(page)
        host = self.host.put(key, entry) if self._offload else None
        if host is not None:
            self.saves.append((page, host))
        if self._events is not None:
            if host is not None:
                self._events.emit("offload", page=page, host=host, before=0, after=0)
            else:
                self._events.emit("evict", page=page, before=0, after=0)

    def _dropped(self, host: int) -> None:
        self.saves[:] = [save for save in self.saves if save[1] != host]
        if self._events is not None:
            self._events.emit("evict", host=host)

    # --- pinning -----------------------------------------------------------------------------------------------------

    def pin_keys(self, keys: Iterable[bytes]) -> None:
        """Adds a pin to each key: its page, once findable, is not evicted."""
        for key in keys:
            self.pinned_keys[key] = self.pinned_keys.get(key, 0) + 1
            entry = self.index.get(key)
            if entry is not None and self.pinned_keys[key] == 1:
                self._pin(entry.page)

    def unpin_keys(self, keys: Iterable[bytes]) -> None:
        """Removes a pin from each key."""
        for key in keys:
            self.pinned_keys[key] -= 1
            if not self.pinned_keys[key]:
                del self.pinned_keys[key]
                entry = self.index.get(key)
                if entry is not None:
                    after = self.pool.unpin(entry.page)
                    if self._events is not None:
                        self._events.emit("unpin", page=entry.page, before=after + 1, after=after)

    def _pin(self, page: int) -> None:
        before = self.pool.pin(page)
        if self._events is not None:
            self._events.emit("pin", page=page, before=before, after=before + 1)
