"""The model's hyper-parameters from GGUF metadata.

Source: the key names of the GGUF specification, and what ``llama.cpp`` computes from them for the ``llama`` architecture.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.hf_fields import token_ids
from jaxpaged.model_config import ModelConfig, RopeConfig
from jaxpaged.weights.gguf_io import GgufFile
from jaxpaged.weights.names import Part

_READ = frozenset(
    {
        "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
        "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
        "attention.sliding_window", "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
        "rope.scale_linear", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "tensor_data_layout": ("Meta AI original pth", "Hugging Face"),
    "rope.scaling.finetuned": (True, False),
}


def gguf_config(file: GgufFile) -> ModelConfig:
    """Read the config of a GGUF model.

    Args:
        file: the parsed file; only metadata, tensor shapes and the rotary factors tensor are read.

    Returns:
        The hyper-parameters. Biases and a tied head are recognised by which tensors are there.

    Raises:
        CheckpointError: another architecture, a missing key, or a key whose value is not supported.
    """
    where = str(file.files[0])
    kind = file.metadata.get("general.architecture")
    if kind != "llama":
        raise CheckpointError(f"{where}: general.architecture {kind!r} is not supported; supported: 'llama'")
    fields = {k.removeprefix("llama."): v for k, v in file.metadata.items() if k.startswith("llama.")}
    for name, value in fields.items():
        if name in _READ:
            continue
        if name not in _NEUTRAL or value not in _NEUTRAL[name]:
            raise CheckpointError(f"{where}: metadata llama.{name} = {value!r} is not supported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{where}: tensor token_embd.weight is missing")
    hidden, heads = _size(fields, "embedding_length", where), _size(fields, "attention.head_count", where)
    kv_heads = _size(fields, "attention.head_count_kv", where, heads)
    head_dim = _size(fields, "attention.key_length", where, hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if _size(fields, name, where, head_dim) != head_dim:
            raise CheckpointError(f"{where}: llama.{name} {fields[name]} differs from the head width {head_dim}: not supported")
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(f"{where}: {heads} query heads on {kv_heads} KV heads of width {head_dim}: not a legal model")
    longest = _size(fields, "context_length", where)
    biased = "blk.0.attn_q.bias" in file.tensors
    tokens = file.metadata
    ends = [tokens.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    bos = token_ids(tokens.get("tokenizer.ggml.bos_token_id"), f"{where}: tokenizer.ggml.bos_token_id")
    pad = token_ids(tokens.get("tokenizer.ggml.padding_token_id"), f"{where}: tokenizer.ggml.padding_token_id")
    window = fields.get("attention.sliding_window") or None
    return ModelConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=_size(fields, "feed_forward_length", where),
        num_layers=_size(fields, "block_count", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rms_norm_eps=float(
            str(np.float32(_required(fields, "attention.layer_norm_rms_epsilon", where)))
        ),  # 1e-05, not 9.99..e-06
        rope=_rope(file, fields, head_dim, longest, where),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=biased,
        qkv_bias_only=biased and "blk.0.attn_output.bias" not in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        sliding_window=window,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids([i for i in ends if i is not None], f"{where}: tokenizer.ggml.eos_token_id"),
        pad_token_id=pad[0] if pad else None,
        dtype=_dtype(file),
        architecture="MistralForCausalLM" if window else "LlamaForCausalLM",
    )


def llama3_from_factors(factors: np.ndarray, theta: float, where: str) -> RopeConfig:
    """Recover the "llama3" rotary scaling from the divisor of each inverse frequency, which is all a GGUF file keeps.

    Args:
        factors: float ``[H/2]``, each in ``[1, factor]``.
        theta: base of the inverse frequencies.
        where: the file, for messages.

    Returns:
        A scaling with the same divisors: the published settings (low 1, high 4, original length 8192) where they match,
        else a solution of the same formula.

    Raises:
        CheckpointError: no setting of that formula gives these divisors.

    Source: Llama 3.1's scaling rule as in ``transformers`` ("llama3"): between wavelengths original/high and original/low
        the inverse divisor is linear in the frequency, ``1/f = (1 - s)/factor + s`` with
        ``s = (original * freq / 2 pi - low) / (high - low)``, clipped to 0..1. Scaling low, high and original together
        changes nothing, so original is fixed and two points of the line determine the rest.
    """
    dim = 2 * len(factors)
    factor = float(np.round(factors.max(), 4))
    if factor == 1.0:
        return RopeConfig(theta=theta)
    freq = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    original, guesses = 8192, [(1.0, 4.0)]
    smooth = (1.0 / factors.astype(np.float64) - 1.0 / factor) / (1.0 - 1.0 / factor)
    # The line runs through the points strictly between; with fewer than two of them, through a neighbour at its clip.
    inner = np.flatnonzero((smooth > 1e-5) & (smooth < 1.0 - 1e-5))
    last = int(np.count_nonzero(smooth >= 1.0 - 1e-5)) - 1
    lines = [inner] if len(inner) > 1 else [np.arange(last, last + 2), np.arange(last + 1, last + 3)]
    for points in lines:
        if points.min() >= 0 and points.max() < len(freq):
            slope, offset = np.polyfit(freq[points], np.clip(smooth[points], 0.0, 1.0), 1)
            if slope > 0 > offset:
                width = original / (2 * math.pi * slope)
                guesses.append((-offset * width, -offset * width + width))
    for low, high in guesses:
        s = np.clip((original * freq / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
        if np.allclose(1.0 / ((1.0 - s) / factor + s), factors, rtol=2e-4):
            return RopeConfig(
                theta=theta,
                rope_type="llama3",
                factor=factor,
                original_max_position_embeddings=original,
                low_freq_factor=float(low),
                high_freq_factor=float(high),
            )
    raise CheckpointError(f"{where}: tensor rope_freqs.weight does not follow the llama3 rotary scaling: {factors.tolist()}")


def _rope(file: GgufFile, fields: Mapping[str, Any], head_dim: int, longest: int, where: str) -> RopeConfig:
    theta = float(fields.get("rope.freq_base", 10000.0))
    kind = fields.get("rope.scaling.type") or ("linear" if "rope.scale_linear" in fields else "none")
    factor = float(fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0)) or 1.0)
    if "rope_freqs.weight" in file.tensors:
        shape = file.tensors["rope_freqs.weight"].shape
        if shape != (head_dim // 2,):
            raise CheckpointError(f"{where}: rope_freqs.weight has shape {list(shape)}, wanted {[head_dim // 2]}")
        factors = np.empty(shape, np.float32)
        file.read_into(Part("rope_freqs.weight", shape), factors)
        rope = llama3_from_factors(factors, theta, where)
        if kind != "none" and (kind != "linear" or factor != 1.0):
            raise CheckpointError(f"{where}: both rope_freqs.weight and rope.scaling.type {kind!r}: not supported")
        return rope
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, rope_type="linear", factor=factor)
    if kind == "yarn":
        # llama.cpp multiplies this into the factor of the paper; 1 by default
        extra = float(fields.get("rope.scaling.attn_factor", 1.0))
        return RopeConfig(
            theta=theta,
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=int(fields.get("rope.scaling.original_context_length") or longest),
            attention_factor=None if extra == 1.0 else extra * (0.1 * math.log(factor) + 1.0),
            beta_fast=float(fields.get("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(fields.get("rope.scaling.yarn_beta_slow", 1.0)),
        )
    raise CheckpointError(f"{where}: llama.rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")


def _dtype(file: GgufFile) -> str:
    """Float32 or float16 if the matrices are stored so, else bfloat16 (it holds any quantised value to its own accuracy)."""
    kinds = {info.kind.name for info in file.tensors.values() if len(info.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _required(fields: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in fields:
        raise CheckpointError(f"{where}: metadata llama.{name} is missing")
    return fields[name]


def _size(fields: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = fields.get(name, default) if default is not None else _required(fields, name, where)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise CheckpointError(f"{where}: llama.{name} differs between layers ({value}): not supported")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where}: llama.{name} must be a positive integer, got {value!r}")
    return value
