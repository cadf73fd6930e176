"""Reading Hugging Face configs: every supported field, every refusal by name."""

import dataclasses
import json

import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.model_config import ModelConfig, RopeConfig
from tests.kit.tiny import tiny_config

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def read(**overrides) -> ModelConfig:
    return ModelConfig.from_hf_dict(tiny_config(**overrides))


def without(*names: str, **overrides) -> ModelConfig:
    return ModelConfig.from_hf_dict({k: v for k, v in tiny_config(**overrides).items() if k not in names})


def test_sizes_and_flags():
    config = read(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, pad_token_id=5)
    assert config == ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
        bos_token_id=1, eos_token_ids=(2,), pad_token_id=5, dtype="float32",
    )  # fmt: skip


def test_defaults_where_fields_are_absent():
    config = without("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings", "torch_dtype")
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert (config.rope, config.max_position_embeddings, config.dtype) == (RopeConfig(theta=10000.0), 2048, "bfloat16")
    assert read(num_key_value_heads=None, head_dim=None).num_kv_heads == 4
    assert read(head_dim=16).head_dim == 16


@pytest.mark.parametrize(("eos", "expected"), [(2, (2,)), ([2, 7, 2], (2, 7)), (None, ()), ([], ()), (-1, ())])
def test_end_tokens(eos, expected):
    assert read(eos_token_id=eos).eos_token_ids == expected


def test_mistral():
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config = read(**mistral, sliding_window=8)
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", 8)
    assert read(**mistral, sliding_window=None).sliding_window is None
    assert read(**mistral).sliding_window == 4096  # the library's default
    assert without("num_key_value_heads", **mistral, num_attention_heads=8, head_dim=4).num_kv_heads == 8
    with pytest.raises(CheckpointError, match="sliding_window = 8 is not supported for LlamaForCausalLM"):
        read(sliding_window=8)
    with pytest.raises(CheckpointError, match="layer_types"):
        read(**mistral, sliding_window=8, layer_types=["full_attention", "sliding_attention"])
    assert read(layer_types=["full_attention"] * 2).sliding_window is None


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_both_spellings_of_rope_scaling(key: str, name: str):
    """A scaling written under the other of its two names is never ignored."""
    scaling = {name if k == "rope_type" else k: v for k, v in LLAMA3.items()}
    rope = read(**{"rope_scaling": None, key: scaling}).rope
    assert rope == RopeConfig(10000.0, "llama3", 8.0, 64, 1.0, 4.0)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, RopeConfig(10000.0)),
        ({"rope_type": "default"}, RopeConfig(10000.0)),
        ({"type": "linear", "factor": 2}, RopeConfig(10000.0, "linear", 2.0)),
        ({"type": "dynamic", "factor": 2.5}, RopeConfig(10000.0, "dynamic", 2.5)),
        (LLAMA3 | {"low_freq_factor": 2, "high_freq_factor": 3}, RopeConfig(10000.0, "llama3", 8.0, 64, 2.0, 3.0)),
        ({"type": "yarn", "factor": 4.0}, RopeConfig(10000.0, "yarn", 4.0, 256)),
        (
            {
                "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.5,
                "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False,
            },
            RopeConfig(10000.0, "yarn", 4.0, 32, 1.0, 4.0, 1.5, 16.0, 2.0, 0.7, 0.9, False),
        ),
    ],
)  # fmt: skip
def test_every_rope_field(scaling, expected):
    assert read(rope_scaling=scaling).rope == expected


def test_rope_theta_from_either_place():
    assert read(rope_theta=5e5).rope.theta == 5e5
    assert without("rope_theta", rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).rope.theta == 5e5
    with pytest.raises(CheckpointError, match=r"rope_theta 500000.0 differs from the top-level rope_theta 10000.0"):
        read(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    with pytest.raises(CheckpointError, match="both given and differ"):
        read(rope_parameters=LLAMA3, rope_scaling={"type": "linear", "factor": 2})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "longrope", "factor": 2}, "rope type 'longrope' is not supported .*default, linear, dynamic, llama3, yarn"),
        ({"type": "linear"}, "field 'factor' is missing"),
        ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, "field 'low_freq_factor' is missing"),
        ({"type": "linear", "factor": 0.5}, "factor must be at least 1, got 0.5"),
        ({"type": "linear", "factor": "2"}, "factor must be a positive number, got '2'"),
        ({"type": "linear", "factor": 2, "fast": 1}, "unknown field 'fast' = 1 for type 'linear'; known: factor"),
        ({"factor": 2}, "the type .* is missing beside"),
        ({"type": "default", "factor": 2}, "factor = 2 is not supported"),
        ({"type": "linear", "rope_type": "yarn", "factor": 2}, "'yarn' and type 'linear' differ"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor must be above low_freq_factor"),
        ({"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("linear", "must be an object or null, got 'linear'"),
    ],
)
def test_rope_refusals(scaling, message: str):
    with pytest.raises(CheckpointError, match=message):
        read(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures \['GPT2LMHeadModel'\] is not supported; supported: Llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "qwen2"}, "'qwen2'"),
        ({"model_type": "mistral"}, "model_type 'mistral' does not belong to architecture 'LlamaForCausalLM'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*gptq.* is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"residual_multiplier": 0.2}, "unknown field 'residual_multiplier' = 0.2"),
        ({"num_kv_heads": 2}, r"unknown field 'num_kv_heads' = 2 \(did you mean"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim must be even .*, got 7"),
        ({"head_dim": None, "hidden_size": 30}, "hidden_size 30 is not a multiple of num_attention_heads 4"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, got -1"),
        ({"mlp_bias": "no"}, "mlp_bias must be true or false, got 'no'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id, .* got '</s>'"),
        ({"bos_token_id": [1, 2]}, "bos_token_id must be one token id or null"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not supported; supported: float32, bfloat16, float16"),
    ],
)
def test_refusals_name_field_and_value(overrides, message: str):
    with pytest.raises(CheckpointError, match=message):
        read(**overrides)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_required_fields(name: str):
    with pytest.raises(CheckpointError, match=f"{name} must be a positive integer, got None"):
        without(name)


def test_harmless_fields_are_skipped():
    extra = {
        "pretraining_tp": 2, "attention_dropout": 0.1, "initializer_range": 0.02, "use_cache": False, "_name_or_path": "x",
        "transformers_version": "4.31", "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {},
        "max_sequence_length": 2048, "tokenizer_class": "X", "quantization_config": None,
    }  # fmt: skip
    assert read(**extra) == read()


def test_what_transformers_writes_is_read():
    transformers = pytest.importorskip("transformers")
    full = json.loads(transformers.LlamaConfig(rope_parameters={"rope_theta": 5e5, **LLAMA3}).to_json_string(use_diff=False))
    config = ModelConfig.from_hf_dict(full)
    assert config.rope == RopeConfig(5e5, "llama3", 8.0, 64, 1.0, 4.0) and config.intermediate_size == 11008
    assert ModelConfig.from_hf_dict(json.loads(transformers.LlamaConfig().to_json_string())).vocab_size == 32000
    mistral = ModelConfig.from_hf_dict(json.loads(transformers.MistralConfig().to_json_string(use_diff=False)))
    assert (mistral.sliding_window, mistral.num_kv_heads) == (4096, 8)


@pytest.mark.parametrize(
    "scaling",
    [None, LLAMA3, {"type": "linear", "factor": 2}, {"type": "yarn", "factor": 2, "mscale": 0.5, "truncate": False}],
)
def test_round_trip(scaling):
    config = read(rope_scaling=scaling, eos_token_id=[2, 7], mlp_bias=True)
    assert ModelConfig.from_hf_dict(json.loads(json.dumps(config.to_hf_dict()))) == config
    partly = dataclasses.replace(config, attention_bias=True, qkv_bias_only=True)
    assert ModelConfig.from_hf_dict(partly.to_hf_dict()) == partly
    window = dataclasses.replace(config, architecture="MistralForCausalLM", sliding_window=9)
    assert ModelConfig.from_hf_dict(window.to_hf_dict()) == window


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "per_token_bytes"),
    [(40, 40, 128, 819_200), (64, 72, 128, 2_359_296), (96, 96, 128, 4_718_592), (80, 8, 128, 327_680)],
    ids=["OPT-13B", "OPT-66B", "OPT-175B", "Llama-3.1-70B"],
)
def test_kv_bytes_per_token_match_the_published_figures(layers: int, kv_heads: int, head_dim: int, per_token_bytes: int):
    """16-bit KV of four known models, to the byte; 8-bit takes exactly half."""
    config = dataclasses.replace(read(), num_layers=layers, num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    assert config.kv_bytes_per_token(2) == per_token_bytes
    assert config.kv_bytes_per_token(1) * 2 == per_token_bytes
