"""Which source tensors make up each canonical parameter, in Hugging Face checkpoints and in GGUF files.

A canonical parameter (see ``jaxpaged.param_names``) is its parts stacked along rows: q, k and v; gate and up; or one
tensor as it is.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from jaxpaged.errors import CheckpointError
from jaxpaged.model_config import ModelConfig
from jaxpaged.param_names import model_params


@dataclasses.dataclass(frozen=True)
class Part:
    """One source tensor of a parameter.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape: the shape it must have.
        interleaved_heads: 0, or the number of heads whose rows the file stores as (0, H/2, 1, H/2 + 1, ...), the order
            GGUF keeps q and k in; reading puts them back to (0, 1, ..., H - 1).
    """

    name: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0


_HF_LAYER = {
    "input_norm": ("input_layernorm.weight",),
    "qkv_proj": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "o_proj": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
    "post_attention_norm": ("post_attention_layernorm.weight",),
    "gate_up_proj": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down_proj": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}
_GGUF_LAYER = {
    "input_norm": ("attn_norm.weight",),
    "qkv_proj": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "o_proj": ("attn_output.weight",),
    "o_bias": ("attn_output.bias",),
    "post_attention_norm": ("ffn_norm.weight",),
    "gate_up_proj": ("ffn_gate.weight", "ffn_up.weight"),
    "gate_up_bias": ("ffn_gate.bias", "ffn_up.bias"),
    "down_proj": ("ffn_down.weight",),
    "down_bias": ("ffn_down.bias",),
}
_HF_TOP = {"embed_tokens": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_GGUF_TOP = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}

_HARMLESS = re.compile(r".*rotary_emb\.inv_freq|.*attn_rot_embd\.weight|rope_freqs\.weight|.*\.masked_bias|.*attn\.bias_mask")


def hf_parts(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Canonical path -> parts for a Hugging Face checkpoint, in model order."""
    return _parts(config, _HF_TOP, "model.layers.{}.", _HF_LAYER, interleaved=False)


def gguf_parts(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Canonical path -> parts for a GGUF file, in model order."""
    return _parts(config, _GGUF_TOP, "blk.{}.", _GGUF_LAYER, interleaved=True)


def check_tensors(parts: Mapping[str, tuple[Part, ...]], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Account for every tensor of a checkpoint.

    Args:
        parts: what the config asks for.
        shapes: name -> shape of every tensor the checkpoint has.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: a tensor is missing, left over (known buffers that hold no weights aside) or misshapen. All of
            them are counted, the first ones named with their shapes.
    """
    wanted = {part.name: part.shape for group in parts.values() for part in group}
    problems = [f"missing {name} {list(shape)}" for name, shape in wanted.items() if name not in shapes]
    problems += [
        f"{name} has shape {list(shapes[name])}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    problems += [f"unexpected {name} {list(shapes[name])}" for name in unexpected(wanted, shapes)]
    if problems:
        shown = "; ".join(problems[:12]) + ("; ..." if len(problems) > 12 else "")
        raise CheckpointError(f"{where}: {len(problems)} tensor(s) do not match the config: {shown}")


def unexpected(wanted: Iterable[str], names: Iterable[str]) -> list[str]:
    """Tensor names nobody asked for, without the buffers known to hold no weights (rotary tables, old masks)."""
    known = set(wanted)
    return [name for name in names if name not in known and not _HARMLESS.fullmatch(name)]


def _parts(
    config: ModelConfig,
    top: Mapping[str, str],
    prefix: str,
    layer: Mapping[str, tuple[str, ...]],
    *,
    interleaved: bool,
) -> dict[str, tuple[Part, ...]]:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"qkv": (q, kv, kv), "gate_up": (config.intermediate_size,) * 2}
    heads = (config.num_heads, config.num_kv_heads, 0) if interleaved else (0, 0, 0)
    result: dict[str, tuple[Part, ...]] = {}
    for path, shape in model_params(config).items():
        if path in top:
            result[path] = (Part(top[path], shape),)
            continue
        _, index, name = path.split("/")
        names = [prefix.format(index) + source for source in layer[name]]
        fused = name.rsplit("_", 1)[0]
        if fused in rows:
            shapes = [(count, *shape[1:]) for count in rows[fused]]
            swapped = heads if fused == "qkv" else (0, 0)
            result[path] = tuple(Part(n, s, h) for n, s, h in zip(names, shapes, swapped, strict=True))
        else:
            result[path] = (Part(names[0], shape),)
    return result
