"""Paged attention on TPU: decode rows by one kernel, longer rows by another, joined in the flat batch.

Both read their pages by copies that the kernel starts itself, so only live pages move. Tests run them in Pallas' TPU interpret
mode with race detection; they compile for TPU v4, v5e, v5p, v6e and 7x.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import mosaic_common as common
from pallas_kernels.paged_attention.mosaic_decode import decode
from pallas_kernels.paged_attention.mosaic_ragged import ragged
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool


def paged_attention(
    q: jax.Array,
    pool: KVPool,
    plan: AttentionPlan,
    layer,
    options: AttentionOptions,
    *,
    tiles: Tiles | None,
    interpret,
    return_lse: bool,
    out_dtype,
) -> tuple[jax.Array, jax.Array | None]:
    """See the public ``paged_attention``.

    Args:
        q: ``[T, N, H]``.
        pool, plan, layer: as there.
        options: checked keywords.
        tiles: ``kv_tile``, ``fetch_tile`` and ``vmem_limit_bytes`` are used.
        interpret: False, or parameters of the interpreter.
        return_lse: also return the log-sum-exp.
        out_dtype: dtype of the output.

    Returns:
        ``(out [T, N, H], lse float32 [T, N] or None)``.

    Raises:
        KernelUnsupportedError: the pool's rows or pages are no whole TPU tiles, or the step does
            not fit scalar or vector memory.
    """
    common.check_pool("paged_attention", pool.spec)
    common.check_plan("paged_attention", plan)
    how = {"tiles": tiles, "interpret": interpret, "return_lse": return_lse, "out_dtype": out_dtype}
    tokens = q.shape[0]
    starts, lengths = jnp.asarray(plan.query_start_loc), jnp.asarray(plan.seq_lens)
    query_lens = starts[1:] - starts[:-1]
    at = jnp.minimum(starts[:-1], tokens - 1)
    singles = decode(q[at], jnp.where(query_lens == 1, lengths, 0), pool, plan, layer, options, **how)
    target = jnp.where(query_lens == 1, starts[:-1], tokens + jnp.arange(len(at), dtype=jnp.int32))  # others are dropped
    if plan.query_tiles.shape[0]:
        # Tokens of rows longer than one: between a long row's start and its end the running sum is positive.
        long = (query_lens > 1).astype(jnp.int32)
        edges = jnp.zeros(tokens + 1, jnp.int32).at[starts[:-1]].add(long).at[starts[1:]].add(-long)
        inside = jnp.cumsum(edges)[:tokens] > 0
        out, lse = ragged(q, pool, plan, layer, options, **how)
        out = jnp.where(inside[:, None, None], out, 0)
        lse = None if lse is None else jnp.where(inside[:, None], lse, -jnp.inf)
    else:
        out = jnp.zeros(q.shape, out_dtype)
        lse = jnp.full(q.shape[:2], -jnp.inf) if return_lse else None
    out = out.at[target].set(singles[0], mode="drop", unique_indices=True)
    if lse is not None:
        lse = lse.at[target].set(singles[1], mode="drop", unique_indices=True)
    return out, lse
