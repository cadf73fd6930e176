"""``paged_attention``: one call for decode, chunked prefill and mixed steps, on every target."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import FLOAT_DTYPES, KVPool, PoolSpec

OP = "paged_attention"


def paged_attention(
    q: jax.Array,
    pool: KVPool,
    plan: AttentionPlan,
    *,
    layer: int | jax.Array = 0,
    sm_scale: float | jax.Array | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    implementation: Implementation = "auto",
    tiles: Any = None,
    interpret: Any = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of a step's query tokens over the K and V that a page pool holds for their rows.

    The step's own K and V must be in the pool already (``write_kv`` comes first). Query token ``i`` of row ``r`` stands at
    position ``seq_lens[r] - query_len[r] + i`` and sees the keys at or before it. A token that sees no key (padding, a row of
    length 0) gives 0 and a log-sum-exp of -inf. Slots behind a row's length are never used, whatever they hold.

    Args:
        q: ``[T, N, H]`` float32, bfloat16 or float16; ``T = plan.shape.num_tokens``, ``N`` a multiple of the pool's KV heads;
            query head ``n`` uses KV head ``n // (N // K)``.
        pool: the page pool.
        plan: made by ``plan`` (or ``plan_decode``) for this step.
        layer: which layer's pages to read; an int or a traced int32 scalar.
        sm_scale: factor on the float32 scores; None for ``H ** -0.5``. May be traced.
        causal: False lets every query see all ``seq_lens[r]`` keys.
        sliding_window: tokens a query sees, itself included, >= 1: keys from ``p - sliding_window + 1`` on. None for all.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` after scaling, > 0. None for none.
        alibi_slopes: float32 ``[N]``; adds ``-slope * (query position - key position)`` to the scaled, capped scores.
        sinks: float32 ``[N]``; a logit per query head that joins the softmax's denominator, with no value.
        k_scale, v_scale: scalars for "tensor"-quantised pools (may be traced), else None.
        return_lse: also return the log-sum-exp of each query's scores (sinks included).
        out_dtype: float dtype of the output; None for ``q``'s.
        implementation: "auto" takes the platform's own; any other name runs that one or raises.
        tiles: ``Tiles``, or the implementation's own class (such as ``TritonTiles``); None for its defaults.
        interpret: run a Pallas kernel in interpret mode (True, or ``pltpu.InterpretParams(...)`` for "mosaic_tpu").

    Returns:
        ``out [T, N, H]``, or ``(out, lse)`` with ``lse`` float32 ``[T, N]`` (natural logarithm).

    Raises:
        ValueError: an argument has a wrong shape, dtype or value; the message names it.
        KernelUnsupportedError: the chosen implementation cannot do this; the message says what can.
        NotImplementedError: on differentiation.

    Source: Kwon et al. 2023, section 4.1 (attention over pages); Milakov and Gimelshein 2018 (online softmax); Press et al.
    2022 (ALiBi); Gemma 2 report, section 2 (soft cap); Xiao et al. 2024 (attention sinks).
    """
    _check_q(q, pool, plan)
    _check_window(sliding_window, plan)
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"soft_cap: got {soft_cap}, wants a finite number > 0, or None for no cap")
    out_dtype = jnp.dtype(q.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(f"out_dtype: got {out_dtype}, wants a float dtype")
    k_scale, v_scale = dispatch.check_tensor_scales(pool, k_scale, v_scale)
    options = AttentionOptions(
        sm_scale=jnp.float32(1 / math.sqrt(pool.spec.head_dim) if sm_scale is None else sm_scale),
        alibi_slopes=_per_head("alibi_slopes", alibi_slopes, q.shape[1]),
        sinks=_per_head("sinks", sinks, q.shape[1]),
        k_scale=k_scale,
        v_scale=v_scale,
        causal=bool(causal),
        sliding_window=None if sliding_window is None else int(sliding_window),
        soft_cap=None if soft_cap is None else float(soft_cap),
    )
    name = dispatch.resolve(OP, implementation, pool.data, interpret)
    dispatch.check_interpret(OP, name, interpret)
    static = (name, tiles, interpret, return_lse, out_dtype)
    run = _run if name == "reference" else _jitted
    out, lse = run(static, q, pool, plan, dispatch.check_layer(layer, pool), options)
    return (out, lse) if return_lse else out


def _run(static, q, pool: KVPool, plan: AttentionPlan, layer, options: AttentionOptions):
    name, tiles, interpret, return_lse, out_dtype = static
    q = dispatch.no_gradient(OP, q)
    pool = KVPool(dispatch.no_gradient(OP, pool.data), pool.scales, pool.spec)
    module = dispatch.load(OP, name)
    return module.paged_attention(
        q, pool, plan, layer, options, tiles=tiles, interpret=interpret, return_lse=return_lse, out_dtype=out_dtype
    )


_jitted = functools.partial(jax.jit, static_argnums=0, inline=True)(_run)


def _check_q(q: jax.Array, pool: KVPool, plan: AttentionPlan) -> None:
    dispatch.check_pool(pool)
    dispatch.check_plan(pool, plan)
    spec: PoolSpec = pool.spec
    wanted = f"[{plan.shape.num_tokens}, multiple of {spec.num_kv_heads}, {spec.head_dim}]"
    shape = tuple(q.shape)
    if len(shape) != 3 or shape[0] != plan.shape.num_tokens or shape[2] != spec.head_dim or not shape[1]:
        raise ValueError(f"q: got shape {list(shape)}, wants {wanted} for this plan and pool")
    if shape[1] % spec.num_kv_heads:
        raise ValueError(f"q: got {shape[1]} query heads, wants a multiple of the pool's {spec.num_kv_heads} KV heads")
    if jnp.dtype(q.dtype).name not in FLOAT_DTYPES:
        raise ValueError(f"q: got dtype {jnp.dtype(q.dtype).name}, wants one of {', '.join(FLOAT_DTYPES)}")


def _check_window(window: int | None, plan: AttentionPlan) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, (int, np.integer)) or window < 1):
        raise ValueError(f"sliding_window: got {window!r}, wants an integer >= 1 or None")
    if plan.sliding_window is not None and (window is None or window > plan.sliding_window):
        raise ValueError(
            f"sliding_window: got {window}, but the plan leaves out what lies behind a window of {plan.sliding_window}; "
            "make the plan with the widest window of its layers (None if one of them has none)"
        )


def _per_head(name: str, values: Any, heads: int) -> jax.Array | None:
    if values is None:
        return None
    if jnp.shape(values) != (heads,):
        raise ValueError(f"{name}: got shape {list(jnp.shape(values))}, wants [{heads}], one number per query head")
    return jnp.asarray(values, jnp.float32)
