"""GPU decode: one query token a row, the row's KV cut into splits of fixed length, one program per split and KV head."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.paged_attention import triton_tile as tile
from pallas_kernels.paged_attention.triton_tiles import TritonTiles
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.triton_call import call, next_power_of_2

ITEM_FIELDS = 4


def decode_splits(
    q: jax.Array,
    operands: dict[str, jax.Array],
    plan: AttentionPlan,
    config: tile.TileConfig,
    tiles: TritonTiles,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every decode item on its own.

    Args:
        q: ``[T, N, H]``.
        operands: ``common_operands``.
        plan: with ``decode_items``.
        config: static settings.
        tiles: launch settings.
        interpret: run as plain jax operations.

    Returns:
        ``(out [W, N, H] float32, lse [W, N] float32 in log2 units)`` by output slot; slots no item names are not written.

    **Source:** Dao et al. 2023, "Flash-Decoding for long-context inference" (split KV, merge by log-sum-exp).
    """
    assert plan.decode_items is not None
    spec = config.spec
    num_heads, items = q.shape[1], plan.decode_items.shape[0]
    rows = min(max(next_power_of_2(config.group), tiles.decode_rows), tiles.max_decode_rows)
    head_tiles = -(-config.group // rows)
    scratch = call(
        _kernel(config, rows, head_tiles, num_heads),
        {"q": q, "items": jnp.asarray(plan.decode_items), **operands},
        {
            "out": jax.ShapeDtypeStruct((items, num_heads, spec.head_dim), jnp.float32),
            "lse": jax.ShapeDtypeStruct((items, num_heads), jnp.float32),
        },
        programs=items * spec.num_kv_heads * head_tiles,
        num_warps=tiles.decode_warps,
        num_stages=tiles.decode_stages,
        interpret=interpret,
    )
    return scratch["out"], scratch["lse"]


def _kernel(config: tile.TileConfig, rows: int, head_tiles: int, num_heads: int):
    spec = config.spec
    programs_of_item = spec.num_kv_heads * head_tiles

    def paged_decode(ins, outs):
        program = pl.program_id(0)
        item = lax.div(program, programs_of_item)
        rest = lax.rem(program, programs_of_item)
        kv_head, head_tile = lax.div(rest, head_tiles), lax.rem(rest, head_tiles)
        count = ins["items"][item, 2]

        @pl.when(count > 0)
        def _():
            row, first, slot = ins["items"][item, 0], ins["items"][item, 1], ins["items"][item, 3]
            indptr, layer = ins["page_indptr"][row], ins["layer"][0]
            end = first + count
            position = ins["seq_lens"][row] - 1
            window = config.sliding_window
            low = first if window is None else jnp.maximum(first, position - window + 1)
            in_group = head_tile * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0)
            heads = kv_head * config.group + in_group
            real_head = in_group < config.group
            dims = lax.broadcasted_iota(jnp.int32, (rows, config.dim), 1)
            head_index = jnp.broadcast_to(heads[:, None], (rows, config.dim))
            mask = jnp.broadcast_to(real_head[:, None], (rows, config.dim)) & (dims < spec.head_dim)
            token = ins["query_start_loc"][row]
            at = jnp.full_like(dims, token)
            q = compat.masked_load(ins["q"], (at, head_index, dims), mask=mask, other=0.0).astype(config.score_dtype)
            slopes = compat.masked_load(ins["alibi_slopes"], (heads,), mask=real_head, other=0.0) if config.alibi else None
            scale = ins["sm_scale"][0]
            if spec.quant == "tensor":
                scale = scale * ins["k_scale"][0]
            positions = jnp.full((rows,), position, jnp.int32)

            def step(i, carry):
                tokens = first + i * config.tokens + lax.broadcasted_iota(jnp.int32, (config.tokens,), 0)
                live = (tokens >= low) & (tokens < end)
                return tile.attend(
                    ins,
                    config,
                    q,
                    carry,
                    kv_head=kv_head,
                    place=tile.token_places(ins, config, indptr, layer, tokens, live),
                    live=live,
                    visible=jnp.broadcast_to(live[None, :], (rows, config.tokens)),
                    tokens=tokens,
                    positions=positions,
                    slopes=slopes,
                    scale=scale,
                )

            start = lax.div(low - first, config.tokens)
            stop = lax.div(count + config.tokens - 1, config.tokens)
            out, lse = tile.settle(lax.fori_loop(start, stop, step, tile.empty_carry(rows, config.dim)))
            if spec.quant == "tensor":
                out = out * ins["v_scale"][0]
            compat.masked_store(outs["out"], (jnp.full_like(dims, slot), head_index, dims), out, mask=mask)
            compat.masked_store(outs["lse"], (jnp.full_like(heads, slot), heads), lse, mask=real_head)

    return paged_decode
