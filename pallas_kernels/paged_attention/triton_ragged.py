"""GPU prefill: rows of two and more query tokens, cut into tiles; one program per tile, KV head and cut of its rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.paged_attention import triton_tile as tile
from pallas_kernels.paged_attention.triton_tiles import TritonTiles
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.triton_call import LN2, call, next_power_of_2


def ragged_tiles(
    q: jax.Array,
    operands: dict[str, jax.Array],
    plan: AttentionPlan,
    config: tile.TileConfig,
    tiles: TritonTiles,
    out_dtype,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every query tile. K and V come from the pool alone: prefixes, chunks and whole prompts are one case.

    A tile's rows are its query tokens times the query heads of one KV head, so that a KV tile is read once for all of them.

    Args:
        q: ``[T, N, H]``.
        operands: ``common_operands``.
        plan: with ``query_tiles``.
        config: static settings.
        tiles: launch settings.
        out_dtype: of the output.
        interpret: run as plain jax operations.

    Returns:
        ``(out [T, N, H], lse [T, N])``; tokens that no tile names are not written.

    **Source:** Dao 2024 (FlashAttention-2), algorithm 1, with unmasked tiles before the diagonal ones.
    """
    spec = config.spec
    num_tokens, num_heads, _ = q.shape
    rows_of_tile = plan.query_tile * config.group
    rows = min(next_power_of_2(rows_of_tile), tiles.ragged_rows)
    cuts = -(-rows_of_tile // rows)
    result = call(
        _kernel(config, rows, cuts),
        {"q": q, "tiles": jnp.asarray(plan.query_tiles), **operands},
        {
            "out": jax.ShapeDtypeStruct((num_tokens, num_heads, spec.head_dim), out_dtype),
            "lse": jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        },
        programs=plan.query_tiles.shape[0] * spec.num_kv_heads * cuts,
        num_warps=tiles.ragged_warps,
        num_stages=tiles.ragged_stages,
        interpret=interpret,
    )
    return result["out"], result["lse"]


def _kernel(config: tile.TileConfig, rows: int, cuts: int):
    spec, group, width = config.spec, config.group, config.tokens
    programs_of_tile = spec.num_kv_heads * cuts

    def paged_ragged(ins, outs):
        program = pl.program_id(0)
        index = lax.div(program, programs_of_tile)
        rest = lax.rem(program, programs_of_tile)
        kv_head, first_row = lax.div(rest, cuts), lax.rem(rest, cuts) * rows
        count = ins["tiles"][index, 2]

        @pl.when(first_row < count * group)
        def _():
            sequence, first_token, first_position = ins["tiles"][index, 0], ins["tiles"][index, 1], ins["tiles"][index, 3]
            indptr, layer = ins["page_indptr"][sequence], ins["layer"][0]
            seq_len = ins["seq_lens"][sequence]
            row = first_row + lax.broadcasted_iota(jnp.int32, (rows,), 0)
            group_of = jnp.full_like(row, group)
            in_tile, heads = lax.div(row, group_of), kv_head * group + lax.rem(row, group_of)
            real = in_tile < count
            tokens_of_row, positions = first_token + in_tile, first_position + in_tile
            dims = lax.broadcasted_iota(jnp.int32, (rows, config.dim), 1)
            where = (
                jnp.broadcast_to(tokens_of_row[:, None], dims.shape),
                jnp.broadcast_to(heads[:, None], dims.shape),
                dims,
            )
            mask = jnp.broadcast_to(real[:, None], dims.shape) & (dims < spec.head_dim)
            q = compat.masked_load(ins["q"], where, mask=mask, other=0.0).astype(config.score_dtype)
            slopes = compat.masked_load(ins["alibi_slopes"], (heads,), mask=real, other=0.0) if config.alibi else None
            scale = ins["sm_scale"][0]
            if spec.quant == "tensor":
                scale = scale * ins["k_scale"][0]

            earliest = first_position + lax.div(first_row, jnp.int32(group))
            latest = first_position + jnp.minimum(count - 1, lax.div(first_row + rows - 1, jnp.int32(group)))
            end = jnp.minimum(seq_len, latest + 1) if config.causal else seq_len
            window = config.sliding_window
            low = jnp.int32(0) if window is None else jnp.maximum(0, earliest - window + 1)

            def step(masked: bool):
                def body(i, carry):
                    tokens = i * width + lax.broadcasted_iota(jnp.int32, (width,), 0)
                    live = visible = None
                    if masked:
                        live = tokens < end
                        if window is not None:
                            live = live & (tokens >= low)
                        visible = jnp.broadcast_to(live[None, :], (rows, width))
                        if config.causal:
                            visible = visible & (tokens[None, :] <= positions[:, None])
                        if window is not None:
                            visible = visible & (tokens[None, :] > positions[:, None] - window)
                    return tile.attend(
                        ins,
                        config,
                        q,
                        carry,
                        kv_head=kv_head,
                        place=tile.token_places(ins, config, indptr, layer, tokens, live),
                        live=live,
                        visible=visible,
                        tokens=tokens,
                        positions=positions,
                        slopes=slopes,
                        scale=scale,
                    )

                return body

            carry = tile.empty_carry(rows, config.dim)
            stop = lax.div(end + width - 1, width)
            if window is None:
                whole = lax.div(jnp.minimum(earliest + 1, seq_len) if config.causal else seq_len, width)
                carry = lax.fori_loop(0, whole, step(masked=False), carry)
                carry = lax.fori_loop(whole, stop, step(masked=True), carry)
            else:
                carry = lax.fori_loop(lax.div(low, width), stop, step(masked=True), carry)
            out, lse = tile.settle(carry)
            if spec.quant == "tensor":
                out = out * ins["v_scale"][0]
            if config.sinks:
                out, lse = tile.with_sinks(out, lse, compat.masked_load(ins["sinks"], (heads,), mask=real, other=0.0))
            compat.masked_store(outs["out"], where, out.astype(outs["out"].dtype), mask=mask)
            compat.masked_store(outs["lse"], (tokens_of_row, heads), lse * LN2, mask=real)

    return paged_ragged
