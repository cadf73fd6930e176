"""The definition of page copies in numpy: page by page, layer by layer, into a copy of the whole pool."""

from typing import Any

import jax
import numpy as np

from pallas_kernels.dispatch import on_host
from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.page_copy.pages import Pages
from pallas_kernels.pool import KVPool


def copy_pages(pool: KVPool, src, dst, *, interpret=False) -> KVPool:
    """See the public ``copy_pages``."""
    _no_interpret("copy_pages", interpret)
    spec = pool.spec

    def run(arrays, src, dst):
        def moved(old: Any) -> Any:
            new = np.array(old)
            for layer in range(spec.num_layers):
                for a, b in zip(src, dst, strict=True):
                    new[layer * spec.num_pages + b] = old[layer * spec.num_pages + a]
            return new

        return jax.tree.map(moved, arrays)

    arrays = (pool.data, pool.scales)
    data, scales = on_host(run, _shapes(arrays), arrays, src, dst)
    return KVPool(data, scales, spec)


def gather_pages(pool: KVPool, ids, *, interpret=False) -> Pages:
    """See the public ``gather_pages``."""
    _no_interpret("gather_pages", interpret)
    spec = pool.spec

    def run(arrays, ids):
        def taken(old: Any) -> Any:
            return np.stack([np.stack([old[layer * spec.num_pages + i] for i in ids]) for layer in range(spec.num_layers)])

        return jax.tree.map(taken, arrays)

    arrays = (pool.data, pool.scales)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((spec.num_layers, len(ids), *a.shape[1:]), a.dtype), arrays)
    data, scales = on_host(run, shapes, arrays, ids)
    return Pages(data, scales)


def scatter_pages(pool: KVPool, ids, pages: Pages, *, interpret=False) -> KVPool:
    """See the public ``scatter_pages``."""
    _no_interpret("scatter_pages", interpret)
    spec = pool.spec

    def run(arrays, ids, staged):
        def put(old: Any, values: Any) -> Any:
            new = np.array(old)
            for layer in range(spec.num_layers):
                for i, page in enumerate(ids):
                    new[layer * spec.num_pages + page] = values[layer, i]
            return new

        return jax.tree.map(put, arrays, staged)

    arrays = (pool.data, pool.scales)
    data, scales = on_host(run, _shapes(arrays), arrays, ids, (pages.data, pages.scales))
    return KVPool(data, scales, spec)


def _shapes(arrays):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)


def _no_interpret(op: str, interpret) -> None:
    if interpret:
        raise KernelUnsupportedError(f'{op}: implementation="reference" has nothing to interpret; pass interpret=False')
