"""The attention of one layer: project, rotate, write K and V into pages, attend over pages, project back."""

import dataclasses
from typing import Any

import jax

from jaxpaged.model.layers import linear
from jaxpaged.model.rope import apply_rope
from jaxpaged.model_config import ModelConfig
from pallas_kernels import paged_attention, write_kv
from pallas_kernels.dispatch import Implementation
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool


@dataclasses.dataclass(frozen=True)
class AttentionBackend:
    """Which kernels run (static).

    Attributes:
        implementation: "triton", "mosaic_tpu", "xla" or "reference".
        interpret: run Pallas kernels in interpret mode (tests without the device).
    """

    implementation: Implementation = "xla"
    interpret: bool = False

    @property
    def page_options(self) -> dict[str, Any]:
        """``implementation`` and ``interpret`` of operations on whole pages: on GPU plain XLA, which moves them in place."""
        if self.implementation == "triton":
            return {"implementation": "xla", "interpret": False}
        return {"implementation": self.implementation, "interpret": self.interpret}


def attention(
    x: jax.Array,
    layer_params: dict[str, jax.Array],
    pool: KVPool,
    plan: AttentionPlan,
    rope: tuple[jax.Array, jax.Array],
    layer: jax.Array | int,
    config: ModelConfig,
    backend: AttentionBackend,
) -> tuple[jax.Array, KVPool]:
    """Self-attention of one layer over the page pool.

    Args:
        x: ``[T, D]`` normalised hidden states.
        layer_params: ``qkv_proj [(N + 2K) H, D]``, ``o_proj [D, N H]`` and their biases where the model has them.
        pool: the page pool; this step's K and V are written before attention reads.
        plan: shared by all layers.
        rope: cosines and sines of the token batch.
        layer: layer number, may be traced.

    Returns:
        ``(out [T, D], pool)``.
    """
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = linear(x, layer_params["qkv_proj"], layer_params.get("qkv_bias"))
    qkv = qkv.reshape(x.shape[0], heads + 2 * kv_heads, dim)
    q = apply_rope(qkv[:, :heads], *rope)
    k = apply_rope(qkv[:, heads : heads + kv_heads], *rope)
    v = qkv[:, heads + kv_heads :]
    pool = write_kv(pool, k, v, plan, layer=layer, implementation=backend.implementation, interpret=backend.interpret)
    out = paged_attention(
        q,
        pool,
        plan,
        layer=layer,
        sliding_window=config.sliding_window,
        implementation=backend.implementation,
        interpret=backend.interpret,
    )
    assert isinstance(out, jax.Array)  # no log-sum-exp was asked for
    return linear(out.reshape(x.shape[0], heads * dim), layer_params["o_proj"], layer_params.get("o_bias")), pool
