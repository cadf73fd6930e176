"""The GPU implementation of ``paged_attention`` (Pallas, Triton lowering): split decode, merge, and tiled prefill."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat, triton_call
from pallas_kernels.paged_attention import triton_tile
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.paged_attention.triton_combine import combine_splits
from pallas_kernels.paged_attention.triton_decode import decode_splits
from pallas_kernels.paged_attention.triton_ragged import ragged_tiles
from pallas_kernels.paged_attention.triton_tiles import TritonTiles, tiles_for
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool, PoolSpec


def paged_attention(
    q: jax.Array,
    pool: KVPool,
    plan: AttentionPlan,
    layer: jax.Array,
    options: AttentionOptions,
    *,
    tiles: Tiles | TritonTiles | None = None,
    interpret: Any = False,
    return_lse: bool = False,
    out_dtype: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of decode rows, prefill rows or both. See the public ``paged_attention`` for the arguments.

    Decode rows (one query token) run split over KV in items of ``plan.split_len`` and are merged in order; longer rows run in
    query tiles. A row's arithmetic depends on its own length, the tile sizes and the split length, never on the batch.

    Args:
        q: ``[T, N, H]``.
        pool: the page pool.
        plan: made with ``target="gpu"``.
        layer: int32 scalar.
        options: checked keywords.
        tiles: ``TritonTiles`` sets everything; ``Tiles`` overrides kv tile, warps and stages of both kernels; None takes the
            tuned ones of the device, else the defaults.
        interpret: run as plain jax operations, on any backend.
        return_lse: whether the caller wants the log-sum-exp.
        out_dtype: of the output; None for q's.

    Returns:
        ``(out [T, N, H], lse float32 [T, N] or None)``.

    Raises:
        ValueError: the plan has no GPU work lists.
        KernelUnsupportedError: a pool this backend would address wrongly or whose numbers the device cannot convert.
    """
    if plan.decode_items is None or plan.split_indptr is None:
        raise ValueError('plan: has no decode items; make it with plan(..., target="gpu")')
    spec = pool.spec
    kind = compat.device_kind()
    if not interpret:
        triton_call.check_pool(spec)
        triton_call.check_device(spec, triton_call.compute_capability(kind))
    sizes = resolve_tiles(tiles, spec, kind)
    out_dtype = jnp.dtype(q.dtype if out_dtype is None else out_dtype)
    operands = triton_tile.common_operands(pool, plan, layer, options)
    interpret = bool(interpret)

    out: Any = jax.ShapeDtypeStruct(q.shape, out_dtype)
    lse: Any = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    if not plan.shape.decode_only:
        config = triton_tile.tile_config(q, spec, options, sizes.ragged_tokens)
        out, lse = ragged_tiles(q, operands, plan, config, sizes, out_dtype, interpret)
    config = triton_tile.tile_config(q, spec, options, sizes.decode_tokens)
    partial = decode_splits(q, operands, plan, config, sizes, interpret)
    out, lse = combine_splits(partial, operands, plan, config, sizes, out, lse, interpret)
    return out, lse if return_lse else None


def resolve_tiles(tiles: Tiles | TritonTiles | None, spec: PoolSpec, device_kind: str) -> TritonTiles:
    """The launch settings to use; see ``paged_attention``.

    Args:
        tiles: what the caller gave.
        spec: the pool's format.
        device_kind: whose tuned settings to take.

    Returns:
        Settings of all three kernels.

    Raises:
        ValueError: a size is no power of two.
    """
    if isinstance(tiles, TritonTiles):
        return tiles
    sizes = tiles_for(spec, device_kind)
    if tiles is None:
        return sizes
    changes: dict[str, int] = {}
    for field, value in (("tokens", tiles.kv_tile), ("warps", tiles.num_warps), ("stages", tiles.num_stages)):
        if value is not None:
            changes |= {f"decode_{field}": value, f"ragged_{field}": value}
    return dataclasses.replace(sizes, **changes)
