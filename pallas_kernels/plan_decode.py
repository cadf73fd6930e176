"""``plan_decode``: a decode step's plan made with ``jax.numpy``, for lengths and block tables that live on the device."""

import jax
import jax.numpy as jnp

from pallas_kernels.plan import DROPPED_SLOT, AttentionPlan, PlanShape, Target, check_target, write_group_rows
from pallas_kernels.pool import PoolSpec


def plan_decode(
    seq_lens: jax.Array,
    block_tables: jax.Array,
    *,
    spec: PoolSpec,
    target: Target | None = None,
    split_len: int = 512,
    sliding_window: int | None = None,
) -> AttentionPlan:
    """Plans a step in which every row has one query token, from arrays that may be traced.

    The same plan as ``plan`` makes for ``query_lens`` of ones, but nothing can be validated: page ids within a row's length
    must lie in the pool.

    Args:
        seq_lens: int32 ``[S]`` tokens of each row after this step's write; rows of 0 are padding.
        block_tables: int32 ``[S, P]`` physical page ids in logical order; entries behind a row's length are ignored.
        spec: the pool's format.
        target: "cpu", "gpu" or "tpu": which work lists to make; None takes JAX's default backend.
        split_len: kv tokens of a decode work item on GPU.
        sliding_window: the widest window of any layer, or None.

    Returns:
        The plan, its arrays JAX arrays.

    Raises:
        ValueError: shapes are not as above.
    """
    target = check_target(target)
    if len(jnp.shape(block_tables)) != 2:
        raise ValueError(f"block_tables: got shape {list(jnp.shape(block_tables))}, wants [S, P]")
    rows, pages = jnp.shape(block_tables)
    if jnp.shape(seq_lens) != (rows,):
        raise ValueError(f"seq_lens: got shape {list(jnp.shape(seq_lens))}, wants [{rows}] like block_tables")
    shape = PlanShape(rows, rows, pages, decode_only=True)
    lengths, ids = jnp.asarray(seq_lens, jnp.int32), jnp.asarray(block_tables, jnp.int32)
    last = jnp.maximum(lengths - 1, 0)
    page = jnp.take_along_axis(ids, jnp.minimum(last // spec.page_size, pages - 1)[:, None], axis=1)[:, 0]
    live = lengths > 0
    slots = jnp.where(live, page * spec.page_size + last % spec.page_size, DROPPED_SLOT)
    items = indptr = groups = None
    num_items = num_groups = jnp.int32(0)
    if target == "gpu":
        items, indptr = _decode_items(lengths, split_len, sliding_window, -(-pages * spec.page_size // split_len))
        num_items = indptr[-1]
    group_rows = write_group_rows(spec)
    if target == "tpu":
        groups, num_groups = _write_groups(slots, live, group_rows, spec.page_size)
    return AttentionPlan(
        seq_lens=lengths,
        query_start_loc=jnp.arange(rows + 1, dtype=jnp.int32),
        page_indptr=jnp.arange(rows + 1, dtype=jnp.int32) * pages,
        page_ids=ids.reshape(-1),
        slot_mapping=slots,
        query_tiles=jnp.zeros((0, 4), jnp.int32),
        decode_items=items,
        split_indptr=indptr,
        write_groups=groups,
        num_counts=jnp.stack([jnp.int32(rows), jnp.int32(0), num_items, num_groups]),
        shape=shape,
        page_size=spec.page_size,
        split_len=split_len,
        query_tile=64,
        write_group_rows=group_rows,
        sliding_window=sliding_window if target == "gpu" else None,
    )


def _decode_items(lengths, split_len: int, window: int | None, per_row: int):
    first = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // split_len
    counts = -(-lengths // split_len) - first
    indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    index = first[:, None] + jnp.arange(per_row, dtype=jnp.int32)  # [S, per_row] split numbers
    slot = indptr[:-1, None] + jnp.arange(per_row, dtype=jnp.int32)
    start = index * split_len
    row = jnp.broadcast_to(jnp.arange(len(lengths), dtype=jnp.int32)[:, None], index.shape)
    item = jnp.stack([row, start, jnp.minimum(lengths[:, None] - start, split_len), slot], axis=-1)
    total = len(lengths) * per_row
    used = jnp.arange(per_row) < counts[:, None]
    return _compact(item.reshape(total, 4), jnp.where(used, slot, total).reshape(-1)), indptr


def _write_groups(slots, live, group_rows: int, page_size: int):
    """One group per token: decode rows own the page they write, so no two tokens share a group of pool rows."""
    place = slots % page_size
    group = jnp.stack(
        [
            slots // page_size,
            place // group_rows * group_rows,
            jnp.arange(len(slots), dtype=jnp.int32),
            place % group_rows,
            jnp.ones_like(slots),
        ],
        axis=-1,
    )
    position = jnp.cumsum(live, dtype=jnp.int32) - 1
    return _compact(group, jnp.where(live, position, len(slots))), jnp.sum(live, dtype=jnp.int32)


def _compact(rows, position):
    return jnp.zeros_like(rows).at[position].set(rows, mode="drop")
