"""Page contents in host memory: where swapped-out and offloaded pages live."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxpaged.model.attention import AttentionBackend
from jaxpaged.model.kv_pages import KVPool, PoolSpec, gather_pages, scatter_pages

MOST_PAGES = 16
CALL_BYTES = 16 << 20


def pages_per_call(spec: PoolSpec) -> int:
    """Pages one device call moves: 16, fewer where they are large, as the last call's padding is moved too."""
    return max(1, min(MOST_PAGES, CALL_BYTES // spec.bytes_per_page))


class HostPool:
    """A bounded pool of pages in host memory.

    Saving starts an asynchronous copy; the bytes are taken when they are needed or when the next save comes.

    Args:
        spec: the device pool's format.
        num_pages: pages it holds.
        backend: whose page-copy kernels to use.

    Attributes:
        chunk: pages one device call moves.
    """

    def __init__(self, spec: PoolSpec, num_pages: int, backend: AttentionBackend):
        self.chunk = pages_per_call(spec)
        self._num_pages = num_pages
        self._pages: dict[int, tuple[np.ndarray, ...]] = {}
        self._pending: list[tuple[list[int], tuple[jax.Array, ...]]] = []
        options = backend.page_options
        self._gather = jax.jit(lambda pool, ids: gather_pages(pool, ids, **options))
        self._scatter = jax.jit(lambda pool, ids, pages: scatter_pages(pool, ids, pages, **options), donate_argnums=0)

    def warm_up(self, pool: KVPool) -> KVPool:
        """Compiles both directions on the scratch page; returns the pool."""
        ids = np.zeros(self.chunk, np.int32)
        pages = self._gather(pool, ids)
        return self._scatter(pool, ids, jax.tree.map(np.asarray, pages))

    def save(self, pool: KVPool, moves: Sequence[tuple[int, int]]) -> None:
        """Copies ``(device page, host page)`` pairs to the host.

        The copies are started, not awaited; the device runs them before anything dispatched later.
        """
        self._collect()
        for start in range(0, len(moves), self.chunk):
            part = moves[start : start + self.chunk]
            ids = np.zeros(self.chunk, np.int32)
            ids[: len(part)] = [device for device, _ in part]
            leaves = tuple(jax.tree.leaves(self._gather(pool, ids)))
            for leaf in leaves:
                leaf.copy_to_host_async()
            self._pending.append(([host for _, host in part], leaves))

    def _collect(self) -> None:
        for hosts, leaves in self._pending:
            arrays = [np.asarray(leaf) for leaf in leaves]  # [L, M, ...]
            for i, host in enumerate(hosts):
                self._pages[host] = tuple(np.ascontiguousarray(array[:, i]) for array in arrays)
        self._pending.clear()

    def restore(self, pool: KVPool, moves: Sequence[tuple[int, int]]) -> KVPool:
        """Copies ``(host page, device page)`` pairs back to the device; returns the updated pool."""
        if not moves:
            return pool
        self._collect()
        for start in range(0, len(moves), self.chunk):
            part = moves[start : start + self.chunk]
            ids = np.zeros(self.chunk, np.int32)
            ids[: len(part)] = [device for _, device in part]
            stored = [self._pages[host] for host, _ in part]
            stored += [stored[-1]] * (self.chunk - len(part))
            leaves = [np.stack(column, axis=1) for column in zip(*stored, strict=True)]
            like = jax.eval_shape(self._gather, pool, ids)
            pages = jax.tree.unflatten(jax.tree.structure(like), leaves)
            pool = self._scatter(pool, ids, pages)
        return pool
