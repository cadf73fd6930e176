"""Paged attention in plain XLA: blocked online softmax over gathered pages, fast on CPU, correct everywhere.

Decode rows run together in groups, one block of pages at a time, and so do query tiles of longer rows. Loops stop at the
longest live length of a group, so nothing is compiled per length and no step pays for the table's full width.

Source: online softmax as in Milakov and Gimelshein 2018 ("Online normalizer calculation for softmax"), blocked as in
FlashAttention (Dao et al. 2022), over pages as in Kwon et al. 2023 section 4.1.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool, PoolSpec, from_storage

MASKED = -1e30  # a masked score
EMPTY = -1e20  # the running maximum before any score: far above MASKED, so that masked probabilities are exactly 0
ROW_GROUP = 16  # decode rows that run together: their block of K and V stays in a core's cache
TILE_GROUP = 4  # query tiles that run together, so that many short prompts do not pay for library calls one by one


def _block_pages(page_size: int, tokens: int) -> int:
    return max(1, tokens // page_size)


def _head_rows(ids: jax.Array, spec: PoolSpec) -> jax.Array:
    """Where the K of every token and head lies in the pool seen as rows of ``H`` lanes; its V is the next row.

    Args:
        ids: ``[R, pages]`` page ids, layer included.

    Returns:
        int32 ``[R, K, B]``.
    """
    kv_heads, page_size = spec.num_kv_heads, spec.page_size
    token = ids[:, :, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
    token = token.reshape(ids.shape[0], 1, -1)
    return (token * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]) * 2


def _gather_block(pool: KVPool, plan: AttentionPlan, layer, rows, lens, block, pages: int, live_tokens):
    """K, V ``[R, K, B, H]`` and their scales ``[2, R, K, B]`` (or None) of one block of ``pages`` pages for each row.

    Page entries behind a row's length are replaced by the scratch page before they are used. Tokens that are
    not in ``live_tokens [R, B]`` are 0, so that a weight of 0 times their V is 0.
    """
    spec = pool.spec
    index = block * pages + jnp.arange(pages)[None, :]
    live = index * spec.page_size < lens[:, None]
    where = jnp.where(live, plan.page_indptr[rows][:, None] + index, 0)
    ids = jnp.where(live, plan.page_ids[where], 0) + layer * spec.num_pages
    scales = None
    if pool.scales is not None:
        scales = pool.scales.at[ids].get(mode="promise_in_bounds")
        scales = scales.reshape(ids.shape[0], pages, spec.num_kv_heads, 2, spec.page_size)
        scales = scales.transpose(3, 0, 2, 1, 4).reshape(2, ids.shape[0], spec.num_kv_heads, pages * spec.page_size)
    where = _head_rows(ids, spec)
    heads = pool.data.reshape(-1, spec.head_dim)
    k, v = (
        from_storage(_keep(heads.at[at].get(mode="promise_in_bounds"), live_tokens[:, None, :, None]), spec)
        for at in (where, where + 1)
    )
    return k, v, scales


def _keep(x: jax.Array, live: jax.Array) -> jax.Array:
    """``x`` where ``live``, zero bits elsewhere.

    Stored bits are masked rather than selected: with the mask in it, LLVM turns the loop of a gather over ``H`` lanes into
    vector instructions; without, it unrolls the loop and copies lane by lane.
    """
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(bits & jnp.where(live, ~jnp.zeros((), bits.dtype), jnp.zeros((), bits.dtype)), x.dtype)


def _online_block(state, q, k, v, scales, q_pos, k_pos, live, options: AttentionOptions, decode: bool):
    """One step of the online softmax.

    Args:
        state: (m, den, acc): running maximum and sum ``[R, K, M]``, accumulator ``[R, K, M, H]``, float32; ``M = Q * G``.
        q: ``[R, K, M, H]``; k, v: ``[R, K, B, H]``; scales as ``_gather_block`` gives them.
        q_pos: ``[R, Q]``; k_pos: ``[B]`` positions; live: ``[R, B]`` keys that any query of the row may see.
    """
    m, den, acc = state
    compute = q.dtype
    group = q.shape[2] // q_pos.shape[1]
    if decode:  # few query rows: keys as the long side of the product
        s = jnp.einsum("rkbh,rkmh->rkbm", k.astype(compute), q, preferred_element_type=jnp.float32).swapaxes(2, 3)
    else:
        s = jnp.einsum("rkmh,rkbh->rkmb", q, k.astype(compute), preferred_element_type=jnp.float32)
    if scales is not None:
        s = s * jnp.where(live[:, None], scales[0], 0.0)[:, :, None]
    s = s * options.sm_scale
    if options.k_scale is not None:
        s = s * options.k_scale
    if options.soft_cap is not None:
        s = options.soft_cap * jnp.tanh(s / options.soft_cap)
    distance = jnp.repeat(q_pos, group, axis=1)[:, :, None] - k_pos[None, None, :]  # [R, M, B]
    if options.alibi_slopes is not None:
        slopes = jnp.tile(options.alibi_slopes.reshape(k.shape[1], group), (1, q_pos.shape[1]))  # [K, M]
        s = s - slopes[None, :, :, None] * distance[:, None]
    seen = live[:, None, :]
    if options.causal and not decode:  # a decode row's query stands at its last key
        seen = seen & (distance >= 0)
    if options.sliding_window is not None:
        seen = seen & (distance < options.sliding_window)
    s = jnp.where(seen[:, None], s, MASKED)
    m_new = jnp.maximum(m, s.max(-1))
    p = jnp.exp(s - m_new[..., None])
    alpha = jnp.exp(m - m_new)
    den = den * alpha + p.sum(-1)
    if scales is not None:
        p = p * jnp.where(live[:, None], scales[1], 0.0)[:, :, None]
    pv = jnp.einsum("rkmb,rkbh->rkmh", p.astype(compute), v.astype(compute), preferred_element_type=jnp.float32)
    return m_new, den, acc * alpha[..., None] + pv


def _finish(state, options: AttentionOptions):
    """Output ``[R, K, M, H]`` and log-sum-exp ``[R, K, M]`` in float32; rows that saw no key give 0 and -inf."""
    m, den, acc = state
    if options.sinks is not None:
        kv_heads, width = m.shape[1], m.shape[2]
        sinks = options.sinks.reshape(kv_heads, -1)
        sinks = jnp.tile(sinks, (1, width // sinks.shape[1]))[None]
        top = jnp.maximum(m, sinks)
        scale = jnp.exp(m - top)
        den = jnp.where(den > 0, den * scale + jnp.exp(sinks - top), 0.0)
        acc = acc * scale[..., None]
        m = top
    safe = jnp.where(den > 0, den, 1.0)
    out = jnp.where(den[..., None] > 0, acc / safe[..., None], 0.0)
    lse = jnp.where(den > 0, m + jnp.log(safe), -jnp.inf)
    if options.v_scale is not None:
        out = out * options.v_scale
    return out, lse


def _attend(
    q,
    pool: KVPool,
    plan: AttentionPlan,
    layer,
    rows,
    q_pos,
    lens,
    blocks,
    options: AttentionOptions,
    pages: int,
    *,
    decode: bool,
):
    """Attention of ``q [R, Q, N, H]`` (rows ``rows [R]``, positions ``q_pos [R, Q]``) over a range of blocks.

    ``decode``: each row's only query stands at its last key, so that there is nothing to mask causally.

    Returns:
        ``(out [R, Q, N, H], lse [R, Q, N])`` in float32.
    """
    spec = pool.spec
    count, tile, heads, dim = q.shape
    kv_heads, group = spec.num_kv_heads, heads // spec.num_kv_heads
    q = q.reshape(count, tile, kv_heads, group, dim).swapaxes(1, 2).reshape(count, kv_heads, tile * group, dim)
    shape = (count, kv_heads, tile * group)
    state = (jnp.full(shape, EMPTY), jnp.zeros(shape), jnp.zeros((*shape, dim)))
    span = pages * spec.page_size

    def body(block, state):
        k_pos = block * span + jnp.arange(span)
        live = k_pos[None, :] < lens[:, None]
        if options.sliding_window is not None:  # pages behind the window may hold anything
            live = live & (k_pos[None, :] > q_pos[:, :1] - options.sliding_window)
        k, v, scales = _gather_block(pool, plan, layer, rows, lens, block, pages, live)
        return _online_block(state, q, k, v, scales, q_pos, k_pos, live, options, decode)

    out, lse = _finish(lax.fori_loop(blocks[0], blocks[1], body, state), options)
    out = out.reshape(count, kv_heads, tile, group, dim).swapaxes(1, 2).reshape(count, tile, heads, dim)
    return out, lse.reshape(count, kv_heads, tile, group).swapaxes(1, 2).reshape(count, tile, heads)


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
        tiles: ``kv_tile`` is the number of keys of a block; default 64.

    Returns:
        ``(out [T, N, H], lse float32 [T, N] or None)``.
    """
    del interpret
    pages = _block_pages(plan.page_size, tiles.kv_tile if tiles is not None and tiles.kv_tile else 64)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    out, lse = _decode_rows(q, pool, plan, layer, options, pages)
    if plan.query_tiles.shape[0]:
        out, lse = _query_tiles(q, pool, plan, layer, options, pages, out, lse)
    return out.astype(out_dtype), lse if return_lse else None


def _decode_rows(q, pool: KVPool, plan: AttentionPlan, layer, options: AttentionOptions, pages: int):
    """Attention of the rows with one query token, in groups of rows of similar length; zeros everywhere else.

    Loops carry their output in float32: XLA:CPU widens, updates and narrows a whole 16-bit array for every update of a part.
    """
    tokens, heads, dim = q.shape
    span, count = pages * plan.page_size, plan.shape.num_seqs
    group = min(ROW_GROUP, count)
    query_lens = plan.query_start_loc[1:] - plan.query_start_loc[:-1]
    lens = jnp.where(query_lens == 1, plan.seq_lens, 0)
    order = jnp.argsort(-lens, stable=True)
    order = jnp.pad(order, (0, -count % group))
    alive = jnp.arange(order.shape[0]) < jnp.sum(query_lens == 1)
    lens = jnp.where(alive, lens[order], 0)
    at = jnp.where(alive, plan.query_start_loc[:-1][order], tokens)
    window = options.sliding_window

    def body(i, carry):
        out, lse = carry
        rows, length, token = (lax.dynamic_slice_in_dim(x, i * group, group) for x in (order, lens, at))
        first = 0 if window is None else jnp.maximum(jnp.min(jnp.where(length > 0, length, 2**30)) - window, 0) // span
        o, s = _attend(
            q.at[token].get(mode="clip")[:, None],
            pool,
            plan,
            layer,
            rows,
            (length - 1)[:, None],
            length,
            (first, -(-length[0] // span)),
            options,
            pages,
            decode=True,
        )
        out = out.at[token].set(o.reshape(group, heads, dim), mode="drop", unique_indices=True)
        return out, lse.at[token].set(s.reshape(group, heads), mode="drop", unique_indices=True)

    init = jnp.zeros((tokens, heads, dim)), jnp.full((tokens, heads), -jnp.inf)
    return lax.fori_loop(0, -(-jnp.sum(query_lens == 1) // group), body, init)


def _query_tiles(q, pool: KVPool, plan: AttentionPlan, layer, options: AttentionOptions, pages: int, out, lse):
    tile, span, group = plan.query_tile, pages * plan.page_size, min(TILE_GROUP, plan.query_tiles.shape[0])
    tokens = q.shape[0]
    tiles = jnp.pad(plan.query_tiles, ((0, -plan.query_tiles.shape[0] % group), (0, 0)))
    live = jnp.arange(tiles.shape[0]) < plan.num_counts[1]
    tiles = jnp.where(live[:, None], tiles, 0)  # what is left of the last group: no tokens, no keys
    window = options.sliding_window

    def body(i, carry):
        out, lse = carry
        rows, first_token, count, position = (lax.dynamic_slice_in_dim(tiles[:, j], i * group, group) for j in range(4))
        offset = jnp.arange(tile)[None]
        at = jnp.where(offset < count[:, None], first_token[:, None] + offset, tokens)
        length = jnp.where(count > 0, plan.seq_lens[rows], 0)
        end = jnp.minimum(position + count, length) if options.causal else length
        first = 0
        if window is not None:
            first = jnp.maximum(jnp.min(jnp.where(count > 0, position, 2**30)) - window + 1, 0) // span
        q_tiles = q.at[at].get(mode="clip")
        q_pos = position[:, None] + offset
        blocks = (first, -(-jnp.max(end) // span))
        o, s = _attend(q_tiles, pool, plan, layer, rows, q_pos, length, blocks, options, pages, decode=False)
        out = out.at[at].set(o, mode="drop")
        return out, lse.at[at].set(s, mode="drop")

    return lax.fori_loop(0, -(-plan.num_counts[1] // group), body, (out, lse))
