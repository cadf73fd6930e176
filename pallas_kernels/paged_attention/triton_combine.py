"""GPU decode, second half: merges a row's splits in their order and writes its token's output."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.paged_attention import triton_tile as tile
from pallas_kernels.paged_attention.triton_tiles import TritonTiles
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.triton_call import LN2, call, next_power_of_2

NUM_WARPS = 4
NUM_STAGES = 2
CLEAR_TOKENS = 16  # padding tokens that one program sets to zero
CLEAR_ELEMENTS = 1024


def combine_splits(
    partial: tuple[jax.Array, jax.Array],
    operands: dict[str, jax.Array],
    plan: AttentionPlan,
    config: tile.TileConfig,
    tiles: TritonTiles,
    out: jax.ShapeDtypeStruct | jax.Array,
    lse: jax.ShapeDtypeStruct | jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Merges splits and fills what is left of the result: decode rows' tokens, and zeros for padding tokens.

    Args:
        partial: what ``decode_splits`` returns.
        operands: ``common_operands``.
        plan: with ``split_indptr``.
        config: static settings.
        tiles: launch settings.
        out: ``[T, N, H]``: an array to be written in place (tokens of longer rows keep what they hold), or its shape.
        lse: ``[T, N]`` float32, likewise.
        interpret: run as plain jax operations.

    Returns:
        ``(out, lse)``; lse in natural units, -inf for padding tokens.

    **Source:** Ye et al. 2025 (FlashInfer), section 2.2: attention states merge by their log-sum-exp.
    """
    assert plan.split_indptr is not None
    num_tokens, num_heads, _ = out.shape
    inputs: dict[str, Any] = {
        "partial_out": partial[0],
        "partial_lse": partial[1],
        "split_indptr": jnp.asarray(plan.split_indptr),
    }
    inputs["query_start_loc"] = operands["query_start_loc"]
    if config.sinks:
        inputs["sinks"] = operands["sinks"]
    aliases = {}
    if isinstance(out, jax.Array):
        inputs |= {"out_before": out, "lse_before": lse}
        aliases = {"out_before": "out", "lse_before": "lse"}
    num_seqs = plan.split_indptr.shape[0] - 1
    result = call(
        _kernel(config, tiles.combine_splits, num_seqs, num_tokens, num_heads),
        inputs,
        {"out": jax.ShapeDtypeStruct(out.shape, out.dtype), "lse": jax.ShapeDtypeStruct(lse.shape, lse.dtype)},
        programs=num_seqs * num_heads + -(-num_tokens // CLEAR_TOKENS),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        aliases=aliases,
        interpret=interpret,
    )
    return result["out"], result["lse"]


def _kernel(config: tile.TileConfig, chunk: int, num_seqs: int, num_tokens: int, num_heads: int):
    dim, head_dim = config.dim, config.spec.head_dim

    width = num_heads * head_dim
    padded_heads = next_power_of_2(num_heads)

    def write(outs, where, out, lse, token, head):
        compat.masked_store(outs["out"], where, out.astype(outs["out"].dtype), mask=where[2] < head_dim)
        compat.masked_store(outs["lse"], (jnp.full((1,), token), jnp.full((1,), head)), lse)

    def merge(ins, outs, row, head, first, end):
        def step(i, carry):
            peak, total, acc = carry
            slots = first + i * chunk + lax.broadcasted_iota(jnp.int32, (chunk,), 0)
            live = slots < end
            lse = compat.masked_load(ins["partial_lse"], (slots, jnp.full_like(slots, head)), mask=live, other=tile.NEG_INF)
            new_peak = jnp.maximum(peak, jnp.max(lse))
            safe = jnp.where(new_peak == tile.NEG_INF, 0.0, new_peak)
            weight, keep = jnp.exp2(lse - safe), jnp.exp2(peak - safe)
            cols = lax.broadcasted_iota(jnp.int32, (chunk, dim), 1)
            at = (jnp.broadcast_to(slots[:, None], (chunk, dim)), jnp.full_like(cols, head), cols)
            mask = jnp.broadcast_to(live[:, None], (chunk, dim)) & (cols < head_dim)
            part = compat.masked_load(ins["partial_out"], at, mask=mask, other=0.0)
            return (
                new_peak,
                total * keep + jnp.sum(weight),
                acc * keep + jnp.sum(weight[:, None] * part, axis=0),
            )

        peak, total, acc = lax.fori_loop(
            0,
            lax.div(end - first + chunk - 1, chunk),
            step,
            (jnp.float32(tile.NEG_INF), jnp.float32(0.0), jnp.zeros((dim,), jnp.float32)),
        )
        out, lse = tile.settle((jnp.full((1,), peak), jnp.full((1,), total), acc[None, :]))
        if config.sinks:
            out, lse = tile.with_sinks(out, lse, jnp.full((1,), ins["sinks"][head]))
        dims = lax.broadcasted_iota(jnp.int32, (dim,), 0)
        token = ins["query_start_loc"][row]
        write(outs, (jnp.full_like(dims, token), jnp.full_like(dims, head), dims), out.reshape(dim), lse * LN2, token, head)

    def clear(outs, token):
        def part(i, carry):
            element = i * CLEAR_ELEMENTS + lax.broadcasted_iota(jnp.int32, (CLEAR_ELEMENTS,), 0)
            size = jnp.full_like(element, head_dim)
            where = (jnp.full_like(element, token), lax.div(element, size), lax.rem(element, size))
            compat.masked_store(outs["out"], where, jnp.zeros_like(element, outs["out"].dtype), mask=element < width)
            return carry

        lax.fori_loop(0, -(-width // CLEAR_ELEMENTS), part, 0)
        heads = lax.broadcasted_iota(jnp.int32, (padded_heads,), 0)
        nothing = jnp.full((padded_heads,), tile.NEG_INF, jnp.float32)
        compat.masked_store(outs["lse"], (jnp.full_like(heads, token), heads), nothing, mask=heads < num_heads)

    def combine_decode_splits(ins, outs):
        program = pl.program_id(0)
        index, head = lax.div(program, num_heads), lax.rem(program, num_heads)
        row = jnp.minimum(index, num_seqs - 1)
        first, end = ins["split_indptr"][row], ins["split_indptr"][row + 1]

        @pl.when((index < num_seqs) & (end > first))
        def _():
            merge(ins, outs, row, head, first, end)

        start = ins["query_start_loc"][row]

        @pl.when((index < num_seqs) & (head == 0) & (end == first) & (ins["query_start_loc"][row + 1] == start + 1))
        def _():  # a query token of a row without keys
            clear(outs, start)

        @pl.when(index >= num_seqs)
        def _():
            begin = (program - num_seqs * num_heads) * CLEAR_TOKENS
            used = ins["query_start_loc"][num_seqs]
            stop = jnp.minimum(begin + CLEAR_TOKENS, num_tokens)
            lax.fori_loop(jnp.maximum(begin, used), stop, lambda token, carry: (clear(outs, token), carry)[1], 0)

    return combine_decode_splits
