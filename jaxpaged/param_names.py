"""The canonical parameter names and shapes of a model: the contract between ``model`` and ``weights``.

One flat mapping, path -> shape. Matrices are stored ``[out, in]``, as in Hugging Face checkpoints. Per layer the q, k and
v projections are one matrix (rows: all q heads, all k heads, all v heads), and gate and up are one matrix.
"""

from jaxpaged.model_config import ModelConfig


def layer_params(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of one layer's parameters, without the ``layers/<i>/`` prefix."""
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    params: dict[str, tuple[int, ...]] = {
        "input_norm": (d,),
        "qkv_proj": (q + 2 * kv, d),
        "o_proj": (d, q),
        "post_attention_norm": (d,),
        "gate_up_proj": (2 * f, d),
        "down_proj": (d, f),
    }
    if config.attention_bias:
        params["qkv_bias"] = (q + 2 * kv,)
        if not config.qkv_bias_only:
            params["o_bias"] = (d,)
    if config.mlp_bias:
        params["gate_up_bias"] = (2 * f,)
        params["down_bias"] = (d,)
    return params


def model_params(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Path -> shape of every parameter: ``embed_tokens [V, D]``, ``layers/<i>/<name>``, ``norm [D]``, ``lm_head [V, D]``
    (absent where tied)."""
    params: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_layers):
        params |= {f"layers/{i}/{name}": shape for name, shape in layer_params(config).items()}
    params["norm"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        params["lm_head"] = (config.vocab_size, config.hidden_size)
    return params
