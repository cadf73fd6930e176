"""``Pages``: pages outside of a pool."""

import dataclasses

import jax
import numpy as np

from pallas_kernels.pool import KVPool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Whole pages of all layers, out of their pool.

    Attributes:
        data: ``[L, M, page_size, 2 * K * H]`` in the pool's storage dtype.
        scales: float32 ``[L, M, 1, 2 * K * page_size]`` for "token_head" pools, else None.
    """

    data: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray | None


def check_pages(pages: Pages, pool: KVPool, count: int) -> None:
    """Checks that ``pages`` are ``count`` pages in the format of ``pool``.

    Raises:
        ValueError: they are not.
    """
    spec = pool.spec
    for name, got, like in (("pages.data", pages.data, pool.data), ("pages.scales", pages.scales, pool.scales)):
        if got is None and like is None:
            continue
        if got is None or like is None:
            raise ValueError(
                f"{name}: got {'None' if got is None else 'an array'}, the pool has {'none' if like is None else 'some'}"
            )
        wanted = (spec.num_layers, count, *like.shape[1:])
        if tuple(got.shape) != wanted or got.dtype != like.dtype:
            raise ValueError(f"{name}: got {got.dtype}{list(got.shape)}, wants {like.dtype}{list(wanted)} for {count} ids")
