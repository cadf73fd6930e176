"""ORACLE: plain jnp that runs a Llama densely over the whole sequence for every new token. No cache, no pages.

Written from the published formulas alone and independent of ``jaxpaged``: it reads ``config.json`` and the safetensors
files of a Hugging Face directory by their own names.
"""

import functools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file


def inverse_frequencies(config: dict[str, Any], num_tokens: int) -> tuple[np.ndarray, float]:
    """Rotary inverse frequencies ``[H/2]`` (float64) and the factor on cos and sin, for a sequence of ``num_tokens``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    longest = config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or longest
    factor = float(rope.get("factor") or 1.0)
    if kind == "dynamic":
        seen = max(num_tokens, longest)
        base *= (factor * seen / longest - (factor - 1)) ** (dim / (dim - 2))
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    freq = base**-exponents
    if kind in ("default", "dynamic"):
        return freq, 1.0
    if kind == "linear":
        return freq / factor, 1.0
    if kind == "llama3":
        turns = original * freq / (2 * math.pi)  # full rotations within the original context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - keep) * freq / factor + keep * freq, 1.0
    if kind == "yarn":

        def dim_of(rotations: float) -> float:
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low_dim, high_dim = dim_of(rope.get("beta_fast") or 32), dim_of(rope.get("beta_slow") or 1)
        if rope.get("truncate", True):
            low_dim, high_dim = math.floor(low_dim), math.ceil(high_dim)
        low_dim, high_dim = max(low_dim, 0), min(high_dim, dim - 1)
        width = (high_dim - low_dim) or 0.001
        keep = 1 - np.clip((np.arange(dim // 2) - low_dim) / width, 0.0, 1.0)
        attention_factor = rope.get("attention_factor")
        if attention_factor is None:

            def temperature(scale: float = 1.0) -> float:
                return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

            if rope.get("mscale") and rope.get("mscale_all_dim"):
                attention_factor = temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"])
            else:
                attention_factor = temperature()
        return (1 - keep) * freq / factor + keep * freq, float(attention_factor)
    raise ValueError(f"the oracle does not know rope type {kind!r}")


class Oracle:
    """A dense model read from a Hugging Face directory; everything in float32."""

    def __init__(self, directory: str | Path):
        directory = Path(directory)
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.weights: dict[str, jax.Array] = {}
        for file in sorted(directory.glob("*.safetensors")):
            self.weights |= {name: jnp.asarray(array, jnp.float32) for name, array in load_file(file).items()}
        self._forward = jax.jit(functools.partial(_forward, self.config))

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Next-token logits after every position: ``[len(token_ids), V]``, float32."""
        count = len(token_ids)
        padded = np.zeros(max(16, 1 << (count - 1).bit_length()), np.int32)  # causal: later padding changes nothing
        padded[:count] = token_ids
        freq, factor = inverse_frequencies(self.config, count)
        angles = np.arange(len(padded))[:, None] * freq[None, :]
        cos, sin = np.float32(np.cos(angles) * factor), np.float32(np.sin(angles) * factor)
        with jax.default_matmul_precision("highest"):
            return np.asarray(self._forward(self.weights, padded, cos, sin))[:count]

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-softmax of :meth:`logits` in float64: ``[len(token_ids), V]``."""
        logits = self.logits(token_ids).astype(np.float64)
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))

    def greedy(self, prompt: Sequence[int], max_tokens: int, eos: Iterable[int] = ()) -> tuple[list[int], list[float]]:
        """Greedy tokens (an end token, if met, is the last one) and their log-probabilities."""
        tokens, out, logprobs, ends = list(prompt), [], [], set(eos)
        for _ in range(max_tokens):
            last = self.logprobs(tokens)[-1]
            out.append(int(last.argmax()))
            logprobs.append(float(last[out[-1]]))
            tokens.append(out[-1])
            if out[-1] in ends:
                break
        return out, logprobs


def _forward(
    config: dict[str, Any], weights: dict[str, jax.Array], tokens: jax.Array, cos: jax.Array, sin: jax.Array
) -> jax.Array:
    n = config["num_attention_heads"]
    k = config.get("num_key_value_heads") or n
    length, window = tokens.shape[0], config.get("sliding_window")
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    visible = (distance >= 0) & (distance < (window or length))

    def norm(x: jax.Array, name: str) -> jax.Array:
        eps = config.get("rms_norm_eps", 1e-6)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * weights[f"{name}.weight"]

    def linear(x: jax.Array, name: str) -> jax.Array:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def rotate(x: jax.Array) -> jax.Array:  # [T, heads, H], first half paired with second half
        a, b = jnp.split(x, 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, key, value = (
            linear(y, f"{layer}.self_attn.{name}_proj").reshape(length, heads, -1)
            for name, heads in (("q", n), ("k", k), ("v", k))
        )
        q, key = rotate(q), rotate(key)
        key, value = jnp.repeat(key, n // k, axis=1), jnp.repeat(value, n // k, axis=1)
        scores = jnp.einsum("qnh,knh->nqk", q, key) / math.sqrt(q.shape[-1])
        probs = jax.nn.softmax(jnp.where(visible[None], scores, -jnp.inf), axis=-1)
        # Weight 0 times NaN is NaN: a later token's NaN must not reach an earlier row.
        weighted = probs.transpose(1, 2, 0)[..., None] * value[None]  # [T, T, N, H]
        attended = jnp.where(visible[..., None, None], weighted, 0.0).sum(1).reshape(length, -1)
        x = x + linear(attended, f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gated = jax.nn.silu(linear(y, f"{layer}.mlp.gate_proj")) * linear(y, f"{layer}.mlp.up_proj")
        x = x + linear(gated, f"{layer}.mlp.down_proj")
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return linear(norm(x, "model.norm"), head)
