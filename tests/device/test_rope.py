"""Rotary frequencies by hand-computed values, and rotation itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.model.rope import apply_rope, inverse_frequencies, rope_tables
from jaxpaged.model_config import ModelConfig
from tests.kit.oracle import inverse_frequencies as oracle_frequencies
from tests.kit.tiny import tiny_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def frequencies(**overrides) -> np.ndarray:
    return inverse_frequencies(ModelConfig.from_hf_dict(tiny_config(**overrides)).rope, 8)[0]


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_values(key: str):
    """B49: the scaling is read under both of its names; head_dim 8, base 10000."""
    got = frequencies(rope_scaling={key: "llama3", **LLAMA3})
    np.testing.assert_allclose(got, [1.0, 0.01304226, 0.00125, 0.000125], rtol=1e-6)


def test_linear_divides_all():
    np.testing.assert_allclose(frequencies(rope_scaling={"type": "linear", "factor": 4.0}), frequencies() / 4, rtol=1e-6)


def test_an_unknown_type_is_named():
    with pytest.raises(CheckpointError, match="rope type 'longrope2' is not supported"):
        frequencies(rope_scaling={"type": "longrope2", "factor": 4.0})


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.5},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
)
def test_against_the_oracle(scaling: dict | None):
    """Cosines and sines of the model equal those from the oracle's float64 frequencies, below and beyond the limit."""
    raw = tiny_config(rope_scaling=scaling, max_position_embeddings=32)
    config = ModelConfig.from_hf_dict(raw)
    for length in (20, 200):
        positions = np.arange(length, dtype=np.int32)
        lengths = np.full(length, length, np.int32) if scaling and scaling["rope_type"] == "dynamic" else None
        cos, sin = rope_tables(config, jnp.asarray(positions), None if lengths is None else jnp.asarray(lengths))
        freq, factor = oracle_frequencies(raw, length)
        angles = positions[:, None] * freq[None]
        np.testing.assert_allclose(np.asarray(cos)[:, 0], np.cos(angles) * factor, atol=3e-5)
        np.testing.assert_allclose(np.asarray(sin)[:, 0], np.sin(angles) * factor, atol=3e-5)


def test_rotation_pairs_halves_and_keeps_lengths():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 8)).astype(np.float32)
    config = ModelConfig.from_hf_dict(tiny_config())
    cos, sin = rope_tables(config, jnp.arange(5), None)
    got = np.asarray(apply_rope(jnp.asarray(x), cos, sin))
    z = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * np.arange(5)[:, None, None] * frequencies()[None, None])
    np.testing.assert_allclose(got[..., :4], z.real, atol=1e-5)
    np.testing.assert_allclose(got[..., 4:], z.imag, atol=1e-5)


def test_only_the_distance_matters():
    """The product of a rotated query and a rotated key depends on the difference of their positions alone."""
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, 1, 8)).astype(np.float32)
    config = ModelConfig.from_hf_dict(tiny_config())

    def score(a: int, b: int) -> float:
        rows = [np.asarray(apply_rope(jnp.asarray(x), *rope_tables(config, jnp.array([p]), None))) for x, p in ((q, a), (k, b))]
        return float((rows[0] * rows[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 8)) > 1e-3
