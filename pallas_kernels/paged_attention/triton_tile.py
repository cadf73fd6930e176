"""What the decode and the ragged Triton kernels share: gathering a K/V tile, scoring it, one step of the online softmax."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import QUANT_DTYPES, KVPool, PoolSpec
from pallas_kernels.triton_call import LOG2E, next_power_of_2, pool_rows, scalar

NEG_INF = float("-inf")
Carry = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Everything static that shapes a tile.

    Attributes:
        spec: the pool's format.
        group: query heads of one KV head (G).
        tokens: kv tokens of a tile, a power of two.
        score_dtype, value_dtype: what the operands of the two matrix products are cast to.
        causal, sliding_window, soft_cap: see ``AttentionOptions``.
        alibi, sinks: whether the operands of those names exist.
    """

    spec: PoolSpec
    group: int
    tokens: int
    score_dtype: jnp.dtype
    value_dtype: jnp.dtype
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    alibi: bool
    sinks: bool

    @property
    def dim(self) -> int:
        """Head dim padded to a power of two."""
        return next_power_of_2(self.spec.head_dim)


def tile_config(q: jax.Array, spec: PoolSpec, options: AttentionOptions, tokens: int) -> TileConfig:
    """Static settings of a tile for queries ``[T, N, H]``.

    The products run in the dtype that q and pool have in common, in float32 if they differ. 8-bit values go in as q's
    dtype, except probabilities times V for float16 queries: bfloat16, because V's scales sit in the probabilities there.
    """
    pool_dtype = jnp.dtype(spec.dtype)
    if spec.dtype in QUANT_DTYPES:
        score = q.dtype
        value = jnp.dtype(jnp.bfloat16) if q.dtype == jnp.float16 else q.dtype
    else:
        score = value = q.dtype if q.dtype == pool_dtype else jnp.dtype(jnp.float32)
    return TileConfig(
        spec=spec,
        group=q.shape[1] // spec.num_kv_heads,
        tokens=tokens,
        score_dtype=score,
        value_dtype=value,
        causal=options.causal,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
        alibi=options.alibi_slopes is not None,
        sinks=options.sinks is not None,
    )


def common_operands(pool: KVPool, plan: AttentionPlan, layer, options: AttentionOptions) -> dict[str, jax.Array]:
    """Operands that both kernels read: the pool, the page lists, and the traced scalars and per-head vectors in use."""
    operands = {
        "kv": pool_rows(pool),
        "seq_lens": plan.seq_lens,
        "query_start_loc": plan.query_start_loc,
        "page_indptr": plan.page_indptr,
        "page_ids": plan.page_ids,
        "layer": scalar(layer, jnp.int32),
        "sm_scale": scalar(options.sm_scale, jnp.float32),
    }
    if pool.spec.quant == "token_head":
        assert pool.scales is not None
        operands["scales"] = pool.scales.reshape(pool.scales.shape[0], -1)
    if pool.spec.quant == "tensor":
        operands["k_scale"] = scalar(1.0 if options.k_scale is None else options.k_scale, jnp.float32)
        operands["v_scale"] = scalar(1.0 if options.v_scale is None else options.v_scale, jnp.float32)
    if options.alibi_slopes is not None:
        operands["alibi_slopes"] = jnp.asarray(options.alibi_slopes, jnp.float32)
    if options.sinks is not None:
        operands["sinks"] = jnp.asarray(options.sinks, jnp.float32)
    return {name: jnp.asarray(value) for name, value in operands.items()}


def empty_carry(rows: int, dim: int) -> Carry:
    """Running maximum ``[rows]`` (in log2 units), sum ``[rows]`` and unnormalised output ``[rows, dim]``."""
    return (
        jnp.full((rows,), NEG_INF, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, dim), jnp.float32),
    )


def dot(a: jax.Array, b: jax.Array, dims) -> jax.Array:
    """Matrix product with a float32 result; float32 operands are multiplied in full precision, not TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def token_places(ins, config: TileConfig, indptr, layer, tokens, live):
    """Absolute page ``[tile]`` and offset in it ``[tile]`` of kv tokens; ids are read where ``live`` (None: everywhere)."""
    size = jnp.int32(config.spec.page_size)
    page = compat.masked_load(
        ins["page_ids"], (indptr + lax.div(tokens, jnp.full_like(tokens, size)),), mask=live, other=None if live is None else 0
    )
    return page + layer * config.spec.num_pages, lax.rem(tokens, jnp.full_like(tokens, size))


def _rows(ins, config: TileConfig, page, offset, first_col, live) -> jax.Array:
    """``[tile, dim]`` pool elements; zeros where not live or behind the head dim."""
    dim, head_dim = config.dim, config.spec.head_dim
    cols = lax.broadcasted_iota(jnp.int32, (config.tokens, dim), 1)
    mask = None if live is None else jnp.broadcast_to(live[:, None], (config.tokens, dim))
    if dim != head_dim:
        mask = cols < head_dim if mask is None else mask & (cols < head_dim)
    row = page * config.spec.page_size + offset
    index = (jnp.broadcast_to(row[:, None], (config.tokens, dim)), first_col + cols)
    other = None if mask is None else (0 if config.spec.dtype == "int8" else 0.0)
    return compat.masked_load(ins["kv"], index, mask=mask, other=other)


def _scales(ins, config: TileConfig, page, offset, row, live) -> jax.Array:
    """``[tile]`` float32 scales of pool tokens; ``row`` is ``2 * kv_head`` for K and one more for V."""
    return compat.masked_load(
        ins["scales"], (page, row * config.spec.page_size + offset), mask=live, other=None if live is None else 0.0
    )


def attend(
    ins, config: TileConfig, q, carry: Carry, *, kv_head, place, live, visible, tokens, positions, slopes, scale
) -> Carry:
    """One kv tile's step of the online softmax.

    Args:
        ins: operand refs.
        config: static settings.
        q: ``[rows, dim]`` in ``score_dtype``.
        carry: running state.
        kv_head: KV head.
        place: ``token_places`` of the tile.
        live: ``[tile]`` bool, tokens that may be read; None if all may.
        visible: ``[rows, tile]`` bool, which keys a row sees; None if all are seen.
        tokens: ``[tile]`` positions of the keys.
        positions: ``[rows]`` positions of the queries.
        slopes: ``[rows]`` ALiBi slopes or None.
        scale: float32 factor of the raw scores.

    Returns:
        The new state.

    **Source:** Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022, algorithm 1.
    """
    page, offset = place
    head_dim = config.spec.head_dim
    k = _rows(ins, config, page, offset, kv_head * 2 * head_dim, live).astype(config.score_dtype)
    scores = dot(q, k, ((1,), (1,)))
    plain = config.soft_cap is None and slopes is None
    scores = scores * (scale * LOG2E if plain else scale)
    if config.spec.quant == "token_head":
        scores = scores * _scales(ins, config, page, offset, 2 * kv_head, live)[None, :]
    if config.soft_cap is not None:
        scores = config.soft_cap * jnp.tanh(scores * (1.0 / config.soft_cap))
    if slopes is not None:
        distance = (positions[:, None] - tokens[None, :]).astype(jnp.float32)
        scores = scores - slopes[:, None] * distance
    if not plain:
        scores = scores * LOG2E
    if visible is not None:
        scores = jnp.where(visible, scores, NEG_INF)
    peak, total, acc = carry
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
    safe = jnp.where(new_peak == NEG_INF, 0.0, new_peak)
    p = jnp.exp2(scores - safe[:, None])
    keep = jnp.exp2(peak - safe)
    total = total * keep + jnp.sum(p, axis=1)
    v = _rows(ins, config, page, offset, kv_head * 2 * head_dim + head_dim, live).astype(config.value_dtype)
    if config.spec.quant == "token_head":
        p = p * _scales(ins, config, page, offset, 2 * kv_head + 1, live)[None, :]
    acc = acc * keep[:, None] + dot(p.astype(config.value_dtype), v, ((1,), (0,)))
    return new_peak, total, acc


def settle(carry: Carry) -> tuple[jax.Array, jax.Array]:
    """Normalised output ``[rows, dim]`` (zeros for rows that saw no key) and log2-sum-exp2 ``[rows]`` (-inf for those)."""
    peak, total, acc = carry
    seen = total > 0.0
    divisor = jnp.where(seen, total, 1.0)
    return acc / divisor[:, None], jnp.where(seen, peak + jnp.log(divisor) * LOG2E, NEG_INF)


def with_sinks(out: jax.Array, lse2: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lets sinks join the softmax's denominator: a sink is a logit without a value.

    Args:
        out: ``[rows, dim]`` normalised outputs.
        lse2: ``[rows]`` their log-sum-exp in log2 units.
        sinks: ``[rows]`` logits in natural units.

    Returns:
        ``out * exp(lse) / (exp(lse) + exp(sink))`` and the log of that denominator, in log2 units.

    **Source:** Xiao et al. 2024 (attention sinks); gpt-oss model card, 2025 (sinks as learned logits).
    """
    sinks2 = sinks * LOG2E
    peak = jnp.maximum(lse2, sinks2)
    safe = jnp.where(peak == NEG_INF, 0.0, peak)
    own = jnp.exp2(lse2 - safe)
    total = own + jnp.exp2(sinks2 - safe)
    return out * (own / total)[:, None], safe + jnp.log(total) * LOG2E
