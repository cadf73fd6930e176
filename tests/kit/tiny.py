"""TINY: a random Llama written as a legal Hugging Face directory.

Two layers, hidden 32, 4 query heads on 2 KV heads of width 8, vocabulary 64, float32. Its weights are large enough that
attention decides the next token: reading or writing a wrong KV slot changes the output.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

NP_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """TINY's ``config.json`` with any field replaced (``None`` removes nothing: it is written as null)."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return config | overrides


def tiny_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights for ``config`` under their Hugging Face names, in the order a checkpoint has them."""
    rng = np.random.default_rng(seed)
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    h = config.get("head_dim") or d // config["num_attention_heads"]
    n, k = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]

    def matrix(rows: int, cols: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)

    def vector(size: int, mean: float, std: float) -> np.ndarray:
        return (mean + std * rng.standard_normal(size)).astype(np.float32)

    scale = 0.3 if config.get("tie_word_embeddings") else 1.0  # a tied head at full scale would only echo the last token
    tensors = {"model.embed_tokens.weight": (scale * rng.standard_normal((v, d))).astype(np.float32)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        heads = {"q": n, "k": k, "v": k}
        for name, count in heads.items():
            tensors[f"{layer}self_attn.{name}_proj.weight"] = matrix(count * h, d, 1.0 if name == "v" else 1.5)
        tensors[f"{layer}self_attn.o_proj.weight"] = matrix(d, n * h, 2.0)
        for name, rows, cols in (("gate", f, d), ("up", f, d), ("down", d, f)):
            tensors[f"{layer}mlp.{name}_proj.weight"] = matrix(rows, cols)
        if config.get("attention_bias"):
            for name, count in heads.items():
                tensors[f"{layer}self_attn.{name}_proj.bias"] = vector(count * h, 0.0, 0.3)
            tensors[f"{layer}self_attn.o_proj.bias"] = vector(d, 0.0, 0.3)
        if config.get("mlp_bias"):
            for name, size in (("gate", f), ("up", f), ("down", d)):
                tensors[f"{layer}mlp.{name}_proj.bias"] = vector(size, 0.0, 0.3)
        tensors[f"{layer}input_layernorm.weight"] = vector(d, 1.0, 0.1)
        tensors[f"{layer}post_attention_layernorm.weight"] = vector(d, 1.0, 0.1)
    tensors["model.norm.weight"] = vector(d, 1.0, 0.1)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = matrix(v, d, 2.0)
    return tensors


def write_hf(
    directory: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str = "float32",
    num_shards: int = 1,
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face directory: ``config.json``, safetensors (sharded with an index if asked), generation config."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config) | {"torch_dtype": dtype}, indent=1))
    cast = {name: np.ascontiguousarray(array.astype(NP_DTYPES[dtype])) for name, array in tensors.items()}
    if num_shards == 1:
        save_file(cast, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for i, names in enumerate(_split(list(cast), num_shards)):
            shard = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
            save_file({name: cast[name] for name in names}, directory / shard, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, shard)
        total = sum(array.nbytes for array in cast.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(dict(generation_config)))
    return directory


def write_tiny(
    directory: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_shards: int = 1,
    generation_config: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write TINY, with any ``config.json`` field overridden, into ``directory`` and return that path. No tokenizer."""
    config = tiny_config(**overrides)
    tensors = tiny_tensors(config, seed)
    return write_hf(directory, config, tensors, dtype=dtype, num_shards=num_shards, generation_config=generation_config)


def write_mistral(directory: str | Path, *, window: int, **overrides: Any) -> Path:
    """Write TINY as a Mistral with a sliding window of ``window`` tokens."""
    fields = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return write_tiny(directory, **(fields | overrides))


def _split(names: Sequence[str], parts: int) -> list[Sequence[str]]:
    bounds = [len(names) * i // parts for i in range(parts + 1)]
    return [names[a:b] for a, b in itertools.pairwise(bounds)]
