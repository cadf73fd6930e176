"""The dense pieces of a Llama layer: normalisation, projections, MLP. Pure functions of arrays."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of ``x [T, D]``, in float32, returned in ``x``'s dtype.

    Source: Zhang and Sennrich 2019; order of casts as in ``transformers`` ``LlamaRMSNorm``.
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


FEW_ROWS = 16  # up to here a bfloat16 product on CPU streams its weights rather than packs them
FEW_ROWS_MLP = 32  # the same for the pair of products of the MLP, whose result between them stays turned


def _rows_first(x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _weights_first(x: jax.Array, weight: jax.Array) -> jax.Array:
    y = lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return lax.optimization_barrier(y).T  # without the barrier the product is turned around again


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, out_dtype=None) -> jax.Array:
    """``x [T, in] @ weight.T`` with ``weight [out, in]``, accumulated in float32.

    Weights keep the checkpoint's ``[out, in]`` order: on XLA:CPU a bfloat16 product with both contracted axes minor and a
    float32 result is the one that reaches the matrix units. Its right side is packed at every call, so with few rows the
    weights go on the left (up to twice as fast for decode steps; measured in docs/performance.md).

    Args:
        out_dtype: of the result; None takes ``x``'s.
    """
    if x.shape[0] <= FEW_ROWS and x.dtype != jnp.float32:
        y = lax.platform_dependent(x, weight, cpu=_weights_first, default=_rows_first)
    else:
        y = _rows_first(x, weight)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype if out_dtype is None else out_dtype)


def swiglu(x: jax.Array, gate_up: jax.Array, gate_up_bias: jax.Array | None, down: jax.Array, down_bias: jax.Array | None):
    """Gated MLP ``down(silu(gate(x)) * up(x))``: ``x [T, D]``, ``gate_up [2F, D]`` (gate rows first), ``down [D, F]``.

    With few rows on CPU both weights stand on the left and the ``[F, T]`` between them is never turned around (see ``linear``).

    Source: Shazeer 2020 ("GLU variants improve Transformer").
    """
    width = down.shape[1]

    def rows_first(x: jax.Array) -> jax.Array:
        y = linear(x, gate_up, gate_up_bias, jnp.float32)
        return linear((jax.nn.silu(y[:, :width]) * y[:, width:]).astype(x.dtype), down, down_bias)

    def weights_first(x: jax.Array) -> jax.Array:
        y = lax.dot_general(gate_up, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        y = lax.optimization_barrier(y)  # without the barriers the products are turned around again
        if gate_up_bias is not None:
            y = y + gate_up_bias.astype(jnp.float32)[:, None]
        h = lax.optimization_barrier((jax.nn.silu(y[:width]) * y[width:]).astype(x.dtype))
        y = lax.dot_general(down, h, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        y = lax.optimization_barrier(y).T
        if down_bias is not None:
            y = y + down_bias.astype(jnp.float32)
        return y.astype(x.dtype)

    if x.shape[0] <= FEW_ROWS_MLP and x.dtype != jnp.float32:
        return lax.platform_dependent(x, cpu=weights_first, default=rows_first)
    return rows_first(x)
