"""Decode attention for callers who keep JAX's usual pair of page arrays and a dense block table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Implementation, is_concrete, resolve
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.plan import Target
from pallas_kernels.plan_decode import plan_decode
from pallas_kernels.pool import from_kv_pages

TARGET_OF: dict[str, Target] = {"triton": "gpu", "mosaic_tpu": "tpu", "xla": "cpu", "reference": "cpu"}


def paged_attention_kv(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    split_len: int = 512,
    implementation: Implementation = "auto",
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """One query token per row over separate K and V pages: a drop-in call, every argument may be traced.

    The pages the block table names are repacked into this library's page format in each call, which costs about one more read
    and write of the live KV. To keep the kernels' full speed, keep the KV in a ``KVPool`` (``from_kv_pages`` makes one) and
    call ``paged_attention``.

    Args:
        q: ``[B, N, H]``, the token at position ``lengths - 1`` of each row.
        k_pages: ``[K, num_pages, page_size, H]``.
        v_pages: the same shape and dtype.
        block_tables: int32 ``[B, P]`` page ids in logical order; entries behind a row's length are ignored.
        lengths: int32 ``[B]`` tokens of each row, the query's own included; 0 gives 0.
        split_len: kv tokens of a decode work item on GPU.
        implementation: "auto" takes the platform's own; any other name runs that one or raises.
        **options: the other keywords of ``paged_attention`` except ``layer`` and ``causal``. Note that ``sm_scale`` defaults
            to ``H ** -0.5`` here, and that 8-bit pages want ``k_scale`` and ``v_scale``.

    Returns:
        ``out [B, N, H]``, or ``(out, lse)`` with ``return_lse=True``.

    Raises:
        ValueError: a shape or dtype is not as above, or a length (where known) is more than its table holds.
        TypeError: an unknown keyword.
        KernelUnsupportedError: the chosen implementation cannot do this.
    """
    for name in ("layer", "causal"):
        if name in options:
            raise TypeError(
                f"paged_attention_kv: {name} has no meaning for one query token over one layer's pages; leave it out"
            )
    if k_pages.ndim != 4:
        raise ValueError(f"k_pages: got shape {list(k_pages.shape)}, wants [K, num_pages, page_size, H]")
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"v_pages: got {v_pages.dtype}{list(v_pages.shape)}, wants {k_pages.dtype}{list(k_pages.shape)} like k_pages"
        )
    rows = q.shape[0] if q.ndim == 3 else -1
    if jnp.ndim(block_tables) != 2 or jnp.shape(block_tables)[0] != rows:
        raise ValueError(f"block_tables: got shape {list(jnp.shape(block_tables))}, wants [{rows}, P] for q {list(q.shape)}")
    if jnp.shape(lengths) != (rows,):
        raise ValueError(f"lengths: got shape {list(jnp.shape(lengths))}, wants [{rows}] for q {list(q.shape)}")
    pages, page_size = jnp.shape(block_tables)[1], k_pages.shape[2]
    if is_concrete(lengths) and rows:
        known = np.asarray(lengths)
        if known.min() < 0 or known.max() > pages * page_size:
            wrong = int(known.min() if known.min() < 0 else known.max())
            raise ValueError(
                f"lengths: got {wrong}, wants 0 to {pages * page_size}: block_tables has {pages} pages of {page_size}"
            )
    used = -(-jnp.asarray(lengths, jnp.int32) // page_size)
    ids = jnp.where(jnp.arange(pages) < used[:, None], jnp.asarray(block_tables, jnp.int32), 0).reshape(-1)
    pool = from_kv_pages(_take(k_pages, ids), _take(v_pages, ids))
    table = 1 + jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    name: Any = resolve("paged_attention", implementation, q, options.get("interpret", False))
    plan = plan_decode(
        lengths,
        table,
        spec=pool.spec,
        target=TARGET_OF[name],
        split_len=split_len,
        sliding_window=options.get("sliding_window"),
    )
    return paged_attention(q, pool, plan, implementation=name, **options)


def _take(pages: jax.Array, ids: jax.Array) -> jax.Array:
    """The named pages behind one scratch page: ``[K, 1 + len(ids), page_size, H]``."""
    return jnp.take(pages, jnp.concatenate([jnp.zeros(1, jnp.int32), ids]), axis=1, mode="clip")
