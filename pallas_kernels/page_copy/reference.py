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

    def run(arrays: Any, src, dst):
        out: Any = [None if a is None else np.array(a) for a in arrays]
        for new, old in zip(out, arrays, strict=True):
            for layer in range(0 if new is None or old is None else spec.num_layers):
                for a, b in zip(src, dst, strict=True):
                    new[layer * spec.num_pages + b] = old[layer * spec.num_pages + a]
        return tuple(out)

    arrays = (pool.data, pool.scales)
    data, scales = on_host(run, _shapes(arrays), arrays, src, dst)
    return KVPool(data, scales, spec)


def gather_pages(pool: KVPool, ids, *, interpret=False) -> Pages:
    """See the public ``gather_pages``."""
    _no_interpret("gather_pages", interpret)
    spec = pool.spec

    def run(arrays, ids):
        return tuple(
            None
            if a is None
            else np.stack([np.stack([a[layer * spec.num_pages + i] for i in ids]) for layer in range(spec.num_layers)])
            for a in arrays
        )

    arrays = (pool.data, pool.scales)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((spec.num_layers, len(ids), *a.shape[1:]), a.dtype), arrays)
    data, scales = on_host(run, shapes, arrays, ids)
    return Pages(data, scales)


def scatter_pages(pool: KVPool, ids, pages: Pages, *, interpret=False) -> KVPool:
    """See the public ``scatter_pages``."""
    _no_interpret("scatter_pages", interpret)
    spec = pool.spec

    def run(arrays: Any, ids, staged: Any):
        out: Any = [None if a is None else np.array(a) for a in arrays]
        for new, values in zip(out, staged, strict=True):
            for layer in range(spec.num_layers if new is not None else 0):
                for i, page in enumerate(ids):
                    new[layer * spec.num_pages + page] = values[layer, i]
        return tuple(out)

    arrays = (pool.data, pool.scales)
    data, scales = on_host(run, _shapes(arrays), arrays, ids, (pages.data, pages.scales))
    return KVPool(data, scales, spec)


def _shapes(arrays):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)


def _no_interpret(op: str, interpret) -> None:
    if interpret:
        raise KernelUnsupportedError(f'{op}: implementation="reference" has nothing to interpret; pass interpret=False')
