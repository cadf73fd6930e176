"""Registered prompt beginnings: full pages that, once computed, stay."""

from collections.abc import Iterable

from jaxpaged.config import SchedulerConfig
from jaxpaged.errors import CapacityError, InvalidRequestError
from jaxpaged.scheduler.kv_manager import KVManager
from jaxpaged.scheduler.prefix_index import ROOT_KEY, extra_keys, page_key
from jaxpaged.scheduler.sequence_state import RequestState


class PinnedPrefixes:
    """Keeps the registered beginnings and makes sure they leave room for every live request.

    Args:
        config: page size and pool size.
        kv: where the pages are.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self._config = config
        self._kv = kv
        self._pinned: dict[tuple[str, tuple[int, ...]], list[bytes]] = {}

    @property
    def num_pages(self) -> int:
        """Pages pinned beginnings hold or will hold."""
        return len(self._kv.cache.pinned_keys)

    def keys(self, token_ids: tuple[int, ...], cache_salt: str, num_pages: int) -> list[bytes]:
        """Prefix keys of the first ``num_pages`` full pages."""
        extras = extra_keys(cache_salt=cache_salt, kv_dtype=self._config.kv_dtype)
        keys, parent, size = [], ROOT_KEY, self._config.page_size
        for logical in range(num_pages):
            parent = page_key(parent, token_ids[logical * size : (logical + 1) * size], extras)
            keys.append(parent)
        return keys

    def shared_with(self, token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Computed pinned pages a prompt is sure to find, so that it needs no own ones for them.

        None under a sliding window: what a request needs there does not count its whole prompt.
        """
        if not self._kv.cache.pinned_keys or self._config.sliding_window is not None:
            return 0
        count = 0
        for key in self.keys(token_ids, cache_salt, (len(token_ids) - 1) // self._config.page_size):
            if key not in self._kv.cache.pinned_keys or key not in self._kv.cache.index:
                break
            count += 1
        return count

    def pin(self, token_ids: tuple[int, ...], cache_salt: str, live: Iterable[RequestState]) -> int:
        """Registers a beginning; see ``Scheduler.pin_prefix``."""
        name = (cache_salt, token_ids)
        if not self._config.enable_prefix_caching:
            raise InvalidRequestError("pin_prefix: enable_prefix_caching is off; wants it on")
        if name in self._pinned:
            raise InvalidRequestError("pin_prefix: these tokens are pinned already under this salt; unpin them first")
        pages = len(token_ids) // self._config.page_size
        if pages == 0:
            raise InvalidRequestError(
                f"pin_prefix: got {len(token_ids)} tokens, wants a full page ({self._config.page_size}) at least"
            )
        keys = self.keys(token_ids, cache_salt, pages)
        total = len(set(keys) | set(self._kv.cache.pinned_keys))
        usable = self._config.num_pages - 1
        if total >= usable:
            raise CapacityError(
                f"pin_prefix: {total} pages would be pinned but the pool has {usable} and one at least must stay; "
                "unpin a prefix or give the pool more pages"
            )
        for owner in live:
            need = owner.worst_pages + total
            if need > usable and not any(state.table or state.host_table for state in owner.states):  # what it will find
                request = owner.request
                need -= self.shared_with(request.prompt_token_ids, request.cache_salt)
            elif need > usable:  # what it has found
                computed = (self._kv.cache.index.get(key) for key in keys)
                kept = {entry.page for entry in computed if entry is not None} | self._kv.pool.pins.keys()
                need -= len(kept & {page for state in owner.states for page in state.table})
            if need > usable:
                raise CapacityError(
                    f"pin_prefix: with {total} pages pinned, live request {owner.request.request_id!r} may need {need} pages "
                    f"in all but the pool has {usable}; pin it later or give the pool more pages"
                )
        self._pinned[name] = keys
        self._kv.cache.pin_keys(keys)
        return pages

    def unpin(self, token_ids: tuple[int, ...], cache_salt: str) -> None:
        """Undoes ``pin``."""
        keys = self._pinned.pop((cache_salt, token_ids), None)
        if keys is None:
            raise InvalidRequestError("unpin_prefix: these tokens are not pinned under this salt")
        self._kv.cache.unpin_keys(keys)
