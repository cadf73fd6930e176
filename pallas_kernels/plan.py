"""Host side of a step: lengths and block tables in, the int32 arrays that every kernel of the step shares out.

``plan`` is numpy only and is called once per step; its result is a pytree that goes into the jitted step and serves every
layer. All array sizes follow from a ``PlanShape`` (the bucket), so equal buckets never recompile.
"""

import dataclasses
from typing import Literal

import jax
import numpy as np

from pallas_kernels.pool import PoolSpec

Array = np.ndarray | jax.Array
Target = Literal["cpu", "gpu", "tpu"]
DROPPED_SLOT = np.int32(2**31 - 1)  # larger than any slot: the token is not written


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """Static sizes a plan is padded to.

    Args:
        num_tokens: query tokens of the step (T).
        num_seqs: rows (S).
        max_pages: pages of one row (P).
        decode_only: every row has at most one query token (then T must equal S and no query tiles are made).
    """

    num_tokens: int
    num_seqs: int
    max_pages: int
    decode_only: bool = False

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_seqs", "max_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants >= 1")
        if self.decode_only and self.num_tokens != self.num_seqs:
            raise ValueError(
                f"num_tokens: got {self.num_tokens} for {self.num_seqs} sequences; a decode-only step wants them equal"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """What the kernels of one step share. All arrays int32.

    A *row* is a sequence. Rows whose query length is 1 are decode rows; longer ones are cut into query tiles. Rows may come
    in any order. Row ``r``'s query token ``i`` stands at position ``seq_lens[r] - query_len[r] + i``.

    Attributes:
        seq_lens: ``[S]`` tokens whose KV exists after this step's write; 0 for padding rows.
        query_start_loc: ``[S + 1]`` offsets of the rows' query tokens in the flat batch.
        page_indptr: ``[S + 1]`` start of each row's run in ``page_ids``.
        page_ids: ``[M]`` physical pages, row after row; entries behind a row's length are never dereferenced.
        slot_mapping: ``[T]`` where each query token's K/V go, ``page * page_size + offset`` within a layer;
            ``DROPPED_SLOT`` for padding tokens.
        query_tiles: ``[B, 4]`` (row, first flat token, tokens, position of the first); unused tiles have 0 tokens. Planned for
            TPU, tiles are cut at multiples of ``query_tile`` in the flat batch instead of the row.
        decode_items: ``[W, 4]`` (row, first kv token, kv tokens, output slot): the decode rows cut into splits of
            ``split_len``; unused items have 0 tokens. None unless planned for GPU.
        split_indptr: ``[S + 1]`` start of each row's run of output slots (empty runs for rows that are no decode rows).
            None unless planned for GPU.
        write_groups: ``[G, 5]`` (page, first pool row, first source token, first row in group, rows): the tokens to write,
            cut at aligned groups of pool rows. None unless planned for TPU.
        num_counts: ``[4]`` used counts: (rows, query tiles, decode items, write groups).
        shape: the bucket (static).
        page_size, split_len, query_tile, write_group_rows: static sizes.
        sliding_window: the window the decode items were cut for, None for all of a row (static); attention may use a
            narrower window, never a wider one.
    """

    seq_lens: Array
    query_start_loc: Array
    page_indptr: Array
    page_ids: Array
    slot_mapping: Array
    query_tiles: Array
    decode_items: Array | None
    split_indptr: Array | None
    write_groups: Array | None
    num_counts: Array
    shape: PlanShape = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    split_len: int = dataclasses.field(metadata={"static": True})
    query_tile: int = dataclasses.field(metadata={"static": True})
    write_group_rows: int = dataclasses.field(metadata={"static": True})
    sliding_window: int | None = dataclasses.field(default=None, metadata={"static": True})


def write_group_rows(spec: PoolSpec) -> int:
    """Pool rows of one aligned DMA group on TPU: 8 for 4-byte and 16 for 2-byte elements, 32 for 1-byte ones, at most the page.

    Source: TPU memory tiles are (8, 128) 32-bit words; packed dtypes put 2 or 4 rows into a word.
    """
    rows = {4: 8, 2: 16, 1: 32}[spec.itemsize]
    while spec.page_size % rows:
        rows //= 2
    return rows


def check_target(target: Target | None) -> Target:
    """The target, that of JAX's default backend for None.

    Raises:
        ValueError: there is no such target.
    """
    if target is None:
        backend = jax.default_backend()
        return "tpu" if backend == "tpu" else "gpu" if backend in ("gpu", "cuda", "rocm") else "cpu"
    if target not in ("cpu", "gpu", "tpu"):
        raise ValueError(f'target: got {target!r}, wants "cpu", "gpu", "tpu" or None')
    return target


def _int32(name: str, values) -> np.ndarray:
    """``values`` as int32, which none of them may be outside of."""
    array = np.asarray(values)
    if array.dtype == np.int32:
        return array
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name}: got {array.dtype}, wants integers")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ValueError(f"{name}: got {array.max() if array.max() >= 2**31 else array.min()}, wants 32-bit integers")
    return array.astype(np.int32)


def plan(
    query_lens,
    seq_lens,
    block_tables,
    *,
    spec: PoolSpec,
    target: Target | None = None,
    shape: PlanShape | None = None,
    split_len: int = 512,
    query_tile: int = 64,
    sliding_window: int | None = None,
    validate: bool = True,
    writes: bool = True,
) -> AttentionPlan:
    """Plans one step.

    Args:
        query_lens: ``[S]`` query tokens of each row, >= 0.
        seq_lens: ``[S]`` tokens of each row after this step's write, >= ``query_lens``.
        block_tables: ``[S, P]`` physical page ids in logical order (or a list of lists); entries behind
            ``ceil(seq_len / page_size)`` are ignored.
        spec: the pool's format.
        target: "cpu", "gpu" or "tpu": which work lists to make; None takes JAX's default backend.
        shape: sizes to pad to; None takes the exact ones.
        split_len: kv tokens of a decode work item on GPU. It is fixed, never a function of the batch, so that a row's result
            does not depend on its neighbours.
        query_tile: query tokens of a tile.
        sliding_window: decode items start at the window's first split, so that freed pages behind it are not touched.
        validate: check lengths and page ids (cheap; leave it on outside of engines that have checked already).
        writes: False for a plan that only reads (a shared prefix, attended to without a causal mask): every slot is dropped,
            and a row may have more query tokens than ``seq_lens``.

    Returns:
        The plan, as numpy arrays.

    Raises:
        ValueError: lengths or page ids are out of range, or do not fit ``shape``.
    """
    target = check_target(target)
    for name, value in (("query_tile", query_tile), ("split_len", split_len)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, wants at least 1")
    q, n = _int32("query_lens", query_lens).reshape(-1), _int32("seq_lens", seq_lens).reshape(-1)
    if len(q) != len(n):
        raise ValueError(f"seq_lens: got {len(n)} entries, wants {len(q)} like query_lens")
    tables = _dense_tables(block_tables, len(q))
    page_size = spec.page_size
    used = -(-n // page_size)
    if shape is None:
        decode_only = bool((q == 1).all()) and len(q) > 0
        shape = PlanShape(max(int(q.sum()), 1), max(len(q), 1), max(tables.shape[1], 1), decode_only)
    _check_fit(q, n, tables, used, shape, spec, validate, writes)

    rows, pages = shape.num_seqs, shape.max_pages
    seq = np.zeros(rows, np.int32)
    seq[: len(n)] = n
    start = np.zeros(rows + 1, np.int32)
    np.cumsum(q, out=start[1 : len(q) + 1])
    start[len(q) + 1 :] = start[len(q)]
    ids = np.zeros((rows, pages), np.int32)
    width = min(pages, tables.shape[1])
    ids[: len(n), :width] = tables[:, :width]

    if writes:
        slots = _slots(q, n, ids, start, page_size, shape.num_tokens)
        if validate:
            _check_writers(slots[: start[len(q)]], start[: len(q) + 1], page_size)
    else:
        slots = np.full(shape.num_tokens, DROPPED_SLOT, np.int32)
    is_decode = q == 1 if not shape.decode_only else q >= 0
    tiles, num_tiles = _query_tiles(q, n, start, is_decode, query_tile, shape, aligned=target == "tpu")
    items = split_indptr = groups = None
    num_items = num_groups = 0
    if target == "gpu":
        items, split_indptr, num_items = _decode_items(n, is_decode & (q > 0), split_len, sliding_window, shape, page_size)
    group_rows = write_group_rows(spec)
    if target == "tpu":
        groups, num_groups = _write_groups(slots, int(q.sum()) if writes else 0, group_rows, page_size, shape)
    return AttentionPlan(
        seq_lens=seq,
        query_start_loc=start,
        page_indptr=np.arange(rows + 1, dtype=np.int32) * pages,
        page_ids=ids.reshape(-1),
        slot_mapping=slots,
        query_tiles=tiles,
        decode_items=items,
        split_indptr=split_indptr,
        write_groups=groups,
        num_counts=np.array([len(q), num_tiles, num_items, num_groups], np.int32),
        shape=shape,
        page_size=page_size,
        split_len=split_len,
        query_tile=query_tile,
        write_group_rows=group_rows,
        sliding_window=sliding_window if target == "gpu" else None,
    )


def _dense_tables(block_tables, rows: int) -> np.ndarray:
    if hasattr(block_tables, "ndim") and block_tables.dtype != object:
        tables = _int32("block_tables", block_tables)
        if tables.ndim != 2:
            raise ValueError(f"block_tables: got shape {list(tables.shape)}, wants [S, P] or a list of lists")
    else:
        width = max((len(t) for t in block_tables), default=0)
        tables = np.zeros((len(block_tables), width), np.int32)
        for i, table in enumerate(block_tables):
            tables[i, : len(table)] = _int32(f"block_tables[{i}]", table)
    if len(tables) != rows:
        raise ValueError(f"block_tables: got {len(tables)} rows, wants {rows} like query_lens")
    return tables


def _check_fit(q, n, tables, used, shape: PlanShape, spec: PoolSpec, validate: bool, writes: bool) -> None:
    if len(q) > shape.num_seqs:
        raise ValueError(f"query_lens: got {len(q)} rows, the shape holds {shape.num_seqs}")
    if q.sum() > shape.num_tokens:
        raise ValueError(f"query_lens: got {q.sum()} query tokens, the shape holds {shape.num_tokens}")
    if not validate or not len(q):
        return
    if (q < 0).any() or (n < 0).any() or (writes and (n < q).any()):
        raise ValueError("seq_lens: every row wants seq_len >= query_len >= 0 (seq_lens counts this step's tokens too)")
    if shape.decode_only and (q > 1).any():
        raise ValueError(f"query_lens: got {int(q.max())} in a decode-only step, wants at most 1")
    if used.max() > min(shape.max_pages, tables.shape[1]):
        raise ValueError(
            f"block_tables: a row of {int(n.max())} tokens needs {int(used.max())} pages of {spec.page_size}; "
            f"the table has {tables.shape[1]}, the shape {shape.max_pages}"
        )
    live = np.arange(tables.shape[1])[None, :] < used[:, None]
    bad = live & ((tables < 0) | (tables >= spec.num_pages))
    if bad.any():
        row, col = np.argwhere(bad)[0]
        raise ValueError(f"block_tables[{row}, {col}]: got page {tables[row, col]}, wants 0 <= page < {spec.num_pages}")


def _check_writers(slots, start, page_size: int) -> None:
    unique, counts = np.unique(slots, return_counts=True)
    if len(unique) < len(slots):
        slot = unique[counts > 1][0]
        first, second = np.searchsorted(start, np.flatnonzero(slots == slot)[:2], side="right") - 1
        raise ValueError(
            f"block_tables: rows {first} and {second} both write slot {slot % page_size} of page {slot // page_size}; "
            "wants a page of its own for each row that writes (copy_pages makes one)"
        )


def _slots(q, n, ids, start, page_size: int, num_tokens: int):
    total = int(q.sum())
    owner = np.repeat(np.arange(len(q)), q)
    position = np.arange(total, dtype=np.int32) - start[:-1][owner] + (n - q)[owner]
    slots = np.full(num_tokens, DROPPED_SLOT, np.int32)
    slots[:total] = ids[owner, position // page_size] * page_size + position % page_size
    return slots


def max_query_tiles(shape: PlanShape, query_tile: int) -> int:
    """Most query tiles a step of this shape can need: rows of two or more tokens, each cut into tiles."""
    if shape.decode_only:
        return 0
    return shape.num_tokens // query_tile + max(1, min(shape.num_seqs, shape.num_tokens // 2))


def _query_tiles(q, n, start, is_decode, query_tile: int, shape: PlanShape, aligned: bool):
    tiles = np.zeros((max_query_tiles(shape, query_tile), 4), np.int32)
    rows = np.flatnonzero((q > 0) & ~is_decode)
    begin, end = start[:-1][rows], start[:-1][rows] + q[rows]
    origin = begin // query_tile * query_tile if aligned else begin  # where the row's first tile starts, cut or not
    counts = -(-(end - origin) // query_tile)
    total = int(counts.sum())
    if total:
        row = np.repeat(rows, counts)
        index = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        edge = np.repeat(origin, counts) + index * query_tile
        first = np.maximum(edge, np.repeat(begin, counts))
        tiles[:total, 0] = row
        tiles[:total, 1] = first
        tiles[:total, 2] = np.minimum(edge + query_tile, np.repeat(end, counts)) - first
        tiles[:total, 3] = (n - q)[row] + first - np.repeat(begin, counts)
    return tiles, total


def _decode_items(n, is_decode, split_len: int, window: int | None, shape: PlanShape, page_size: int):
    per_row = -(-shape.max_pages * page_size // split_len)
    items = np.zeros((shape.num_seqs * per_row, 4), np.int32)
    rows = np.flatnonzero(is_decode)
    first = np.zeros(len(rows), np.int32) if window is None else np.maximum(n[rows] - window, 0) // split_len
    counts = -(-n[rows] // split_len) - first
    total = int(counts.sum())
    row = np.repeat(rows, counts)
    index = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    items[:total, 0] = row
    items[:total, 1] = index * split_len
    items[:total, 2] = np.minimum(n[row] - index * split_len, split_len)
    items[:total, 3] = np.arange(total)
    per = np.zeros(shape.num_seqs, np.int32)
    per[rows] = counts
    indptr = np.zeros(shape.num_seqs + 1, np.int32)
    np.cumsum(per, out=indptr[1:])
    return items, indptr, total


def _write_groups(slots, total: int, group_rows: int, page_size: int, shape: PlanShape):
    groups = np.zeros((shape.num_tokens, 5), np.int32)
    if total:
        used = slots[:total]
        group = used // group_rows
        head = np.flatnonzero(np.r_[True, (group[1:] != group[:-1]) | (used[1:] != used[:-1] + 1)])
        first = used[head]
        groups[: len(head), 0] = first // page_size
        groups[: len(head), 1] = first % page_size // group_rows * group_rows
        groups[: len(head), 2] = head
        groups[: len(head), 3] = first % group_rows
        groups[: len(head), 4] = np.diff(np.r_[head, total])
        return groups, len(head)
    return groups, 0
