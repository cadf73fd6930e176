"""Shared prefixes: read once per group of rows instead of once per row, then merged with each row's own tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Implementation
from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.merge import merge_states
from pallas_kernels.plan import AttentionPlan, PlanShape, Target, plan
from pallas_kernels.pool import KVPool, PoolSpec


def plan_cascade(
    query_lens: Sequence[int] | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
    block_tables: Sequence[Sequence[int]] | np.ndarray,
    *,
    group_sizes: Sequence[int],
    prefix_pages: Sequence[int],
    spec: PoolSpec,
    target: Target | None = None,
    shapes: tuple[PlanShape, PlanShape] | None = None,
    split_len: int = 512,
    query_tile: int = 64,
) -> tuple[AttentionPlan, AttentionPlan]:
    """Plans a step in two levels: each group's shared prefix, and each row's tokens behind it.

    Args:
        query_lens, seq_lens, block_tables: the flat step, as for ``plan``, its rows group after group.
        group_sizes: rows of each group; they add up to the number of rows.
        prefix_pages: full pages at the front of the group's tables that all its rows share; 0 for a group without.
        spec, target, split_len, query_tile: as for ``plan``.
        shapes: sizes to pad the two levels to (equal ``num_tokens``); None takes the exact ones.

    Returns:
        ``(prefix plan, suffix plan)`` for ``cascade_attention``. ``write_kv`` takes the suffix plan: its slots are the flat
        step's.

    Raises:
        ValueError: groups do not cover the rows, a group's tables differ within its prefix, or a row's queries begin inside
            the prefix.

    Source: Ye et al. 2025 (FlashInfer), section 3.1.2 (shared-prefix decoding in levels).
    """
    q, n = np.asarray(query_lens, np.int32), np.asarray(seq_lens, np.int32)
    if sum(group_sizes) != len(q) or len(prefix_pages) != len(group_sizes):
        raise ValueError(
            f"group_sizes: got {list(group_sizes)} with {len(prefix_pages)} prefix_pages, wants one of each per group and "
            f"sizes that add up to {len(q)} rows"
        )
    starts = np.r_[0, np.cumsum(group_sizes)].astype(int)
    prefix_tables, suffix_tables = [], []
    for g, pages in enumerate(prefix_pages):
        rows = range(starts[g], starts[g + 1])
        shared = [int(p) for p in block_tables[rows[0]][:pages]] if rows else []
        for r in rows:
            if [int(p) for p in block_tables[r][:pages]] != shared or len(shared) < pages:
                raise ValueError(f"prefix_pages[{g}]: got {pages}, but row {r} does not begin with the group's pages {shared}")
            if n[r] - q[r] < pages * spec.page_size:
                raise ValueError(
                    f"prefix_pages[{g}]: got {pages}, but row {r} has only {n[r] - q[r]} tokens before its queries; "
                    f"a shared page wants {spec.page_size}"
                )
            suffix_tables.append([int(p) for p in block_tables[r][pages:]])
        prefix_tables.append(shared)
    per_row = np.repeat(np.asarray(prefix_pages, np.int32), group_sizes) * spec.page_size
    group_queries = np.add.reduceat(np.r_[q, 0], starts[:-1]) * (np.asarray(group_sizes) > 0)
    prefix_shape, suffix_shape = shapes or (_exact(group_queries, prefix_tables), _exact(q, suffix_tables))
    common: dict[str, Any] = {"spec": spec, "target": target, "split_len": split_len, "query_tile": query_tile}
    prefix_lens = np.asarray(prefix_pages, np.int32) * spec.page_size
    first = plan(group_queries, prefix_lens, prefix_tables, shape=prefix_shape, writes=False, **common)
    return first, plan(q, n - per_row, suffix_tables, shape=suffix_shape, **common)


def _exact(query_lens: np.ndarray, tables: list[list[int]]) -> PlanShape:
    width = max((len(t) for t in tables), default=0)
    decode_only = len(tables) > 0 and bool((query_lens == 1).all())
    return PlanShape(max(int(query_lens.sum()), 1), max(len(tables), 1), max(width, 1), decode_only)


def cascade_attention(
    q: jax.Array,
    pool: KVPool,
    levels: Sequence[AttentionPlan],
    *,
    layer: int | jax.Array = 0,
    sm_scale: float | jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    implementation: Implementation = "auto",
    tiles: Any = None,
    interpret: Any = False,
    sliding_window: int | None = None,
    alibi_slopes: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of a step whose rows share prefixes: the same result as ``paged_attention`` on the flat step.

    Every level but the last covers keys that all queries of its rows see (no causal mask); the last one is an ordinary causal
    step over the rows' own tokens. The levels are merged by their log-sum-exps in float32. It pays when a group reads its
    prefix many times over: from about 4 rows sharing 1,000 tokens.

    Args:
        q: ``[T, N, H]``, the flat step's queries.
        pool: the page pool.
        levels: plans over the same ``T`` query tokens, outermost first (``plan_cascade`` makes two; more are fine).
        layer, sm_scale, soft_cap, k_scale, v_scale, return_lse, out_dtype, implementation, tiles, interpret: as for
            ``paged_attention``.
        sinks: as for ``paged_attention``; they join the last level only.
        sliding_window, alibi_slopes: None. They depend on positions across levels, which a level does not know.

    Returns:
        ``out [T, N, H]``, or ``(out, lse)``.

    Raises:
        ValueError: no level, or levels of different ``T``.
        KernelUnsupportedError: ``sliding_window`` or ``alibi_slopes`` was given, or the implementation cannot do the rest.

    Source: Ye et al. 2025 (FlashInfer), section 3.1.2; Juravsky et al. 2024 (Hydragen), section 3.2.
    """
    for name, value in (("sliding_window", sliding_window), ("alibi_slopes", alibi_slopes)):
        if value is not None:
            raise KernelUnsupportedError(
                f"cascade_attention: {name} depends on positions across levels; paged_attention on the flat plan takes it"
            )
    if not levels:
        raise ValueError("levels: got none, wants at least one plan")
    if len({level.shape.num_tokens for level in levels}) != 1:
        raise ValueError(f"levels: got num_tokens {[p.shape.num_tokens for p in levels]}, wants the same for every level")
    out: Any = None
    lse: Any = None
    for index, level in enumerate(levels):
        last = index == len(levels) - 1
        part, part_lse = paged_attention(
            q,
            pool,
            level,
            layer=layer,
            sm_scale=sm_scale,
            causal=last,
            soft_cap=soft_cap,
            sinks=sinks if last else None,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=True,
            out_dtype=jnp.float32,
            implementation=implementation,
            tiles=tiles,
            interpret=interpret,
        )
        out, lse = (part, part_lse) if out is None else merge_states(out, lse, part, part_lse)
    out = out.astype(q.dtype if out_dtype is None else out_dtype)
    return (out, lse) if return_lse else out
