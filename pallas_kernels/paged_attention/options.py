"""What every attention implementation takes besides queries, pool and plan."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Checked keywords of ``paged_attention``, as handed to an implementation.

    Attributes:
        sm_scale: traced float32 scalar (or float) applied to the float32 scores.
        alibi_slopes: float32 ``[N]`` or None; adds ``-slope * (query position - key position)`` to the scaled scores.
        sinks: float32 ``[N]`` or None; a logit per query head that joins the softmax's denominator once, and so the returned
            log-sum-exp. A query that sees no key gives 0 and -inf all the same.
        k_scale, v_scale: float32 scalars for "tensor"-quantised pools, else None.
        causal: whether a query sees only keys at or before its position (static).
        sliding_window: a query at position ``p`` sees keys from ``p - window + 1`` on (to ``p`` when causal); None for all
            (static).
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` after scaling, before ALiBi and masks (static).
    """

    sm_scale: jax.Array | float
    alibi_slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    k_scale: jax.Array | float | None = None
    v_scale: jax.Array | float | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    sliding_window: int | None = dataclasses.field(default=None, metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
