"""Paged attention in plain XLA: blocked online softmax over gathered pages, fast on CPU, correct everywhere.

Decode rows run together, one block of pages at a time; query tiles of longer rows run one after another. Both loops stop at
the longest live length, so nothing is compiled per length and no step pays for the table's full width.

Source: online softmax as in Milakov and Gimelshein 2018 ("Online normalizer calculation for softmax"), blocked as in
FlashAttention (Dao et al. 2022), over pages as in Kwon et al. 2023 section 4.1.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool, from_storage

NEG = -1e30  # stands for -inf in running maxima, so that differences of two of them are finite


def _block_pages(page_size: int, tokens: int) -> int:
    return max(1, tokens // page_size)


def _gather_block(pool: KVPool, plan: AttentionPlan, layer, rows, lens, block, pages: int):
    """K, V ``[R, B, K, H]`` and their scales ``[R, K, B]`` (or None) of one block of ``pages`` pages for each row.

    Page entries behind a row's length are replaced by the scratch page before they are used.
    """
    spec = pool.spec
    index = block * pages + jnp.arange(pages)[None, :]
    live = index * spec.page_size < lens[:, None]
    where = jnp.where(live, plan.page_indptr[rows][:, None] + index, 0)
    ids = jnp.where(live, plan.page_ids[where], 0) + layer * spec.num_pages
    data = from_storage(pool.data.at[ids].get(mode="promise_in_bounds"), spec)
    count = pages * spec.page_size
    data = data.reshape(ids.shape[0], count, spec.num_kv_heads, 2, spec.head_dim)
    scales = None
    if pool.scales is not None:
        scales = pool.scales.at[ids].get(mode="promise_in_bounds")
        scales = scales.reshape(ids.shape[0], pages, spec.num_kv_heads, 2, spec.page_size)
        scales = scales.transpose(3, 0, 2, 1, 4).reshape(2, ids.shape[0], spec.num_kv_heads, count)
    return data[:, :, :, 0], data[:, :, :, 1], scales


def _online_block(state, q, k, v, scales, q_pos, lens, base, options: AttentionOptions):
    """One step of the online softmax.

    Args:
        state: (m, den, acc): running maximum and sum ``[R, K, Q, G]``, accumulator ``[R, K, Q, G, H]``, float32.
        q: ``[R, Q, K, G, H]``; k, v: ``[R, B, K, H]``; scales as ``_gather_block`` gives them.
        q_pos: ``[R, Q]`` positions; lens: ``[R]``; base: ``[]`` position of the block's first key.
    """
    m, den, acc = state
    slots = k.shape[1]
    compute = q.dtype
    k_pos = base + jnp.arange(slots)
    live = k_pos[None, :] < lens[:, None]  # [R, B]
    s = jnp.einsum("rqkgh,rbkh->rkqgb", q, k.astype(compute), preferred_element_type=jnp.float32)
    if scales is not None:
        s = s * jnp.where(live[:, None], scales[0], 0.0)[:, :, None, None]
    s = s * options.sm_scale
    if options.k_scale is not None:
        s = s * options.k_scale
    if options.soft_cap is not None:
        s = options.soft_cap * jnp.tanh(s / options.soft_cap)
    distance = q_pos[:, :, None] - k_pos[None, None, :]  # [R, Q, B]
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.reshape(k.shape[2], -1)  # [K, G]
        s = s - slopes[None, :, None, :, None] * distance[:, None, :, None, :]
    seen = live[:, None, :]
    if options.causal:
        seen = seen & (distance >= 0)
    if options.sliding_window is not None:
        seen = seen & (distance < options.sliding_window)
    seen = seen[:, None, :, None, :]
    s = jnp.where(seen, s, NEG)
    m_new = jnp.maximum(m, s.max(-1))
    p = jnp.where(seen, jnp.exp(s - m_new[..., None]), 0.0)
    alpha = jnp.exp(m - m_new)
    den = den * alpha + p.sum(-1)
    if scales is not None:
        p = p * jnp.where(live[:, None], scales[1], 0.0)[:, :, None, None]
    v = jnp.where(live[:, :, None, None], v.astype(compute), jnp.zeros((), compute))
    pv = jnp.einsum("rkqgb,rbkh->rkqgh", p.astype(compute), v, preferred_element_type=jnp.float32)
    return m_new, den, acc * alpha[..., None] + pv


def _finish(state, options: AttentionOptions):
    """Output ``[R, Q, K, G, H]`` and log-sum-exp ``[R, Q, K, G]`` in float32; empty rows give 0 and -inf."""
    m, den, acc = state
    if options.sinks is not None:
        sinks = options.sinks.reshape(1, m.shape[1], 1, -1)
        top = jnp.maximum(m, sinks)
        scale = jnp.exp(m - top)
        den = den * scale + jnp.exp(sinks - top)
        acc = acc * scale[..., None]
        m = top
    out = jnp.where(den[..., None] > 0, acc / jnp.where(den > 0, den, 1.0)[..., None], 0.0)
    lse = jnp.where(den > 0, m + jnp.log(jnp.where(den > 0, den, 1.0)), -jnp.inf)
    if options.v_scale is not None:
        out = out * options.v_scale
    return out.transpose(0, 2, 1, 3, 4), lse.transpose(0, 2, 1, 3)


def _attend(q, pool: KVPool, plan: AttentionPlan, layer, rows, q_pos, lens, first, last, options: AttentionOptions, pages: int):
    """Attention of ``q [R, Q, N, H]`` (rows ``rows [R]``, positions ``q_pos [R, Q]``) over blocks ``first .. last - 1``."""
    spec = pool.spec
    count, tile, heads, dim = q.shape
    group = heads // spec.num_kv_heads
    q = q.reshape(count, tile, spec.num_kv_heads, group, dim)
    shape = (count, spec.num_kv_heads, tile, group)
    state = (jnp.full(shape, NEG, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, dim), jnp.float32))
    span = pages * spec.page_size

    def body(block, state):
        k, v, scales = _gather_block(pool, plan, layer, rows, lens, block, pages)
        return _online_block(state, q, k, v, scales, q_pos, lens, block * span, options)

    return _finish(lax.fori_loop(first, last, body, state), options)


def paged_attention(
    q: jax.Array,
    pool: KVPool,
    plan: AttentionPlan,
    layer,
    options: AttentionOptions,
    *,
    tiles=None,
    interpret=False,
    return_lse: bool = False,
    out_dtype=None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of every query token over its row's pages (see ``api.paged_attention`` for the contract).

    Args:
        q: ``[T, N, H]``; scores and probabilities are multiplied in its dtype and accumulated in float32.
        pool, plan, layer, options: as checked by the api.
        tiles: ``kv_tile`` is the number of keys of a block; default 128.

    Returns:
        ``(out [T, N, H], lse float32 [T, N] or None)``.
    """
    del interpret
    pages = _block_pages(plan.page_size, tiles.kv_tile if tiles is not None and tiles.kv_tile else 128)
    span = pages * plan.page_size
    out_dtype = q.dtype if out_dtype is None else out_dtype
    tokens, heads, dim = q.shape
    query_lens = plan.query_start_loc[1:] - plan.query_start_loc[:-1]
    is_decode = query_lens == 1
    rows = jnp.arange(plan.shape.num_seqs)
    lens = jnp.where(is_decode, plan.seq_lens, 0)
    window = options.sliding_window
    first = 0 if window is None else jnp.maximum(jnp.min(jnp.where(is_decode, lens, 2**30)) - window, 0) // span
    at = jnp.where(is_decode, plan.query_start_loc[:-1], 0)
    o, s = _attend(
        q[at][:, None], pool, plan, layer, rows, (lens - 1)[:, None], lens, first, -(-lens.max() // span), options, pages
    )
    target = jnp.where(is_decode, plan.query_start_loc[:-1], tokens)
    out = (
        jnp.zeros((tokens, heads, dim), out_dtype)
        .at[target]
        .set(o.reshape(-1, heads, dim).astype(out_dtype), mode="drop", unique_indices=True)
    )
    lse = jnp.full((tokens, heads), -jnp.inf).at[target].set(s.reshape(-1, heads), mode="drop", unique_indices=True)
    if plan.query_tiles.shape[0]:
        out, lse = _query_tiles(q, pool, plan, layer, options, pages, out, lse)
    return out, lse if return_lse else None


def _query_tiles(q, pool: KVPool, plan: AttentionPlan, layer, options: AttentionOptions, pages: int, out, lse):
    tile, span = plan.query_tile, pages * plan.page_size
    tokens, heads, dim = q.shape
    pad = ((0, tile), (0, 0), (0, 0))
    q, out, lse = jnp.pad(q, pad), jnp.pad(out, pad), jnp.pad(lse, pad[:2])

    def body(i, carry):
        out, lse = carry
        row, first_token, count, position = (plan.query_tiles[i, j] for j in range(4))
        q_tile = lax.dynamic_slice_in_dim(q, first_token, tile)[None]
        q_pos = position + jnp.arange(tile)[None]
        length = plan.seq_lens[row]
        end = jnp.minimum(position + count, length) if options.causal else length
        window = options.sliding_window
        first = 0 if window is None else jnp.maximum(position - window + 1, 0) // span
        o, s = _attend(q_tile, pool, plan, layer, row[None], q_pos, length[None], first, -(-end // span), options, pages)
        keep = jnp.arange(tile) < count
        old_o, old_s = lax.dynamic_slice_in_dim(out, first_token, tile), lax.dynamic_slice_in_dim(lse, first_token, tile)
        o = jnp.where(keep[:, None, None], o.reshape(tile, heads, dim).astype(out.dtype), old_o)
        s = jnp.where(keep[:, None], s.reshape(tile, heads), old_s)
        return lax.dynamic_update_slice_in_dim(out, o, first_token, 0), lax.dynamic_update_slice_in_dim(lse, s, first_token, 0)

    out, lse = lax.fori_loop(0, plan.num_counts[1], body, (out, lse))
    return out[:tokens], lse[:tokens]
