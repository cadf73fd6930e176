"""Small GGUF models written with the ``gguf`` package from Hugging Face tensors, as llama.cpp's converter lays them out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    stem, suffix = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{suffix}"


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs (0, H/2, 1, H/2 + 1, ...), as GGUF keeps q and k."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    raw: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a GGUF file.

    Args:
        path: the file.
        config: ``config.json`` fields (see ``tests.kit.tiny.tiny_config``).
        tensors: float32 tensors by Hugging Face name.
        kind: how matrices are stored; vectors are float32, as always.
        raw: GGUF name -> block bytes and type, replacing a tensor.
        extra_tensors: further float32 tensors by GGUF name.
        metadata: keys to add or replace; None removes one.
        architecture: ``general.architecture``.
    """
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, architecture)
    fields: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    } | dict(metadata or {})
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            adders[type(value)](key, value)
    for name, tensor in tensors.items():
        projection = name.split(".")[-2]
        data = interleave(tensor, heads[projection]) if projection in heads else tensor
        label = gguf_name(name)
        if raw and label in raw:
            writer.add_tensor(label, raw[label][0], raw_dtype=raw[label][1])
        elif data.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(label, np.ascontiguousarray(data, np.float32))
        else:
            writer.add_tensor(label, gguf.quants.quantize(np.ascontiguousarray(data, np.float32), kind), raw_dtype=kind)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
