"""The model against ``transformers`` (torch, CPU) on random weights: float32 logits within 1e-4, whole and in chunks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.engines import engine_for, greedy, logprobs, run, tokens
from tests.kit.forward import Forward
from tests.kit.tiny import write_mistral, write_tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LENGTH = 60
HEADS = [(4, 4), (6, 2), (8, 1)]  # GQA ratios 1, 3, 8
DIMS = [16, 64, 80, 128]
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 24},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
        "rope_theta": 500.0,
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}},
    "yarn with everything": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 16.0, "beta_slow": 2.0,
            "attention_factor": 1.3,
        },
    },
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "all biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "head_dim of its own": {"head_dim": 24},
    "wide epsilon": {"rms_norm_eps": 0.1},
}


def reference(directory: Path):
    """The same checkpoint in ``transformers``, fresh: with dynamic scaling it remembers the longest length it has seen."""
    torch.set_num_threads(2)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def check(directory: Path, *, scan_layers: bool = False) -> None:
    ids = np.random.default_rng(0).integers(0, 64, LENGTH).tolist()
    with torch.no_grad():
        want = reference(directory)(torch.tensor([ids])).logits[0].numpy()
    model = Forward(directory, scan_layers=scan_layers)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(model.logits(ids), want, atol=1e-4)
    np.testing.assert_allclose(model.logits(ids, [23, 1, 1, 2, 32, 1]), want, atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "dim"),
    [
        pytest.param(h, d, marks=[] if i == j or (i, j) == (2, 3) else pytest.mark.long)
        for i, h in enumerate(HEADS)
        for j, d in enumerate(DIMS)
    ],
)
def test_heads_and_widths(tmp_path: Path, heads: tuple[int, int], dim: int):
    check(write_tiny(tmp_path, hidden_size=48, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=dim))


@pytest.mark.parametrize("name", ROPES)
def test_rotary_scalings_beyond_the_original_length(tmp_path: Path, name: str):
    check(write_tiny(tmp_path, **ROPES[name]))


@pytest.mark.parametrize("name", [n if n.startswith("all") else pytest.param(n, marks=pytest.mark.long) for n in VARIANTS])
def test_variants(tmp_path: Path, name: str):
    check(write_tiny(tmp_path, **VARIANTS[name]))


def test_layers_scanned_instead_of_unrolled(tmp_path: Path):
    check(write_tiny(tmp_path, num_hidden_layers=3), scan_layers=True)


@pytest.mark.parametrize("window", [7, pytest.param(4, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.long)])
def test_mistral_sliding_window(tmp_path: Path, window: int):
    check(write_mistral(tmp_path, window=window))


@pytest.mark.parametrize(
    "name", ["dynamic", pytest.param("llama3", marks=pytest.mark.long), pytest.param("yarn", marks=pytest.mark.long)]
)
def test_decoding_across_the_original_length(tmp_path: Path, name: str):
    """Greedy generation from below the original length to far beyond it, in the engine and in ``transformers``."""
    directory = write_tiny(tmp_path, **ROPES[name])
    for length in (5, 30):
        model = reference(directory)
        prompt = np.random.default_rng(length).integers(3, 64, length).tolist()
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=30, eos_token_id=None, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        want = out.sequences[0, length:].tolist()
        values = [float(torch.log_softmax(row[0], -1)[token]) for row, token in zip(out.logits, want, strict=True)]
        engine = engine_for(directory)
        for _ in range(2):  # the second run hits the first one's pages
            got = run(engine, [prompt], greedy(30))[0]
            assert tokens(got) == want
            np.testing.assert_allclose(logprobs(got), values, atol=1e-4)


def test_dynamic_scaling_never_shares_pages_rotated_for_another_length(tmp_path: Path):
    """Beginnings of prompts beyond the original length are rotated for the whole prompt: two lengths share nothing."""
    directory = write_tiny(tmp_path, **ROPES["dynamic"])
    engine = engine_for(directory)
    ids = np.random.default_rng(1).integers(3, 64, 50).tolist()
    for length in (50, 40, 20, 50, 40):
        got = run(engine, [ids[:length]], greedy(8))[0]
        model = reference(directory)
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids[:length]]), do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0
            )
        assert tokens(got) == out[0, length:].tolist()
