"""The model family's hyper-parameters, and the strict reading of Hugging Face ``config.json``.

Names follow ``transformers.LlamaConfig``. A field that would change the computation and is not supported is an error that
names it; a field that cannot change inference (dropout, initialisation, training bookkeeping) is listed and skipped.
"""

import dataclasses


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
