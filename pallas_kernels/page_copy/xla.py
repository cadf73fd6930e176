"""Page copies as XLA gathers and scatters by page id, all layers in one: in place where the pool was donated.

On TPU the scatter relayouts 8-bit pools with pages of 32 tokens or more; ``mosaic_tpu`` does not.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.page_copy.pages import Pages
from pallas_kernels.pool import KVPool, PoolSpec


def copy_pages(pool: KVPool, src, dst, *, interpret=False) -> KVPool:
    """See the public ``copy_pages``. Copies of a page onto itself are left out."""
    _no_interpret("copy_pages", interpret)
    moved = jnp.asarray(src) != jnp.asarray(dst)
    rows, targets = _all_layers(pool.spec, src, None), _all_layers(pool.spec, dst, moved)

    def move(x: Any) -> Any:
        return None if x is None else x.at[targets].set(x[rows], mode="drop", unique_indices=True)

    return KVPool(move(pool.data), move(pool.scales), pool.spec)


def gather_pages(pool: KVPool, ids, *, interpret=False) -> Pages:
    """See the public ``gather_pages``."""
    _no_interpret("gather_pages", interpret)
    rows = _all_layers(pool.spec, ids, None)

    def take(x: Any) -> Any:
        return None if x is None else x[rows].reshape(pool.spec.num_layers, len(ids), *x.shape[1:])

    return Pages(take(pool.data), take(pool.scales))


def scatter_pages(pool: KVPool, ids, pages: Pages, *, interpret=False) -> KVPool:
    """See the public ``scatter_pages``. Entries with id 0 are left out."""
    _no_interpret("scatter_pages", interpret)
    targets = _all_layers(pool.spec, ids, jnp.asarray(ids) != 0)

    def put(x: Any, new) -> Any:
        return None if x is None else x.at[targets].set(new.reshape(-1, *x.shape[1:]), mode="drop", unique_indices=True)

    return KVPool(put(pool.data, pages.data), put(pool.scales, pages.scales), pool.spec)


def _all_layers(spec: PoolSpec, ids, keep) -> jax.Array:
    """``[L * M]`` rows of ``pool.data`` for the page ids of every layer; those not in ``keep`` point behind the pool's end."""
    layers = jnp.arange(spec.num_layers, dtype=jnp.int32)[:, None] * spec.num_pages
    rows = (layers + jnp.asarray(ids, jnp.int32)).reshape(-1)
    if keep is None:
        return rows
    behind = spec.num_layers * spec.num_pages + np.arange(rows.shape[0], dtype=np.int32)
    return jnp.where(jnp.tile(keep, spec.num_layers), rows, behind)


def _no_interpret(op: str, interpret) -> None:
    if interpret:
        raise KernelUnsupportedError(f'{op}: implementation="xla" has nothing to interpret; pass interpret=False')
