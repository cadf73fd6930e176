"""GGUF files: every block format, the q/k row order, config from metadata, refusals."""

import math
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from jaxpaged.errors import CheckpointError
from jaxpaged.model_config import RopeConfig
from jaxpaged.weights import gguf_io
from jaxpaged.weights.checkpoint import open_checkpoint
from jaxpaged.weights.gguf_config import llama3_from_factors
from tests.kit import smollm2
from tests.kit.gguf_files import gguf_name, interleave, write_gguf
from tests.kit.oracle import inverse_frequencies
from tests.kit.tiny import tiny_config, tiny_tensors, write_hf

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 32}


def params_of(path, dtype="float32") -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in open_checkpoint(str(path)).iter_params(dtype)}


@pytest.mark.parametrize(
    "overrides", [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, {"num_key_value_heads": 1}]
)
def test_float32_gguf_equals_the_hugging_face_checkpoint(tmp_path, overrides):
    config = tiny_config(**overrides)
    tensors = tiny_tensors(config)
    write_hf(tmp_path / "hf", config, tensors)
    write_gguf(tmp_path / "m.gguf", config, tensors)
    expected, found = open_checkpoint(str(tmp_path / "hf")), open_checkpoint(str(tmp_path / "m.gguf"))
    assert found.config == expected.config
    got, wanted = params_of(tmp_path / "m.gguf"), params_of(tmp_path / "hf")
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_interleaving_is_what_llama_cpp_does():
    """Head of width 4: rows 0 1 2 3 are stored as 0 2 1 3, so that rotary pairs are neighbours."""
    np.testing.assert_array_equal(interleave(np.arange(8.0), 2), [0, 2, 1, 3, 4, 6, 5, 7])


@pytest.mark.parametrize(
    ("kind", "relative_error"),
    [
        (Q.F16, 5e-4), (Q.BF16, 5e-3), (Q.Q8_0, 0.01), (Q.Q5_0, 0.06), (Q.Q5_1, 0.05), (Q.Q4_0, 0.12), (Q.Q4_1, 0.1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_block_formats_that_can_be_written(tmp_path, kind: Q, relative_error: float, dtype: str):
    config = tiny_config(**WIDE)
    tensors = tiny_tensors(config)
    got = params_of(write_gguf(tmp_path / "m.gguf", config, tensors, kind=kind), dtype)

    def stored(name: str) -> np.ndarray:
        return gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind)

    layer = "model.layers.0."
    expected = {
        "embed_tokens": stored("model.embed_tokens.weight"),
        "layers/0/qkv_proj": np.concatenate([stored(f"{layer}self_attn.{x}_proj.weight") for x in "qkv"]),
        "layers/0/gate_up_proj": np.concatenate([stored(f"{layer}mlp.{x}_proj.weight") for x in ("gate", "up")]),
        "layers/0/down_proj": stored(f"{layer}mlp.down_proj.weight"),
        "lm_head": stored("lm_head.weight"),
    }
    for name, array in expected.items():
        assert got[name].dtype == np.dtype(dtype)
        np.testing.assert_array_equal(got[name], array.astype(np.dtype(dtype)), err_msg=name)
    original = tensors[f"{layer}mlp.down_proj.weight"]
    error = np.linalg.norm(expected["layers/0/down_proj"] - original) / np.linalg.norm(original)
    assert 0 < error < relative_error


def q4_k(block: bytes) -> np.ndarray:
    """One block of 256: two float16 scales, eight 6-bit (scale, minimum) pairs in 12 bytes, 128 bytes of nibbles."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float32)
    s, nibbles = block[4:16], block[16:144]
    values = []
    for i in range(8):
        if i < 4:
            scale, minimum = s[i] & 63, s[i + 4] & 63
        else:
            scale = (s[i + 4] & 15) | (s[i - 4] >> 6 << 4)
            minimum = (s[i + 4] >> 4) | (s[i] >> 6 << 4)
        part = nibbles[32 * (i // 2) : 32 * (i // 2) + 32]
        quants = [(b >> 4) if i % 2 else (b & 15) for b in part]
        values += [np.float32(d * scale) * q - np.float32(dmin * minimum) for q in quants]
    return np.array(values, np.float32)


def q6_k(block: bytes) -> np.ndarray:
    """One block of 256: low nibbles (128 bytes), high bit pairs (64), 16 signed scales, one float16 scale."""
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    d = np.frombuffer(block[208:], np.float16).astype(np.float32)[0]
    values = np.empty(256, np.float32)
    for half in range(2):
        for i in range(32):
            pairs = high[32 * half + i]
            for part in range(4):
                byte = low[64 * half + 32 * (part % 2) + i]
                quant = ((byte >> 4 if part > 1 else byte & 15) | (pairs >> 2 * part & 3) << 4) - 32
                values[128 * half + 32 * part + i] = d * scales[8 * half + 2 * part + i // 16] * quant
    return values


_SCALE_BYTES = {Q.Q2_K: (80, 84), Q.Q3_K: (108, 110), Q.Q4_K: (0, 4), Q.Q5_K: (0, 4), Q.Q6_K: (208, 210)}


@pytest.mark.parametrize("kind", list(_SCALE_BYTES))
def test_k_quants(tmp_path, kind: Q):
    """Random blocks: every row lands where it belongs; two formats also checked against the format's definition."""
    config = tiny_config(**WIDE)
    tensors, rng = tiny_tensors(config), np.random.default_rng(0)
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    raw = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            blocks = rng.integers(0, 256, (tensor.shape[0], block_bytes), dtype=np.uint8)
            begin, end = _SCALE_BYTES[kind]
            scales = rng.uniform(0.001, 0.01, (tensor.shape[0], (end - begin) // 2)).astype(np.float16)
            blocks[:, begin:end] = scales.view(np.uint8)
            raw[gguf_name(name)] = (blocks, kind)
    got = params_of(write_gguf(tmp_path / "m.gguf", config, tensors, raw=raw))
    whole = {name: gguf.quants.dequantize(blocks, kind) for name, (blocks, _) in raw.items()}
    np.testing.assert_array_equal(got["layers/0/down_proj"], whole["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(got["embed_tokens"], whole["token_embd.weight"])
    q, k, v = np.split(got["layers/0/qkv_proj"], [256, 384])
    np.testing.assert_array_equal(interleave(q, 4), whole["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(interleave(k, 2), whole["blk.0.attn_k.weight"])
    np.testing.assert_array_equal(v, whole["blk.0.attn_v.weight"])
    if reference := {Q.Q4_K: q4_k, Q.Q6_K: q6_k}.get(kind):
        expected = np.stack([reference(row.tobytes()) for row in raw["blk.0.ffn_down.weight"][0]])
        np.testing.assert_allclose(got["layers/0/down_proj"], expected, rtol=1e-6, atol=1e-6)


def test_chunks_do_not_change_anything(tmp_path, monkeypatch):
    config = tiny_config(**WIDE)
    path = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config), kind=Q.Q8_0)
    expected = params_of(path)
    for elements in (1, 700, 20_000):
        monkeypatch.setattr(gguf_io, "CHUNK_ELEMENTS", elements)
        for name, array in params_of(path).items():
            np.testing.assert_array_equal(array, expected[name])


def test_float_tensors_are_views_of_the_file(tmp_path):
    config = tiny_config()
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config))))
    params = dict(checkpoint.iter_params("float32"))
    assert isinstance(params["embed_tokens"], np.memmap) and not params["embed_tokens"].flags.writeable
    owned = dict(checkpoint.iter_params("float32", owned=True))
    assert not any(isinstance(array, np.memmap) for array in owned.values())
    assert all(array.ctypes.data % 64 == 0 and array.flags.c_contiguous for array in owned.values())


# ----------------------------------------------------------------------------------------------------------- metadata


def written(tmp_path, *, extra_tensors=None, architecture="llama", drop=(), **metadata):
    config = tiny_config()
    tensors = {name: tensor for name, tensor in tiny_tensors(config).items() if name not in drop}
    path = tmp_path / "m.gguf"
    write_gguf(path, config, tensors, metadata=metadata, extra_tensors=extra_tensors, architecture=architecture)
    return open_checkpoint(str(path))


def meta(**fields):
    return {f"llama.{name.replace('__', '.')}": value for name, value in fields.items()}


def test_rope_scaling_fields(tmp_path):
    linear = meta(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert written(tmp_path, **linear).config.rope == RopeConfig(10000.0, "linear", 4.0)
    assert written(tmp_path, **meta(rope__scale_linear=4.0)).config.rope == RopeConfig(10000.0, "linear", 4.0)
    assert written(tmp_path, **meta(rope__scaling__type="none")).config.rope == RopeConfig(10000.0)
    yarn = meta(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=64)
    assert written(tmp_path, **yarn).config.rope == RopeConfig(10000.0, "yarn", 4.0, 64)
    rope = written(tmp_path, **yarn, **meta(rope__scaling__attn_factor=0.5)).config.rope
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    with pytest.raises(
        CheckpointError, match=r"rope\.scaling\.type 'longrope' is not supported; supported: none, linear, yarn"
    ):
        written(tmp_path, **meta(rope__scaling__type="longrope"))


@pytest.mark.parametrize(
    ("low", "high", "original", "theta"), [(1.0, 4.0, 8192, 5e5), (1.0, 4.0, 64, 1e4), (2.0, 3.0, 512, 1e4)]
)
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_the_factors_tensor(low, high, original, theta, factor):
    """A GGUF file keeps only the divisor of each frequency; the recovered settings give the same frequencies."""
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    config = tiny_config(head_dim=64, rope_theta=theta, rope_scaling=scaling)
    scaled, _ = inverse_frequencies(config, 1)
    plain, _ = inverse_frequencies(config | {"rope_scaling": None}, 1)
    rope = llama3_from_factors((plain / scaled).astype(np.float32), theta, "m.gguf")
    assert (rope.rope_type, rope.factor, rope.theta) == ("llama3", factor, theta)
    again = scaling | {
        "low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }  # fmt: skip
    np.testing.assert_allclose(inverse_frequencies(config | {"rope_scaling": again}, 1)[0], scaled, rtol=1e-5)
    if original == 8192:
        assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings) == (1.0, 4.0, 8192)


def test_rope_factors_tensor_in_a_file(tmp_path):
    ones = written(tmp_path, extra_tensors={"rope_freqs.weight": np.ones(4)})
    assert ones.config.rope == RopeConfig(10000.0)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight does not follow the llama3 rotary scaling"):
        written(tmp_path, extra_tensors={"rope_freqs.weight": np.array([1.0, 8.0, 1.0, 3.0])})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has shape \[3\], wanted \[4\]"):
        written(tmp_path, extra_tensors={"rope_freqs.weight": np.ones(3)})


def test_other_fields(tmp_path):
    config = written(tmp_path, **{"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.padding_token_id": 0}).config
    assert (config.eos_token_ids, config.pad_token_id, config.dtype) == ((2, 9), 0, "float32")
    config = written(tmp_path, **meta(attention__sliding_window=7)).config
    assert (config.sliding_window, config.architecture) == (7, "MistralForCausalLM")
    assert written(tmp_path, **meta(attention__head_count=[4, 4], expert_count=0)).config.num_heads == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (meta(attention__head_count=[4, 2]), r"attention\.head_count differs between layers"),
        (meta(rope__dimension_count=4), r"rope\.dimension_count 4 differs from the head width 8"),
        (meta(expert_count=8), r"llama\.expert_count = 8 is not supported"),
        (meta(logit_scale=2.0), r"llama\.logit_scale = 2.0 is not supported"),
        (meta(something_new=1), r"llama\.something_new = 1 is not supported"),
        (meta(block_count=None), r"llama\.block_count is missing"),
        (meta(block_count=3), r"missing blk\.2\.attn_norm\.weight \[32\]"),
        (meta(feed_forward_length=48), r"ffn_gate\.weight has shape \[64, 32\], wanted \[48, 32\]"),
        (meta(block_count=1), r"unexpected blk\.1\."),
    ],
)
def test_refused_metadata(tmp_path, fields, message: str):
    with pytest.raises(CheckpointError, match=message):
        written(tmp_path, **fields)


def test_refused_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"general\.architecture 'qwen2' is not supported; supported: 'llama'"):
        written(tmp_path, architecture="qwen2")
    with pytest.raises(
        CheckpointError, match=r"tensor\(s\) do not match the config: missing blk\.1\.attn_q\.weight \[32, 32\]"
    ):
        written(tmp_path, drop=["model.layers.1.self_attn.q_proj.weight"])
    with pytest.raises(CheckpointError, match=r"unexpected blk\.0\.attn_q_norm\.weight \[8\]"):
        written(tmp_path, extra_tensors={"blk.0.attn_q_norm.weight": np.ones(8)})
    written(tmp_path, extra_tensors={"blk.0.attn_rot_embd.weight": np.ones(4)})  # a table without weights: harmless
    config = tiny_config(**WIDE)
    raw = {"token_embd.weight": (np.zeros((32, 66), np.uint8), Q.IQ2_XXS)}
    write_gguf(tmp_path / "iq.gguf", config, tiny_tensors(config), raw=raw)
    with pytest.raises(
        CheckpointError, match=r"token_embd\.weight is stored as IQ2_XXS, which is not supported; supported: F32"
    ):
        open_checkpoint(str(tmp_path / "iq.gguf"))


def test_truncated_and_foreign_files(tmp_path):
    config = tiny_config()
    data = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config)).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[:-1000])
    with pytest.raises(CheckpointError, match=rf"cut\.gguf: truncated: {len(data) - 1000} bytes, but its tensors .* need \d+"):
        open_checkpoint(str(cut))
    for size in (300, 900, 40, 10):
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=rf"truncated.*{size} bytes"):
            open_checkpoint(str(cut))
    cut.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"not a GGUF file: it starts with b'PK"):
        open_checkpoint(str(cut))
    cut.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF version 1 is not supported; supported: 2, 3"):
        open_checkpoint(str(cut))


def test_split_model(tmp_path):
    config = tiny_config()
    tensors = tiny_tensors(config)
    names = list(tensors)
    for i, group in enumerate((names[:9], names[9:])):
        split = {"split.count": 2, "split.no": i}
        part = {name: tensors[name] for name in group}
        write_gguf(tmp_path / f"m-{i + 1:05d}-of-00002.gguf", config, part, metadata=split)
    whole = params_of(write_gguf(tmp_path / "m.gguf", config, tensors))
    for name, array in params_of(tmp_path / "m-00001-of-00002.gguf").items():
        np.testing.assert_array_equal(array, whole[name])
    with pytest.raises(CheckpointError, match="give the first one"):
        open_checkpoint(str(tmp_path / "m-00002-of-00002.gguf"))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf: missing; the model is split over 2 files"):
        open_checkpoint(str(tmp_path / "m-00001-of-00002.gguf"))


def test_demo_model():
    checkpoint = open_checkpoint(str(smollm2.gguf_path()))
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.rope, config.rms_norm_eps, config.tie_word_embeddings) == (RopeConfig(100000.0), 1e-5, True)
    count = sum(array.size for _, array in checkpoint.iter_params(ml_dtypes.bfloat16))
    assert count == 134_515_008
