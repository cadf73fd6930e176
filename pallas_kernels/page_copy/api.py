"""Whole pages of all layers: copied within a pool (copy-on-write), taken out (swap-out) and put back (swap-in)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.page_copy.pages import Pages, check_pages
from pallas_kernels.pool import KVPool

OP = "page_copy"


def copy_pages(
    pool: KVPool,
    src: jax.Array | np.ndarray,
    dst: jax.Array | np.ndarray,
    *,
    implementation: Implementation = "auto",
    interpret: Any = False,
) -> KVPool:
    """Copies page ``src[i]`` to page ``dst[i]`` in every layer, scales included.

    Args:
        pool: the page pool; use the returned one from here on.
        src: int32 ``[M]`` page ids, or a list. Pad with 0: the scratch page copied onto itself.
        dst: int32 ``[M]`` page ids, each at most once (padding aside), none of them also in ``src``.
        implementation: "auto" takes the platform's own; any other name runs that one or raises.
        interpret: run a Pallas kernel in interpret mode.

    Returns:
        The updated pool; every other page is unchanged. In place where the pool was donated.

    Raises:
        ValueError: ids have a wrong shape or dtype, or (where their values are known) lie outside the pool, name a destination
            twice, or name a page as source and destination.
        KernelUnsupportedError: the chosen implementation cannot do this; the message says what can.

    Source: Kwon et al. 2023, section 5.1 (fused block copy).
    """
    src, dst = _as_ids(src), _as_ids(dst)
    _check(pool, src=src, dst=dst)
    if src.shape != dst.shape:
        raise ValueError(f"dst: got {dst.shape[0]} ids, wants {src.shape[0]} like src")
    if dispatch.is_concrete(src, dst):
        _check_disjoint(np.asarray(src), np.asarray(dst))
    name = dispatch.resolve(OP, implementation, pool.data, interpret)
    if not src.shape[0]:
        return pool
    return _call("copy_pages", name, interpret, pool, src, dst)


def gather_pages(
    pool: KVPool, ids: jax.Array | np.ndarray, *, implementation: Implementation = "auto", interpret: Any = False
) -> Pages:
    """Takes copies of pages out of the pool, in every layer: what a swap-out sends to host memory.

    Args:
        pool: the page pool (unchanged).
        ids: int32 ``[M]`` page ids. Pad with 0.
        implementation: "auto" takes the platform's own; any other name runs that one or raises.
        interpret: run a Pallas kernel in interpret mode.

    Returns:
        ``Pages`` with ``data [L, M, page_size, 2 * K * H]`` in the pool's storage dtype and its scales.

    Raises:
        ValueError: ids have a wrong shape or dtype, or (where their values are known) lie outside the pool.
        KernelUnsupportedError: the chosen implementation cannot do this; the message says what can.
    """
    ids = _as_ids(ids)
    _check(pool, ids=ids)
    name = dispatch.resolve(OP, implementation, pool.data, interpret)
    return _call("gather_pages", name, interpret, pool, ids)


def scatter_pages(
    pool: KVPool,
    ids: jax.Array | np.ndarray,
    pages: Pages,
    *,
    implementation: Implementation = "auto",
    interpret: Any = False,
) -> KVPool:
    """Puts pages back into the pool, in every layer: the inverse of ``gather_pages``, at any page ids.

    Args:
        pool: the page pool; use the returned one from here on.
        ids: int32 ``[M]`` page ids, each at most once. Padding entries are 0; what the scratch page holds afterwards is not
            defined.
        pages: what ``gather_pages`` returned (or the same on the host).
        implementation: "auto" takes the platform's own; any other name runs that one or raises.
        interpret: run a Pallas kernel in interpret mode.

    Returns:
        The updated pool; every page but ``ids`` and 0 is unchanged. In place where the pool was donated.

    Raises:
        ValueError: ids or pages have a wrong shape or dtype, or ids (where known) lie outside the pool or repeat.
        KernelUnsupportedError: the chosen implementation cannot do this; the message says what can.
    """
    ids = _as_ids(ids)
    _check(pool, ids=ids)
    check_pages(pages, pool, ids.shape[0])
    if dispatch.is_concrete(ids):
        _check_unique("ids", np.asarray(ids))
    name = dispatch.resolve(OP, implementation, pool.data, interpret)
    if not ids.shape[0]:
        return pool
    return _call("scatter_pages", name, interpret, pool, ids, pages)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _jitted(function: str, name: str, interpret, pool: KVPool, *args):
    return getattr(dispatch.load(OP, name), function)(pool, *args, interpret=interpret)


def _call(function: str, name: str, interpret, pool: KVPool, *args):
    if name == "reference":
        return getattr(dispatch.load(OP, name), function)(pool, *args, interpret=interpret)
    data = dispatch.no_gradient(OP, pool.data)
    return _jitted(function, name, interpret, dataclasses.replace(pool, data=data), *args)


def _as_ids(ids):
    return ids if hasattr(ids, "dtype") else np.asarray(ids, np.int32 if len(ids) == 0 else None)


def _check(pool: KVPool, **ids) -> None:
    dispatch.check_pool(pool)
    for name, value in ids.items():
        if len(jnp.shape(value)) != 1 or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name}: got {value.dtype}{list(jnp.shape(value))}, wants int32 [M]")
        if dispatch.is_concrete(value):
            known = np.asarray(value)
            bad = known[(known < 0) | (known >= pool.spec.num_pages)]
            if len(bad):
                raise ValueError(f"{name}: got page {bad[0]}, wants 0 <= page < {pool.spec.num_pages}")


def _check_unique(name: str, ids: np.ndarray) -> None:
    real = ids[ids != 0]
    unique, counts = np.unique(real, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{name}: got page {unique[counts > 1][0]} twice, wants each page at most once")


def _check_disjoint(src: np.ndarray, dst: np.ndarray) -> None:
    moved = src != dst
    _check_unique("dst", dst)
    both = np.intersect1d(src[src != 0], dst[moved])
    if len(both):
        raise ValueError(f"dst: got page {both[0]}, which is also a source; copies of one call want disjoint pages")
    if (dst[moved] == 0).any():
        raise ValueError("dst: got the scratch page 0 for another source; wants a page that a sequence owns")
