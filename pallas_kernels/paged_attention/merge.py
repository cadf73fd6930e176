"""Joining attention over disjoint sets of keys by their log-sum-exps."""

import jax
import jax.numpy as jnp


def merge_states(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The attention over the union of two disjoint key sets, from the attention over each.

    Args:
        out_a: ``[..., H]`` outputs over the first set.
        lse_a: float32 ``[...]`` log-sum-exp of its scores; -inf where the set is empty.
        out_b, lse_b: the same for the second set.

    Returns:
        ``(out, lse)``: ``out`` in ``out_a``'s dtype (computed in float32), ``lse`` float32; both sets empty give 0 and -inf.

    Raises:
        ValueError: shapes do not match.

    Source: Ye et al. 2025 (FlashInfer), section 2.2: attention states compose associatively.
    """
    for name, got, wanted in (
        ("lse_a", lse_a.shape, out_a.shape[:-1]),
        ("out_b", out_b.shape, out_a.shape),
        ("lse_b", lse_b.shape, out_a.shape[:-1]),
    ):
        if tuple(got) != tuple(wanted):
            raise ValueError(f"{name}: got shape {list(got)}, wants {list(wanted)} for out_a {list(out_a.shape)}")
    top = jnp.maximum(lse_a, lse_b)
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    a, b = jnp.exp(lse_a - base), jnp.exp(lse_b - base)
    total = a + b
    weight_a, weight_b = (jnp.where(total > 0, x / jnp.where(total > 0, total, 1.0), 0.0)[..., None] for x in (a, b))
    out = weight_a * out_a.astype(jnp.float32) + weight_b * out_b.astype(jnp.float32)
    return out.astype(out_a.dtype), jnp.where(total > 0, base + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
