"""Hugging Face directories, converted models, hub ids: what is loaded is what was written, and what is wrong is named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.param_names import model_params
from jaxpaged.weights import safetensors_io
from jaxpaged.weights.checkpoint import open_checkpoint
from jaxpaged.weights.orbax_io import save_orbax
from tests.kit import bytes_tokenizer as byt
from tests.kit.tiny import tiny_config, tiny_tensors, write_hf, write_tiny

VARIANTS = [
    {},
    {"attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": True, "num_key_value_heads": 4},
    {"head_dim": 16, "num_key_value_heads": 1, "hidden_size": 40},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8},
]


def params_of(path, dtype="float32") -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in open_checkpoint(str(path)).iter_params(dtype)}


def assert_same(got, wanted):
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, name
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(array), err_msg=name)


@pytest.mark.parametrize("overrides", VARIANTS)
def test_parameters_are_the_files_tensors_by_name(tmp_path, overrides):
    path = write_tiny(tmp_path, **overrides)
    raw = load_file(path / "model.safetensors")
    got = params_of(path)
    assert {name: array.shape for name, array in got.items()} == model_params(open_checkpoint(str(path)).config)
    n, k = (tiny_config(**overrides)[name] for name in ("num_attention_heads", "num_key_value_heads"))
    h = got["layers/0/o_proj"].shape[1] // n
    used = set()

    def same(part: np.ndarray, name: str):
        np.testing.assert_array_equal(part, raw[name], err_msg=name)
        used.add(name)

    same(got["embed_tokens"], "model.embed_tokens.weight")
    same(got["norm"], "model.norm.weight")
    if "lm_head" in got:
        same(got["lm_head"], "lm_head.weight")
    for i in range(2):
        ours, theirs = f"layers/{i}/", f"model.layers.{i}."
        for suffix, kind in (("proj", "weight"), ("bias", "bias")):
            if ours + f"qkv_{suffix}" in got:
                parts = np.split(got[ours + f"qkv_{suffix}"], [n * h, (n + k) * h])
                for part, x in zip(parts, "qkv", strict=True):
                    same(part, f"{theirs}self_attn.{x}_proj.{kind}")
                same(got[ours + f"o_{suffix}"], f"{theirs}self_attn.o_proj.{kind}")
            if ours + f"gate_up_{suffix}" in got:
                for part, x in zip(np.split(got[ours + f"gate_up_{suffix}"], 2), ("gate", "up"), strict=True):
                    same(part, f"{theirs}mlp.{x}_proj.{kind}")
                same(got[ours + f"down_{suffix}"], f"{theirs}mlp.down_proj.{kind}")
        same(got[ours + "input_norm"], theirs + "input_layernorm.weight")
        same(got[ours + "post_attention_norm"], theirs + "post_attention_layernorm.weight")
    assert used == set(raw)


def test_checkpoint_written_by_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "linear", "factor": 2.0,
        "rope_theta": 5e5},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.config.rope.rope_type, checkpoint.config.rope.factor, checkpoint.config.dtype) == (
        "linear",
        2.0,
        "bfloat16",
    )
    assert checkpoint.generation_config["eos_token_id"] == 2
    weights = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    got = params_of(tmp_path)
    qkv = [weights[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    np.testing.assert_array_equal(got["layers/1/qkv_proj"], np.concatenate(qkv))
    np.testing.assert_array_equal(got["layers/0/down_bias"], weights["model.layers.0.mlp.down_proj.bias"])
    np.testing.assert_array_equal(got["lm_head"], weights["lm_head.weight"])


@pytest.mark.parametrize("num_shards", [2, 5])
def test_sharded_equals_single(tmp_path, num_shards: int):
    write_tiny(tmp_path / "one", attention_bias=True)
    write_tiny(tmp_path / "many", attention_bias=True, num_shards=num_shards)
    assert_same(params_of(tmp_path / "many"), params_of(tmp_path / "one"))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, "float16", jax.numpy.bfloat16])
def test_dtype_conversions(tmp_path, stored: str, dtype):
    path = write_tiny(tmp_path, dtype=stored)
    raw = load_file(path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    got = params_of(path, dtype)["layers/0/down_proj"]
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got, raw.astype(np.dtype(dtype)))
    assert open_checkpoint(str(path)).config.dtype == stored


def test_unsupported_dtype_and_float16_overflow(tmp_path):
    path = write_tiny(tmp_path)
    with pytest.raises(CheckpointError, match="dtype 'int8' is not supported for parameters; supported: float32"):
        params_of(path, "int8")
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"][3] = 1e6
    write_hf(path, tiny_config(), tensors)
    with pytest.raises(CheckpointError, match="norm has values beyond float16's range; use bfloat16 or float32"):
        params_of(path, "float16")


def test_load_params_on_the_device(tmp_path):
    path = write_tiny(tmp_path)
    checkpoint = open_checkpoint(str(path))
    params = checkpoint.load_params("bfloat16", progress=True)
    assert all(isinstance(array, jax.Array) for array in params.values())
    assert_same(params, params_of(path, "bfloat16"))
    device = jax.devices()[0]
    place = {name: jax.sharding.SingleDeviceSharding(device) for name in params}
    assert_same(checkpoint.load_params("float32", shardings=place), params_of(path))
    shutil.rmtree(path)  # nothing on the CPU device may still read the file
    assert np.isfinite(np.asarray(params["embed_tokens"], np.float32)).all()


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxpaged.weights.checkpoint import open_checkpoint
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
for path in sys.argv[1:]:
    checkpoint = open_checkpoint(path)
    whole = {name: np.array(array) for name, array in checkpoint.iter_params("float32")}
    places = {name: NamedSharding(mesh, P("x") if name == "embed_tokens" else P(None, "x") if array.ndim == 2 else P())
              for name, array in whole.items()}
    params = checkpoint.load_params("float32", shardings=places)
    for name, array in whole.items():
        assert params[name].sharding == places[name], name
        np.testing.assert_array_equal(np.asarray(params[name]), array)
    assert params["embed_tokens"].addressable_shards[1].data.shape == (16, 32)
print("same")
"""


def test_load_straight_to_shardings(tmp_path):
    """Four host devices: Hugging Face and converted models both arrive split as asked."""
    path = write_tiny(tmp_path / "hf")
    converted = save_orbax(open_checkpoint(str(path)), tmp_path / "orbax")
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PATH": ""}
    command = [sys.executable, "-c", SHARDED, str(path), str(converted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and done.stdout == "same\n", done.stderr


def test_generation_config_and_all_end_tokens(tmp_path):
    """End tokens of model config, generation config and tokenizer are all honoured."""
    settings = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 7]}
    path = write_tiny(tmp_path, vocab_size=300, generation_config=settings)
    byt.write_bytes_tokenizer(path)
    checkpoint = open_checkpoint(str(path))
    tokenizer = checkpoint.tokenizer()
    assert checkpoint.generation_config == settings and checkpoint.config.eos_token_ids == (2, 7)
    assert tokenizer is not None and tokenizer.eos_token_ids == {2, 7, 257}
    assert checkpoint.tokenizer() is tokenizer
    assert tokenizer.vocab_size == byt.FIRST_PIECE + len(byt.PIECES) < checkpoint.config.vocab_size


def test_tokenizer_from_elsewhere_and_none(tmp_path):
    path = write_tiny(tmp_path / "m")
    assert open_checkpoint(str(path)).tokenizer() is None
    other = byt.write_bytes_tokenizer(tmp_path / "t")
    for place in (other, other / "tokenizer.json"):
        tokenizer = open_checkpoint(str(path), tokenizer=str(place)).tokenizer()
        assert tokenizer is not None and tokenizer.encode("a") == [256, 97]


def test_fingerprint(tmp_path):
    first = open_checkpoint(str(write_tiny(tmp_path / "a"))).fingerprint()
    assert len(first) == 64 and first == open_checkpoint(str(write_tiny(tmp_path / "b"))).fingerprint()
    assert first != open_checkpoint(str(write_tiny(tmp_path / "c", seed=1))).fingerprint()
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert first != open_checkpoint(str(tmp_path / "a")).fingerprint()


# -------------------------------------------------------------------------------------------------- damaged checkpoints


def rewrite(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_missing_extra_and_misshapen_tensors_are_named_with_shapes(tmp_path):
    path = write_tiny(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"

    def damage(tensors):
        del tensors["model.layers.0.self_attn.k_proj.weight"]
        tensors[name] = np.zeros((65, 32), np.float32)
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(8, np.float32)

    rewrite(path, damage)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(path))
    text = str(error.value)
    assert "3 tensor(s) do not match" in text
    assert "missing model.layers.0.self_attn.k_proj.weight [16, 32]" in text
    assert f"{name} has shape [65, 32], wanted [64, 32]" in text
    assert "unexpected model.layers.0.self_attn.q_norm.weight [8]" in text


def test_config_that_disagrees_with_the_tensors(tmp_path):
    path = write_tiny(tmp_path, attention_bias=True)
    (path / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(CheckpointError, match=r"8 tensor\(s\) .*unexpected model\.layers\.0\.self_attn\..*bias"):
        open_checkpoint(str(path))


def test_harmless_buffers_and_a_stored_copy_of_a_tied_head(tmp_path):
    path = write_tiny(tmp_path, tie_word_embeddings=True)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    rewrite(path, add)
    assert "lm_head" not in params_of(path)


@pytest.mark.parametrize("lost", [1, 1000])
def test_truncated_safetensors(tmp_path, lost: int):
    path = write_tiny(tmp_path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-lost])
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: truncated: {len(data) - lost} bytes, .* describes {len(data)}"
    ):
        open_checkpoint(str(path))


def test_file_that_shrinks_after_opening(tmp_path):
    path = write_tiny(tmp_path)
    checkpoint = open_checkpoint(str(path))
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="did it change since it was opened"):
        dict(checkpoint.iter_params("float32"))
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="did it change since it was opened"):
        dict(checkpoint.iter_params("float32"))


def test_damaged_safetensors(tmp_path):
    path = write_tiny(tmp_path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    for size in (0, 5, 100):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=rf"truncated: {size} bytes, but its header alone takes"):
            open_checkpoint(str(path))
    file.write_bytes(data + b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(str(path))
    file.write_bytes((10).to_bytes(8, "little") + b"not json.." + data)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_checkpoint(str(path))


def test_weights_of_a_type_that_is_not_read(tmp_path):
    path = write_tiny(tmp_path)
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": np.zeros(32, np.int8)}))
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight is stored as I8, which is not supported; supported: F64, F32"
    ):
        params_of(path)


def test_shards_and_index(tmp_path):
    path = write_tiny(tmp_path, num_shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 weight files are missing: model-00002-of-00003\.safetensors"):
        open_checkpoint(str(path))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-00001-of-00003.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lists x in model-00001-of-00003\.safetensors, where it is not"):
        open_checkpoint(str(path))
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        open_checkpoint(str(path))


def test_directories_without_a_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no safetensors weights found; pytorch_model\.bin is a pickle"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, got list"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"no such file or directory"):
        open_checkpoint(str(tmp_path / "nothing" / "here.gguf"))


def test_hub_id_offline_and_not_cached(tmp_path):
    code = "from jaxpaged.weights.checkpoint import open_checkpoint\nopen_checkpoint('some-owner/some-model')"
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert "CheckpointError: model 'some-owner/some-model': no such local path, it is not in the hub's cache" in done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr


def test_hub_id_in_the_cache_is_used_offline(tmp_path):
    """A cached snapshot is found without any connection."""
    snapshot = tmp_path / "hub" / "models--me--tiny" / "snapshots" / ("a" * 40)
    write_tiny(snapshot)
    (tmp_path / "hub" / "models--me--tiny" / "refs").mkdir()
    (tmp_path / "hub" / "models--me--tiny" / "refs" / "main").write_text("a" * 40)
    code = "from jaxpaged.weights.checkpoint import open_checkpoint\nprint(open_checkpoint('me/tiny').path)"
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.stdout.strip() == str(snapshot), done.stderr


# ---------------------------------------------------------------------------------------------------- converted models


@pytest.mark.parametrize("overrides", VARIANTS)
def test_converted_model_is_the_same(tmp_path, overrides):
    path = write_tiny(tmp_path / "src", generation_config={"top_k": 5}, **overrides)
    source = open_checkpoint(str(path))
    converted = open_checkpoint(str(save_orbax(source, tmp_path / "dst", "float32")))
    assert (converted.config, converted.generation_config) == (source.config, {"top_k": 5})
    shutil.rmtree(path)
    assert converted.tokenizer() is None
    loaded = converted.load_params("float32")
    assert not any(array.committed for array in loaded.values()), "committed arrays would compile every program again"
    assert_same({name: loaded[name] for name in model_params(source.config)}, params_of(tmp_path / "dst"))
    write_tiny(path, **overrides)
    assert_same(params_of(tmp_path / "dst"), params_of(path))


def test_conversion_keeps_the_tokenizer_and_changes_the_dtype(tmp_path):
    path = byt.write_bytes_tokenizer(write_tiny(tmp_path / "src", vocab_size=300))
    converted = open_checkpoint(str(save_orbax(open_checkpoint(str(path)), tmp_path / "dst", "bfloat16", progress=True)))
    assert converted.config.dtype == "bfloat16"
    message = [{"role": "user", "content": "é"}]
    before, after = open_checkpoint(str(path)).tokenizer(), converted.tokenizer()
    assert before is not None and after is not None
    assert after.apply_chat_template(message) == before.apply_chat_template(message)
    assert_same(params_of(tmp_path / "dst", "bfloat16"), params_of(path, "bfloat16"))


def test_a_conversion_cut_short_does_not_look_complete(tmp_path):
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "src")))
    done = save_orbax(checkpoint, tmp_path / "dst")
    (done / "jaxpaged.json").unlink()  # what is written last
    with pytest.raises(CheckpointError, match=r"an unfinished conversion \(no jaxpaged\.json\); convert the model again"):
        open_checkpoint(str(done))


def test_a_failing_conversion_leaves_nothing(tmp_path):
    path = write_tiny(tmp_path / "src")
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": np.full((64, 32), 1e9, np.float32)}))
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(CheckpointError, match="beyond float16"):
        save_orbax(checkpoint, tmp_path / "dst", "float16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_killed_conversion_can_be_repeated(tmp_path):
    """A leftover of a killed conversion is neither opened as a model nor in the way of the next try."""
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "src")))
    leftover = tmp_path / "dst.incomplete"
    (leftover / "params").mkdir(parents=True)
    (leftover / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(CheckpointError, match="an unfinished conversion"):
        open_checkpoint(str(leftover))
    save_orbax(checkpoint, tmp_path / "dst")
    assert not leftover.exists() and open_checkpoint(str(tmp_path / "dst")).config == checkpoint.config


def test_conversion_targets(tmp_path):
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "src")))
    with pytest.raises(ConfigError, match="src: exists already; give a new directory"):
        save_orbax(checkpoint, tmp_path / "src")
    (tmp_path / "empty").mkdir()
    save_orbax(checkpoint, tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_orbax(checkpoint, tmp_path / "file" / "dst")


def test_damaged_converted_models(tmp_path):
    done = save_orbax(open_checkpoint(str(write_tiny(tmp_path / "src"))), tmp_path / "dst")
    marker = json.loads((done / "jaxpaged.json").read_text())
    (done / "jaxpaged.json").write_text(json.dumps(marker | {"format": 99}))
    with pytest.raises(CheckpointError, match="converted with format 99; this version reads format 1"):
        open_checkpoint(str(done))
    marker["shapes"]["norm"] = [33]
    (done / "jaxpaged.json").write_text(json.dumps(marker))
    with pytest.raises(CheckpointError, match=r"1 parameter\(s\) do not match the config: norm is \(33,\), wanted \(32,\)"):
        open_checkpoint(str(done))
    marker["shapes"]["norm"] = [32]
    (done / "jaxpaged.json").write_text(json.dumps(marker))
    for file in (done / "params").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="cannot be restored"):
        open_checkpoint(str(done)).load_params("float32")


def test_row_chunks_do_not_change_anything(tmp_path, monkeypatch):
    path = write_tiny(tmp_path, dtype="bfloat16")
    expected = params_of(path)
    monkeypatch.setattr(safetensors_io, "CHUNK_BYTES", 100)
    assert_same(params_of(path), expected)
