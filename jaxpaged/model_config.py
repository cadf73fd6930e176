"""The model family's hyper-parameters, and the strict reading of Hugging Face ``config.json``.

Names follow ``transformers.LlamaConfig``. A field that would change the computation and is not supported is an error that
names it; a field that cannot change inference (dropout, initialisation, training bookkeeping) is listed and skipped.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.hf_fields import (
    ARCHITECTURES,
    DTYPES,
    ROPE_FIELDS,
    architecture_of,
    check_fields,
    flag,
    neutral,
    number,
    size,
    token_id,
    token_ids,
)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding with its scaling.

    Attributes:
        theta: base of the inverse frequencies.
        rope_type: "default", "linear", "dynamic", "llama3" or "yarn".
        factor: scaling factor (all but "default").
        original_max_position_embeddings: length the model was first trained for ("dynamic", "llama3", "yarn").
        low_freq_factor, high_freq_factor: "llama3".
        attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate: "yarn".
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder.

    Attributes:
        vocab_size (V), hidden_size (D), intermediate_size (F), num_layers (L), num_heads (N), num_kv_heads (K),
        head_dim (H), max_position_embeddings: sizes.
        rms_norm_eps: epsilon of every RMSNorm.
        rope: rotary embedding.
        tie_word_embeddings: whether the output head is the embedding.
        attention_bias: biases on q, k, v and o (Llama's ``attention_bias``); ``qkv_bias_only`` leaves o without one.
        mlp_bias: biases on gate, up and down.
        sliding_window: tokens a position can look back on, itself included; None for full attention.
        bos_token_id, eos_token_ids, pad_token_id: from the model's config.
        dtype: the checkpoint's own ("float32", "bfloat16", "float16").
        architecture: the Hugging Face class name, for messages.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias_only: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "bfloat16"
    architecture: str = "LlamaForCausalLM"

    def kv_bytes_per_token(self, itemsize_bytes: int) -> int:
        """Bytes of K and V one token takes over all layers, for KV elements of ``itemsize_bytes``.

        Source: 2 (K and V) * layers * KV heads * head width * element size.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize_bytes

    @classmethod
    def from_hf_dict(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read a Hugging Face ``config.json``, strictly.

        Args:
            config: the parsed JSON object of a Llama or Mistral model. Both spellings of the rotary scaling
                (``rope_scaling`` with ``type`` or ``rope_type``, and ``rope_parameters``) are read.

        Returns:
            The model's hyper-parameters; absent optional fields take the defaults of ``transformers``.

        Raises:
            CheckpointError: unknown architecture, a field missing or of a wrong type, an unsupported value, or a field
                that is neither read nor known to be harmless. The message names the field and its value.
        """
        architecture = architecture_of(config)
        check_fields(config)
        mistral = ARCHITECTURES[architecture] == "mistral"
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        kv_default = 8 if mistral and "num_key_value_heads" not in config else heads
        kv_heads = size(config, "num_key_value_heads", kv_default)
        if config.get("head_dim") is None and hidden % heads:
            raise CheckpointError(
                f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given"
            )
        head_dim = size(config, "head_dim", hidden // heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise CheckpointError(f"config.json: head_dim must be even (rotary embedding pairs its halves), got {head_dim}")
        longest = size(config, "max_position_embeddings", 131072 if mistral else 2048)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(f"config.json: dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
        return cls(
            vocab_size=size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=size(config, "intermediate_size"),
            num_layers=size(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=longest,
            rms_norm_eps=number(config, "config.json", "rms_norm_eps", 1e-6),
            rope=rope_from_hf_dict(config, longest),
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            attention_bias=flag(config, "attention_bias"),
            qkv_bias_only=flag(config, "qkv_bias_only"),
            mlp_bias=flag(config, "mlp_bias"),
            sliding_window=_sliding_window(config, mistral),
            bos_token_id=token_id(config, "bos_token_id", 1),
            eos_token_ids=token_ids(config.get("eos_token_id", 2), "config.json: eos_token_id"),
            pad_token_id=token_id(config, "pad_token_id", None),
            dtype=dtype,
            architecture="MistralForCausalLM" if mistral else "LlamaForCausalLM",
        )

    def to_hf_dict(self) -> dict[str, Any]:
        """The ``config.json`` that :meth:`from_hf_dict` reads back as an equal config."""
        rope: dict[str, Any] = {"rope_type": self.rope.rope_type, "rope_theta": self.rope.theta}
        required, optional = ROPE_FIELDS[self.rope.rope_type]
        for name in sorted(required | optional):
            value = getattr(self.rope, name)
            if value is not None and (self.rope.rope_type != "default"):
                rope[name] = value
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": ARCHITECTURES[self.architecture],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "hidden_act": "silu",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
            "dtype": self.dtype,
        }
        if ARCHITECTURES[self.architecture] == "mistral":
            config["sliding_window"] = self.sliding_window
        if self.qkv_bias_only:
            config["qkv_bias_only"] = True
        return config


def rope_from_hf_dict(config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Read the rotary embedding of a ``config.json``.

    Args:
        config: the whole object; ``rope_parameters`` or ``rope_scaling`` and ``rope_theta`` are read.
        max_position_embeddings: what "yarn" scales from where no original length is given.

    Returns:
        The rotary settings.

    Raises:
        CheckpointError: two disagreeing sources, an unknown type, or a missing, unknown or ill-typed field.
    """
    given = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise CheckpointError(f"config.json: rope_parameters and rope_scaling are both given and differ: {given}")
    where, fields = next(iter(given.items()), ("rope_scaling", {}))
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"config.json: {where} must be an object or null, got {fields!r}")
    where = f"config.json: {where}"
    kinds = {str(fields[name]) for name in ("rope_type", "type") if fields.get(name) is not None}
    if len(kinds) > 1:
        raise CheckpointError(f"{where}: rope_type {fields['rope_type']!r} and type {fields['type']!r} differ")
    kind = next(iter(kinds), "default")
    if kind not in ROPE_FIELDS:
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported ({fields}); supported: {', '.join(ROPE_FIELDS)}")
    required, optional = ROPE_FIELDS[kind]
    neutral("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0), where)
    names = set(fields) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if names and not kinds:
        raise CheckpointError(f"{where}: the type (rope_type) is missing beside {sorted(names)}")
    if unknown := sorted(names - required - optional):
        supported = ", ".join(sorted(required | optional)) or "none"
        raise CheckpointError(
            f"{where}: unknown field {unknown[0]!r} = {fields[unknown[0]]!r} for type {kind!r}; known: {supported}"
        )
    original = fields.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    values = dict(fields) | ({"original_max_position_embeddings": original} if original is not None else {})
    if missing := sorted(name for name in required if values.get(name) is None):
        raise CheckpointError(f"{where}: field {missing[0]!r} is missing; type {kind!r} needs {', '.join(sorted(required))}")
    thetas = [source["rope_theta"] for source in (fields, config) if source.get("rope_theta") is not None]
    if len(set(thetas)) > 1:
        raise CheckpointError(f"{where}: rope_theta {thetas[0]!r} differs from the top-level rope_theta {thetas[1]!r}")
    theta = number({"rope_theta": thetas[0]} if thetas else {}, where, "rope_theta", 10000.0)
    if kind == "default":
        neutral("factor", fields.get("factor", 1.0), where)
        return RopeConfig(theta=theta)
    kwargs: dict[str, Any] = {
        name: number(values, where, name, None)
        for name in (required | optional) - {"original_max_position_embeddings", "truncate"}
        if values.get(name) is not None
    }
    if kwargs["factor"] < 1.0:
        raise CheckpointError(f"{where}: factor must be at least 1, got {kwargs['factor']}")
    if kind == "llama3" and kwargs["high_freq_factor"] <= kwargs["low_freq_factor"]:
        raise CheckpointError(f"{where}: high_freq_factor must be above low_freq_factor, got {dict(fields)}")
    if "original_max_position_embeddings" in required | optional and original is not None:
        kwargs["original_max_position_embeddings"] = size(values, "original_max_position_embeddings", where=where)
    elif kind == "yarn":
        kwargs["original_max_position_embeddings"] = max_position_embeddings
    if "truncate" in optional and values.get("truncate") is not None:
        kwargs["truncate"] = flag(values, "truncate", where)
    return RopeConfig(theta=theta, rope_type=kind, **kwargs)


def _sliding_window(config: Mapping[str, Any], mistral: bool) -> int | None:
    window = config.get("sliding_window", 4096 if mistral else None)
    if window is not None and not mistral:
        raise CheckpointError(
            f"config.json: sliding_window = {window!r} is not supported for LlamaForCausalLM; use MistralForCausalLM or null"
        )
    if window is not None:
        window = size({"sliding_window": window}, "sliding_window")
    kinds = set(config.get("layer_types") or [])
    if kinds and kinds != {"full_attention" if window is None else "sliding_attention"}:
        raise CheckpointError(
            f"config.json: layer_types {sorted(kinds)} with sliding_window {window!r} is not supported; all alike"
        )
    return window
