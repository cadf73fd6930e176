"""The Llama decoder as ``flax.nnx`` modules that hold parameters only.

Split once at load (``split_model``); the jitted step merges inside. No KV lives in a module: a call takes the page pool and
returns it. Layers are unrolled (CPU) or scanned over stacked parameters (accelerators): the pool is carried either way.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpaged.model.attention import AttentionBackend, attention
from jaxpaged.model.inputs import StepInputs
from jaxpaged.model.kv_pages import KVPool
from jaxpaged.model.layers import rms_norm, swiglu
from jaxpaged.model.rope import rope_tables
from jaxpaged.model_config import ModelConfig
from jaxpaged.param_names import layer_params


class DecoderLayer(nnx.Module):
    """One layer's parameters (or, stacked along a new first axis, all layers')."""

    def __init__(self, params: Mapping[str, jax.Array]):
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))


class Llama(nnx.Module):
    """A Llama-family decoder.

    Args:
        config: hyper-parameters.
        params: canonical path -> array (see ``param_names``); with ``scan_layers``, ``layers/<name> [L, ...]``.
        scan_layers: scan over stacked layers instead of unrolling them.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, jax.Array], *, scan_layers: bool = False):
        self.config = config
        self.scan_layers = scan_layers
        names = layer_params(config)
        self.embed_tokens = nnx.Param(params["embed_tokens"])
        self.norm = nnx.Param(params["norm"])
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(params["lm_head"])
        if scan_layers:
            self.layers = DecoderLayer({name: params[f"layers/{name}"] for name in names})
        else:
            self.layers = nnx.List(
                [DecoderLayer({name: params[f"layers/{i}/{name}"] for name in names}) for i in range(config.num_layers)]
            )

    def __call__(
        self, token_ids: jax.Array, inputs: StepInputs, pool: KVPool, backend: AttentionBackend
    ) -> tuple[jax.Array, KVPool]:
        """Hidden states of a flat token batch.

        Args:
            token_ids: int32 ``[T]``, resolved.
            inputs: positions and attention plan.
            pool: the page pool.
            backend: which kernels to use.

        Returns:
            ``(hidden [T, D] before the final norm, pool)``.
        """
        config = self.config
        x = self.embed_tokens[...].at[token_ids].get(mode="clip")
        rope = rope_tables(config, inputs.positions, inputs.rope_lengths)
        plan = inputs.plan

        @jax.jit
        def layer_fn(params: dict[str, jax.Array], x: jax.Array, pool: KVPool, layer: jax.Array):
            h, pool = attention(
                rms_norm(x, params["input_norm"], config.rms_norm_eps), params, pool, plan, rope, layer, config, backend
            )
            x = x + h
            h = rms_norm(x, params["post_attention_norm"], config.rms_norm_eps)
            mlp = swiglu(h, params["gate_up_proj"], params.get("gate_up_bias"), params["down_proj"], params.get("down_bias"))
            return x + mlp, pool

        def arrays(layer: DecoderLayer) -> dict[str, jax.Array]:
            return {name: getattr(layer, name)[...] for name in layer_params(config)}

        if isinstance(self.layers, DecoderLayer):

            def body(carry, scanned):
                params, layer = scanned
                return layer_fn(params, *carry, layer), None

            (x, pool), _ = lax.scan(body, (x, pool), (arrays(self.layers), jnp.arange(config.num_layers, dtype=jnp.int32)))
        else:
            for i in range(config.num_layers):
                layer = self.layers[i]
                assert isinstance(layer, DecoderLayer)
                x, pool = layer_fn(arrays(layer), x, pool, jnp.int32(i))
        return x, pool

    def head(self) -> jax.Array:
        """The output matrix ``[V, D]``."""
        return self.embed_tokens[...] if self.lm_head is None else self.lm_head[...]


@dataclasses.dataclass(frozen=True)
class SplitModel:
    """A model split once into a static definition and a flat tuple of arrays (flattening a module tree each step is slow).

    Attributes:
        graphdef: static; hashable.
        treedef: structure of the parameters.
        leaves: the parameters.
    """

    graphdef: nnx.GraphDef
    treedef: Any
    leaves: tuple[jax.Array, ...]

    def merge(self, leaves: tuple[jax.Array, ...]) -> Llama:
        """Rebuilds the module around (traced) ``leaves``."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def split_model(config: ModelConfig, params: Mapping[str, jax.Array], *, scan_layers: bool = False) -> SplitModel:
    """Builds the module from canonical parameters and splits it."""
    graphdef, state = nnx.split(Llama(config, params, scan_layers=scan_layers))
    leaves, treedef = jax.tree.flatten(state)
    return SplitModel(graphdef, treedef, tuple(leaves))
