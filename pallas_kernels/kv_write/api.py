"""``write_kv``: a step's new keys and values into their slots of the page pool."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import FLOAT_DTYPES, KVPool

OP = "kv_write"


def write_kv(
    pool: KVPool,
    k: jax.Array,
    v: jax.Array,
    plan: AttentionPlan,
    *,
    layer: int | jax.Array = 0,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    implementation: Implementation = "auto",
    tiles: Any = None,
    interpret: Any = False,
) -> KVPool:
    """Writes the keys and values of a step's tokens into one layer of the pool.

    Token ``t`` goes to slot ``plan.slot_mapping[t]``; tokens whose slot is ``DROPPED_SLOT`` (padding) are not written, and
    nothing else in the pool changes. Inside a jitted step that was given the pool by donation the write is in place.

    Args:
        pool: the page pool; use the returned one from here on.
        k: keys ``[T, K, H]``, any float dtype; rotary embedding already applied. ``T = plan.shape.num_tokens``.
        v: values, the same shape.
        plan: the step.
        layer: which layer; an int or a traced int32 scalar.
        k_scale, v_scale: scalars for pools with ``quant="tensor"`` (may be traced): ``k / k_scale`` is stored, clipped to the
            format's range. None for every other pool ("token_head" pools compute a scale per token and head).
        implementation: "auto" takes the platform's own; any other name runs that one or raises.
        tiles: ``Tiles``, or the implementation's own class (such as ``TritonTiles``); None for its defaults.
        interpret: run a Pallas kernel in interpret mode (True, or ``pltpu.InterpretParams(...)`` for "mosaic_tpu").

    Returns:
        The updated pool.

    Raises:
        ValueError: an argument has a wrong shape, dtype or value; the message names it.
        KernelUnsupportedError: the chosen implementation cannot do this; the message says what can.
        NotImplementedError: on differentiation.

    Source: Kwon et al. 2023, section 5.1 (the kernel that writes new keys and values into pages).
    """
    dispatch.check_pool(pool)
    dispatch.check_plan(pool, plan)
    spec = pool.spec
    wanted = (plan.shape.num_tokens, spec.num_kv_heads, spec.head_dim)
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape) != wanted:
            raise ValueError(f"{name}: got shape {list(x.shape)}, wants {list(wanted)} for this plan and pool")
        if jnp.dtype(x.dtype).name not in FLOAT_DTYPES:
            raise ValueError(f"{name}: got dtype {jnp.dtype(x.dtype).name}, wants one of {', '.join(FLOAT_DTYPES)}")
    k_scale, v_scale = dispatch.check_tensor_scales(pool, k_scale, v_scale)
    name = dispatch.resolve(OP, implementation, pool.data, interpret)
    dispatch.check_interpret(OP, name, interpret)
    run = _run if name == "reference" else _jitted
    return run((name, tiles, interpret), pool, k, v, plan, dispatch.check_layer(layer, pool), k_scale, v_scale)


def _run(static, pool: KVPool, k, v, plan: AttentionPlan, layer, k_scale, v_scale) -> KVPool:
    name, tiles, interpret = static
    k, v = dispatch.no_gradient(OP, k), dispatch.no_gradient(OP, v)
    module = dispatch.load(OP, name)
    return module.write_kv(pool, k, v, plan, layer, k_scale=k_scale, v_scale=v_scale, tiles=tiles, interpret=interpret)


_jitted = functools.partial(jax.jit, static_argnums=0, inline=True)(_run)
