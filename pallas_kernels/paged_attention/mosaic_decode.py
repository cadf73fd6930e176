"""Decode on TPU: every row's single query against the pages of its row.

One grid step per row. The pages of the next 512 tokens (of this row or, at its end, of the next one) are copied into one VMEM
buffer while the matrix unit works on the other. The leading grid axis deals rows out to two cores where a chip has them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import mosaic_common as common
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool, from_storage

CORES = 2


def decode(
    q: jax.Array,
    lengths: jax.Array,
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
    """Attention of one query per row.

    Args:
        q: ``[S, N, H]``, the row's query.
        lengths: int32 ``[S]``, keys the row sees (the last one is the query's own); 0 for rows to leave out.
        pool, plan, layer, options, tiles, interpret, return_lse, out_dtype: as handed to an implementation.

    Returns:
        ``(out [S, N, H], lse float32 [S, N] or None)``; 0 and -inf for rows of length 0.
    """
    spec = pool.spec
    rows, num_heads, dim = q.shape
    heads = spec.num_kv_heads
    group = num_heads // heads
    tall = max(8, -(-group // 8) * 8)
    lanes = common.head_lanes(spec)
    kv_tile, fetch = common.tile_sizes(spec, tiles)
    even = -(-rows // CORES) * CORES
    operand = common.operand_dtype(q.dtype, spec)

    wide = common.pad_query(q.reshape(rows, heads, group, dim).astype(operand), lanes.k_skip, lanes.width)
    wide = jnp.pad(wide, ((0, even - rows), (0, 0), (0, tall - group), (0, 0)))
    lengths = jnp.pad(lengths, (0, even - rows))
    indptr = jnp.pad(jnp.asarray(plan.page_indptr), (0, even - rows), mode="edge")
    first_page, factors = common.scalars(pool, layer, options)
    slopes = common.per_row_heads(options.alibi_slopes, heads, tall, 1)
    sinks = common.per_row_heads(options.sinks, heads, tall, 1)

    def row_block(width):
        return pl.BlockSpec((1, heads, tall, width), lambda c, i, *_: (i * CORES + c, 0, 0, 0))

    whole = pl.BlockSpec((heads, tall, common.LANES), lambda c, i, *_: (0, 0, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    operands = [wide, from_storage(pool.data, spec)]
    in_specs = [row_block(lanes.width), anywhere]
    for value, block in ((pool.scales, anywhere), (slopes, whole), (sinks, whole)):
        if value is not None:
            operands.append(value)
            in_specs.append(block)
    out_shape = [jax.ShapeDtypeStruct((even, heads, tall, lanes.width), out_dtype)]
    out_specs = [row_block(lanes.width)]
    if return_lse:
        out_shape.append(jax.ShapeDtypeStruct((even, heads, tall, common.LANES), jnp.float32))
        out_specs.append(row_block(common.LANES))
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
    needed += heads * tall * (16 * lanes.width + 12 * common.LANES)
    call = pl.pallas_call(
        lambda *refs: _kernel(refs, pool, options, lanes, kv_tile, fetch, even, operand, return_lse),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(CORES, even // CORES),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=common.check_vmem("paged_attention", needed, tiles),
        ),
        interpret=interpret,
        name="paged_decode",
    )
    results = call(lengths, indptr, jnp.asarray(plan.page_ids), first_page, factors, *operands)
    out = common.take_output(results[0][:rows, :, :group], lanes.v_skip, dim).reshape(rows, num_heads, dim)
    return out, results[1][:rows, :, :group, 0].reshape(rows, num_heads) if return_lse else None


def _kernel(refs, pool, options, lanes, kv_tile, fetch, num_rows, operand, return_lse) -> None:
    refs = list(refs)
    lengths, indptr, pages, first_page, factors, q_ref, data = refs[:7]
    rest = iter(refs[7:])
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
    core, step = pl.program_id(0), pl.program_id(1)
    row = step * CORES + core
    window = options.sliding_window

    def span(r):
        high = lengths[r]
        return (jnp.int32(0) if window is None else jnp.maximum(high - window, 0)), high

    def blocks(low, high):
        return lax.div(low, fetch), lax.div(high + fetch - 1, fetch)

    def start(r, block, slot):
        fetcher.start(r, block, *span(r), slot)

    low, high = span(row)
    first, last = blocks(low, high)
    following = jnp.minimum(row + CORES, num_rows - 1)
    more = row + CORES < num_rows
    first_following = blocks(*span(following))[0]

    @pl.when(step == 0)
    def _():
        state[0] = 0
        start(row, first, 0)

    slot0 = state[0]
    m_ref[...] = jnp.full_like(m_ref, common.EMPTY)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def body(block, carry):
        slot = (slot0 + block - first) % 2
        at_end = block == last - 1

        @pl.when(jnp.logical_or(jnp.logical_not(at_end), more))  # the next block's pages, of this row or the next one
        def _():
            start(jnp.where(at_end, following, row), jnp.where(at_end, first_following, block + 1), 1 - slot)

        fetcher.wait(block, low, high, slot)
        base = block * fetch
        if fetch == kv_tile:
            tile(slot, base, 0)
        else:
            begin = lax.div(jnp.maximum(low - base, 0), kv_tile)
            end = lax.div(jnp.minimum(high - base, fetch) + kv_tile - 1, kv_tile)
            lax.fori_loop(begin, end, lambda t, c: (tile(slot, base, t), c)[1], 0)
        return carry

    def tile(slot, base, t) -> None:
        offset = t * kv_tile if isinstance(t, int) else pl.multiple_of(t * kv_tile, kv_tile)
        start_token = base + offset
        tall = q_ref.shape[2]
        token = start_token + lax.broadcasted_iota(jnp.int32, (tall, kv_tile), 1)
        seen = token < high if window is None else jnp.logical_and(token < high, token >= low)
        bits = common.word_mask(
            None if window is None else low - start_token, high - start_token, kv_tile, lanes.width, spec.itemsize
        )
        tokens = pl.ds(offset, kv_tile)
        for h in range(spec.num_kv_heads):
            v = common.keep_rows(buffer[slot, tokens, pl.ds(lanes.v_start[h], lanes.width)], bits)
            same = lanes.k_start[h] == lanes.v_start[h]
            k = v if same else buffer[slot, tokens, pl.ds(lanes.k_start[h], lanes.width)]
            scores = common.dot(q_ref[0, h], k, 1) * factors[0]
            v_scale = None
            if scales is not None:
                per = kv_tile // spec.page_size
                scores = scores * fetcher.scale_row(slot, t * per, per, 2 * h)
                v_scale = jnp.where(seen[:1], fetcher.scale_row(slot, t * per, per, 2 * h + 1), 0.0)
            if options.soft_cap is not None:
                scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
            if slopes is not None:
                scores = scores + slopes[h][:, :1] * (token - (high - 1)).astype(jnp.float32)
            common.softmax_step(scores, seen, v, v_scale, operand, m_ref, l_ref, acc_ref, h)

    lax.fori_loop(first, last, body, 0)
    pl.when(jnp.logical_and(last == first, more))(lambda: start(following, first_following, slot0))
    state[0] = (slot0 + last - first) % 2
    for h in range(spec.num_kv_heads):
        sink = None if sinks is None else sinks[h]
        out, lse = common.finish(m_ref[h], l_ref[h], acc_ref[h], sink, factors[1])
        out_ref[0, h] = out.astype(out_ref.dtype)
        if lse_ref is not None:
            lse_ref[0, h] = lse
