"""Prefill on TPU: rows of two or more query tokens, whole prompts or chunks of them, in one call.

The flat batch is cut into windows of ``query_tile`` tokens. A grid step takes one tile: the part of a window that belongs to
one row. Its matrix products run over the whole window (``query_tile * G`` rows), and only the row's own tokens are kept, so
queries and outputs move as aligned blocks and tiles of several rows share a window. Pages stream through two VMEM buffers, the
next tile's first pages while the current tile computes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import mosaic_common as common
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool, from_storage

CHUNK = 128  # matrix rows of one softmax step: their scores against a tile of keys fill the vector registers


def ragged(
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
    """Attention of the tokens in the plan's query tiles.

    Args:
        q: ``[T, N, H]``.
        pool, plan, layer, options, tiles, interpret, return_lse, out_dtype: as handed to an implementation.

    Returns:
        ``(out [T, N, H], lse float32 [T, N] or None)``. Tokens of no query tile hold anything.
    """
    spec = pool.spec
    tokens, num_heads, dim = q.shape
    heads = spec.num_kv_heads
    group = num_heads // heads
    lanes = common.head_lanes(spec)
    kv_tile, fetch = common.tile_sizes(spec, tiles)
    window_tokens = max(plan.query_tile, 1)
    padded = -(-tokens // window_tokens) * window_tokens
    tall = -(-window_tokens * group // 16) * 16
    windows = padded // window_tokens
    operand = common.operand_dtype(q.dtype, spec)

    def to_windows(x):  # [T, K, G, W] -> [K, windows, tall, W]
        x = jnp.pad(x, ((0, padded - tokens), (0, 0), (0, 0), (0, 0))).transpose(1, 0, 2, 3)
        x = x.reshape(heads, windows, window_tokens * group, x.shape[-1])
        return jnp.pad(x, ((0, 0), (0, 0), (0, tall - window_tokens * group), (0, 0)))

    def from_windows(x):  # the inverse
        x = x[:, :, : window_tokens * group].reshape(heads, padded, group, x.shape[-1])
        return x[:, :tokens].transpose(1, 0, 2, 3)

    wide = to_windows(common.pad_query(q.reshape(tokens, heads, group, dim).astype(operand), lanes.k_skip, lanes.width))
    first_page, factors = common.scalars(pool, layer, options)
    slopes = common.per_row_heads(options.alibi_slopes, heads, tall, window_tokens)
    sinks = common.per_row_heads(options.sinks, heads, tall, window_tokens)
    token_of = np.full((tall, common.LANES), window_tokens, np.int32)  # token of each matrix row, the same in every lane
    token_of[: window_tokens * group] = (np.arange(window_tokens * group) // group)[:, None]
    bounds = _tile_bounds(plan, options, window_tokens)

    def window_block(width):
        return pl.BlockSpec((heads, None, tall, width), lambda t, bounds, *_: (0, bounds[8 * t + 1], 0, 0))

    whole = pl.BlockSpec((heads, tall, common.LANES), lambda t, *_: (0, 0, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    operands = [wide, jnp.asarray(token_of), from_storage(pool.data, spec)]
    in_specs = [window_block(lanes.width), pl.BlockSpec((tall, common.LANES), lambda t, *_: (0, 0)), anywhere]
    for value, block in ((pool.scales, anywhere), (slopes, whole), (sinks, whole)):
        if value is not None:
            operands.append(value)
            in_specs.append(block)
    out_shape = [jax.ShapeDtypeStruct((heads, windows, tall, lanes.width), out_dtype)]
    out_specs = [window_block(lanes.width)]
    if return_lse:
        out_shape.append(jax.ShapeDtypeStruct((heads, windows, tall, common.LANES), jnp.float32))
        out_specs.append(window_block(common.LANES))
    scratch = [pltpu.VMEM((2, fetch, spec.row_elements), jnp.dtype(spec.dtype))]
    if pool.scales is not None:
        scratch.append(pltpu.VMEM((2, fetch // spec.page_size, 1, 2 * heads * spec.page_size), jnp.float32))
    scratch += [
        pltpu.VMEM((heads, tall, common.LANES), jnp.float32),
        pltpu.VMEM((heads, tall, common.LANES), jnp.float32),
        pltpu.VMEM((heads, tall, lanes.width), jnp.float32),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((2, 2)),
    ]
    needed = 2 * fetch * (spec.row_elements * spec.itemsize + (8 * 4 * heads if pool.scales is not None else 0))
    needed += heads * tall * (12 * lanes.width + (16 if return_lse else 8) * common.LANES)
    needed += 3 * 4 * (CHUNK if tall % CHUNK == 0 else tall) * kv_tile
    results = pl.pallas_call(
        lambda *refs: _kernel(refs, pool, options, lanes, kv_tile, fetch, window_tokens, operand, return_lse),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(plan.query_tiles.shape[0],),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=common.check_vmem("paged_attention", needed, tiles),
        ),
        interpret=interpret,
        name="paged_ragged",
    )(bounds, jnp.asarray(plan.page_indptr), jnp.asarray(plan.page_ids), first_page, factors, *operands)
    out = common.take_output(from_windows(results[0]).astype(out_dtype), lanes.v_skip, dim).reshape(tokens, num_heads, dim)
    return out, from_windows(results[1])[..., 0].reshape(tokens, num_heads) if return_lse else None


def _tile_bounds(plan: AttentionPlan, options: AttentionOptions, window_tokens: int) -> jax.Array:
    """Scalars of every query tile, flat int32 ``[B * 8]``.

    (row, window of the flat batch, first token in the window, tokens, position of the window's token 0, first key, end of keys,
    0). Unused tiles have no tokens, no keys, and stay on the last used window.
    """
    tiles = jnp.asarray(plan.query_tiles)
    row, first, count, position = tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3]
    used = count > 0
    window = jnp.where(used, first // window_tokens, 0)
    window = jnp.where(used, window, jnp.max(window))
    inside = first - window * window_tokens
    length = jnp.asarray(plan.seq_lens)[row]
    high = jnp.minimum(position + count, length) if options.causal else length
    low = jnp.zeros_like(high) if options.sliding_window is None else jnp.maximum(position - options.sliding_window + 1, 0)
    high = jnp.where(used, jnp.maximum(high, 0), 0)
    low = jnp.minimum(jnp.where(used, low, 0), high)
    columns = (row, window, jnp.where(used, inside, 0), count, position - inside, low, high, jnp.zeros_like(row))
    return jnp.stack(columns, axis=1).reshape(-1).astype(jnp.int32)


def _kernel(refs, pool, options, lanes, kv_tile, fetch, window_tokens, operand, return_lse) -> None:
    refs = list(refs)
    bounds, indptr, pages, first_page, factors, q_ref, token_ref, data = refs[:8]
    rest = iter(refs[8:])
    spec = pool.spec
    scales = next(rest) if pool.scales is not None else None
    slopes = next(rest) if options.alibi_slopes is not None else None
    sinks = next(rest) if options.sinks is not None else None
    out_ref = next(rest)
    lse_ref = next(rest) if return_lse else None
    buffer = next(rest)
    scale_buffer = next(rest) if pool.scales is not None else None
    m_ref, l_ref, acc_ref, state, semaphores = rest
    fetcher = common.PageFetch(spec, fetch, first_page, indptr, pages, data, scales, buffer, scale_buffer, semaphores)
    step, steps = pl.program_id(0), pl.num_programs(0)
    tall = q_ref.shape[1]
    chunk = CHUNK if tall % CHUNK == 0 else tall

    def field(t, i):
        return bounds[8 * t + i]

    def blocks(t):
        return lax.div(field(t, 5), fetch), lax.div(field(t, 6) + fetch - 1, fetch)

    def start(t, block, slot):
        fetcher.start(field(t, 0), block, field(t, 5), field(t, 6), slot)

    window, low, high = field(step, 1), field(step, 5), field(step, 6)
    begin, count, origin = field(step, 2), field(step, 3), field(step, 4)
    first, last = blocks(step)
    following = jnp.minimum(step + 1, steps - 1)
    more = step + 1 < steps
    first_following = blocks(following)[0]

    @pl.when(step == 0)
    def _():
        state[0] = 0
        start(step, first, 0)

    @pl.when(jnp.logical_or(step == 0, window != field(jnp.maximum(step - 1, 0), 1)))
    def _():
        def clear(h, carry):
            out_ref[h] = jnp.zeros(out_ref.shape[1:], out_ref.dtype)
            if lse_ref is not None:
                lse_ref[h] = jnp.full(lse_ref.shape[1:], -jnp.inf, jnp.float32)
            return carry

        lax.fori_loop(0, spec.num_kv_heads, clear, 0)

    slot0 = state[0]

    def reset(h, carry):
        m_ref[h] = jnp.full(m_ref.shape[1:], common.EMPTY, jnp.float32)
        l_ref[h] = jnp.zeros(l_ref.shape[1:], jnp.float32)
        acc_ref[h] = jnp.zeros(acc_ref.shape[1:], jnp.float32)
        return carry

    lax.fori_loop(0, spec.num_kv_heads, reset, 0)

    def body(block, carry):
        slot = (slot0 + block - first) % 2
        at_end = block == last - 1

        @pl.when(jnp.logical_or(jnp.logical_not(at_end), more))  # the next block's pages, of this tile or the next one
        def _():
            start(jnp.where(at_end, following, step), jnp.where(at_end, first_following, block + 1), 1 - slot)

        fetcher.wait(block, low, high, slot)
        base = block * fetch
        t_begin = lax.div(jnp.maximum(low - base, 0), kv_tile)
        t_end = lax.div(jnp.minimum(high - base, fetch) + kv_tile - 1, kv_tile)
        lax.fori_loop(t_begin, t_end, lambda t, c: (tile(slot, base, t), c)[1], 0)
        return carry

    def tile(slot, base, t) -> None:
        offset = pl.multiple_of(t * kv_tile, kv_tile)
        start_token = base + offset
        behind = None if options.sliding_window is None else low - start_token
        bits = common.word_mask(behind, high - start_token, kv_tile, lanes.width, spec.itemsize)
        live = lax.broadcasted_iota(jnp.int32, (1, kv_tile), 1) + start_token
        live = jnp.logical_and(live >= low, live < high)
        tokens = pl.ds(offset, kv_tile)
        per = kv_tile // spec.page_size

        def head(h, k_start, v_start, same) -> None:
            v = common.keep_rows(buffer[slot, tokens, pl.ds(v_start, lanes.width)], bits)
            k = v if same else buffer[slot, tokens, pl.ds(k_start, lanes.width)]
            k_scale = v_scale = None
            if scales is not None:
                k_scale = fetcher.scale_row(slot, t * per, per, 2 * h)
                v_scale = jnp.where(live, fetcher.scale_row(slot, t * per, per, 2 * h + 1), 0.0)

            def part(i, carry):
                rows = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
                # Distance of a key from the query: <= 0 for keys at or before it.
                key = lax.broadcasted_iota(jnp.int32, (chunk, kv_tile), 1)
                distance = key - (token_ref[rows, :1] + (origin - start_token))
                # With a causal mask the row's last key is its last query, or lies in the row's next tile.
                seen = distance <= 0 if options.causal else key < high - start_token
                if options.sliding_window is not None:
                    seen = jnp.logical_and(seen, distance > -options.sliding_window)
                scores = common.dot(q_ref[h, rows], k, 1) * factors[0]
                if k_scale is not None:
                    scores = scores * k_scale
                if options.soft_cap is not None:
                    scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
                if slopes is not None:
                    scores = scores + slopes[h, rows, :1] * distance.astype(jnp.float32)
                common.softmax_step(scores, seen, v, v_scale, operand, m_ref, l_ref, acc_ref, (h, rows))
                return carry

            lax.fori_loop(0, tall // chunk, part, 0)

        common.for_each_head(lanes, head)

    lax.fori_loop(first, last, body, 0)
    pl.when(jnp.logical_and(last == first, more))(lambda: start(following, first_following, slot0))
    state[0] = (slot0 + last - first) % 2

    @pl.when(count > 0)
    def _():
        mine = jnp.logical_and(token_ref[...] >= begin, token_ref[...] < begin + count)

        def store(h, carry):
            sink = None if sinks is None else sinks[h]
            out, lse = common.finish(m_ref[h], l_ref[h], acc_ref[h], sink, factors[1])
            out_ref[h] = jnp.where(mine[:, :1], out, out_ref[h].astype(jnp.float32)).astype(out_ref.dtype)
            if lse_ref is not None:
                lse_ref[h] = jnp.where(mine, lse, lse_ref[h])
            return carry

        lax.fori_loop(0, spec.num_kv_heads, store, 0)
