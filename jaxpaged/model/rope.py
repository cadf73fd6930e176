"""Rotary position embedding and its scalings.

Sources: Su et al. 2021 (RoPE); linear interpolation: Chen et al. 2023; dynamic NTK: the formula in ``transformers``
``modeling_rope_utils`` (``dynamic``); YaRN: Peng et al. 2023; llama3: Llama 3.1 model card, as in ``transformers``.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model_config import ModelConfig, RopeConfig

Array = np.ndarray | jax.Array
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the factor cos and sin are multiplied by.

    Args:
        rope: the rotary config; for "dynamic" the frequencies up to the original length are returned.
        head_dim: H, even.

    Returns:
        ``(float32 [H / 2], attention factor)``.

    Raises:
        CheckpointError: an unknown rope type.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    base = 1.0 / np.float32(rope.theta) ** exponents
    if rope.rope_type in ("default", "dynamic"):
        return base, 1.0
    if rope.rope_type == "linear":
        return base / np.float32(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3(base, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(base, rope, head_dim)
    raise CheckpointError(f"rope_type: got {rope.rope_type!r}, wants one of {', '.join(ROPE_TYPES)}")


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise CheckpointError(f"rope scaling {rope.rope_type!r}: original_max_position_embeddings is missing")
    return rope.original_max_position_embeddings


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    length = _original_length(rope)
    low, high = length / rope.low_freq_factor, length / rope.high_freq_factor
    wavelength = 2 * math.pi / base
    smooth = (length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * base / rope.factor + smooth * base
    scaled = np.where(wavelength > low, base / rope.factor, base)
    return np.where((wavelength <= low) & (wavelength >= high), blended, scaled).astype(np.float32)


def _yarn(base: np.ndarray, rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    length = _original_length(rope)

    def get_mscale(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    factor = rope.attention_factor
    if factor is None:
        if rope.mscale and rope.mscale_all_dim:
            factor = get_mscale(rope.factor, rope.mscale) / get_mscale(rope.factor, rope.mscale_all_dim)
        else:
            factor = get_mscale(rope.factor)

    def correction_dim(rotations: float) -> float:
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return (base / rope.factor * (1 - keep) + base * keep).astype(np.float32), float(factor)


def rope_tables(config: ModelConfig, positions: Array, lengths: Array | None) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of a flat token batch.

    Args:
        config: the model.
        positions: int32 ``[T]``.
        lengths: int32 ``[T]``, for "dynamic" scaling only: the sequence length each token is rotated for (its prompt's
            length for a prompt token, its own position + 1 for a generated one).

    Returns:
        ``(cos, sin)``, float32 ``[T, 1, H / 2]``.
    """
    rope, dim = config.rope, config.head_dim
    freqs, factor = inverse_frequencies(rope, dim)
    if rope.rope_type == "dynamic":
        assert lengths is not None
        original = float(rope.original_max_position_embeddings or config.max_position_embeddings)
        length = jnp.maximum(lengths.astype(jnp.float32), original)
        base = rope.theta * ((rope.factor * length / original) - (rope.factor - 1)) ** (dim / (dim - 2))
        angles = positions.astype(jnp.float32)[:, None] / base[:, None] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    else:
        angles = positions.astype(jnp.float32)[:, None] * freqs[None, :]
    return (jnp.cos(angles) * factor)[:, None], (jnp.sin(angles) * factor)[:, None]


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates ``x [T, heads, H]``: dimension ``i`` is paired with ``i + H / 2`` (the Hugging Face order).

    Args:
        x: queries or keys, any float dtype.
        cos, sin: as ``rope_tables`` gives them.

    Returns:
        The rotated array in ``x``'s dtype (computed in float32).
    """
    wide = x.astype(jnp.float32)
    turned = jnp.roll(wide, x.shape[-1] // 2, axis=-1)
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    return (wide * cos + turned * sin).astype(x.dtype)
