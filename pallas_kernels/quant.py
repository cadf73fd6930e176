"""8-bit numbers: how K and V rows become stored values and scales, written once so that every implementation agrees.

A stored value ``s`` with scale ``c`` stands for ``s * c``. Attention never multiplies rows out: a K scale multiplies a column
of scores, a V scale a column of probabilities.

Products with reciprocals are written out because compilers turn divisions by constants into them: the bits stay the same.
"""

import jax
import jax.numpy as jnp
import numpy as np

QMAX = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
TINY_AMAX = 1e-30  # rows whose largest magnitude is below this take scale 1 (and store zeros)


def row_scales(x: jax.Array, dtype: str) -> jax.Array:
    """The scale of each row: ``max |x| * (1 / QMAX)``, and 1 for (next to) zero rows.

    Args:
        x: float32 ``[..., H]``.
        dtype: "int8", "float8_e4m3fn" or "float8_e5m2".

    Returns:
        float32 ``[...]``; NaN for rows that hold a NaN.

    Source: symmetric absmax quantisation (Dettmers et al. 2022, LLM.int8(), section 2), per row.
    """
    amax = jnp.max(jnp.abs(x), axis=-1)
    return jnp.where(amax < TINY_AMAX, jnp.float32(1.0), amax * jnp.float32(1 / QMAX[dtype]))


def quantize(x: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """``x * (1 / scale)`` in an 8-bit format, clipped to its finite range first (a float8 cast of more would be NaN).

    Args:
        x: float32, any shape.
        scale: float32, broadcastable to ``x``.
        dtype: "int8" (rounded by ``floor(x + 0.5)``), "float8_e4m3fn" or "float8_e5m2" (rounded to nearest even).

    Returns:
        Values of ``dtype``, shaped like ``x``.
    """
    y = jnp.clip(x * (1 / scale), -QMAX[dtype], QMAX[dtype])
    if dtype == "int8":
        y = jnp.floor(y + 0.5)
    return y.astype(dtype)


def quantize_np(x: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """``quantize`` in numpy float32 (the reference's own, with the same rounding)."""
    inverse = np.float32(1) / np.asarray(scale, np.float32)
    y = np.clip(x.astype(np.float32) * inverse, -QMAX[dtype], QMAX[dtype]).astype(np.float32)
    if dtype == "int8":
        y = np.nan_to_num(np.floor(y + np.float32(0.5)), nan=0.0)
    return y.astype(jnp.dtype(dtype))


def row_scales_np(x: np.ndarray, dtype: str) -> np.ndarray:
    """``row_scales`` in numpy float32."""
    amax = np.abs(x.astype(np.float32)).max(axis=-1)
    return np.where(amax < np.float32(TINY_AMAX), np.float32(1.0), amax * np.float32(1 / QMAX[dtype])).astype(np.float32)
