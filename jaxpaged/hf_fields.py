"""The fields of a Hugging Face ``config.json``: which are read, which cannot matter, which only work at one value.

Every helper raises :class:`CheckpointError` naming the field and the value it met.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import CheckpointError

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}
"""Hugging Face class name -> model type, for every architecture that can be loaded."""

ROPE_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset({"factor"})),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
    ),
}
"""Rope type -> (required fields, optional fields) of ``rope_scaling`` / ``rope_parameters``, beside type and theta."""

HARMLESS_FIELDS: frozenset[str] = frozenset(
    {
        # training and initialisation
        "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "initializer_range",
        "gradient_checkpointing", "neftune_noise_alpha", "pretraining_tp", "use_cache",
        # what a forward call returns, and how it is traced
        "output_attentions", "output_hidden_states", "return_dict", "use_return_dict", "output_scores", "torchscript",
        "return_dict_in_generate", "chunk_size_feed_forward", "use_bfloat16", "attn_implementation",
        # classification heads that a language model does not have
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
        # names, versions, bookkeeping
        "name_or_path", "transformers_version", "tokenizer_class", "is_llama_config", "transformers.js_config",
        "max_sequence_length", "model_max_length", "unsloth_version", "unsloth_fixed", "original_vocab_size",
        "model_name", "license", "prefix",
        # tokens of other model families
        "decoder_start_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "mask_token_id",
        "forced_bos_token_id", "forced_eos_token_id",
        # old generation defaults: read from generation_config.json only
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
        "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "remove_invalid_values",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    }
)  # fmt: skip
"""Fields of ``config.json`` that cannot change what inference computes; they are skipped. So are names starting with ``_``."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),
    "compression_config": (None,),
    "partial_rotary_factor": (1, 1.0, None),
    "factor": (1, 1.0, None),
    "rope_interleaved": (False, None),
    "auto_map": (None,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
"""Fields that would change the computation: only these values are supported."""

READ_FIELDS: frozenset[str] = frozenset(
    {
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
        "rope_scaling", "rope_parameters", "original_max_position_embeddings", "tie_word_embeddings", "attention_bias",
        "qkv_bias_only", "mlp_bias", "sliding_window", "layer_types", "bos_token_id", "eos_token_id", "pad_token_id",
        "torch_dtype", "dtype",
    }
)  # fmt: skip
"""Fields of ``config.json`` that are read."""

DTYPES = ("float32", "bfloat16", "float16")


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Token ids given as null, one id or a list of ids; negative ids (an old way to say "none") are dropped.

    Raises:
        CheckpointError: anything else; ``where`` names the field.
    """
    listed = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in listed):
        raise CheckpointError(f"{where} must be a token id, a list of token ids or null, got {value!r}")
    return tuple(item for item in dict.fromkeys(listed) if item >= 0)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The supported Hugging Face class name of a config (from ``architectures``, else from ``model_type``)."""
    names = config.get("architectures")
    if not names:
        known = {kind: name for name, kind in reversed(ARCHITECTURES.items())}
        names = [known.get(str(config.get("model_type")), str(config.get("model_type")))]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json: architectures {names!r} is not supported; supported: {', '.join(ARCHITECTURES)}. "
            "Only decoder-only models of the Llama family can be loaded"
        )
    kind = config.get("model_type")
    if kind is not None and kind != ARCHITECTURES[names[0]]:
        raise CheckpointError(f"config.json: model_type {kind!r} does not belong to architecture {names[0]!r}")
    return names[0]


def check_fields(config: Mapping[str, Any]) -> None:
    """Raise unless every field is read, harmless, or at a supported value."""
    for name, value in config.items():
        if name in READ_FIELDS or name in HARMLESS_FIELDS or name.startswith("_"):
            continue
        if name not in NEUTRAL_VALUES:
            near = difflib.get_close_matches(name, READ_FIELDS | NEUTRAL_VALUES.keys(), 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise CheckpointError(
                f"config.json: unknown field {name!r} = {value!r}{hint}. It might change what the model computes, so it is not "
                "skipped; delete it from config.json if it does not matter"
            )
        neutral(name, value, "config.json")


def neutral(name: str, value: Any, where: str) -> None:
    """Raise unless ``value`` is one that :data:`NEUTRAL_VALUES` supports for the field ``name``."""
    if value not in NEUTRAL_VALUES[name]:
        supported = " or ".join(repr(item) for item in NEUTRAL_VALUES[name])
        raise CheckpointError(f"{where}: {name} = {value!r} is not supported; supported: {supported}")


def size(config: Mapping[str, Any], name: str, default: int | None = None, where: str = "config.json") -> int:
    """A positive integer field; ``default`` where absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where}: {name} must be a positive integer, got {config.get(name)!r}")
    return value


def number(config: Mapping[str, Any], where: str, name: str, default: float | None) -> float:
    """A positive finite number; ``default`` where absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"{where}: {name} must be a positive number, got {config.get(name)!r}")
    return float(value)


def flag(config: Mapping[str, Any], name: str, where: str = "config.json") -> bool:
    """A boolean field; False where absent or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{where}: {name} must be true or false, got {value!r}")
    return bool(value)


def token_id(config: Mapping[str, Any], name: str, default: int | None) -> int | None:
    """One token id or null; ``default`` where absent."""
    ids = token_ids(config.get(name, default), f"config.json: {name}")
    if len(ids) > 1:
        raise CheckpointError(f"config.json: {name} must be one token id or null, got {config[name]!r}")
    return ids[0] if ids else None
