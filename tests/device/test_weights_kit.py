"""The test kit itself: the oracle equals transformers, scripted checkpoints do what their script says."""

import numpy as np
import pytest

from tests.kit.chain import chain_logits, successors, write_chain
from tests.kit.oracle import Oracle, inverse_frequencies
from tests.kit.tiny import tiny_config, write_tiny

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def test_llama3_inverse_frequencies_by_the_published_rule():
    for scaling in (LLAMA3, {"type" if k == "rope_type" else k: v for k, v in LLAMA3.items()}):
        found, factor = inverse_frequencies(tiny_config(rope_scaling=scaling), 40)
        np.testing.assert_allclose(found, [1, 0.01304226, 0.00125, 0.000125], rtol=1e-6)
        assert factor == 1.0


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
                          "mscale_all_dim": 0.5, "truncate": False}},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8, "num_key_value_heads": 1},
    ],
    ids=["biases", "llama3", "linear", "dynamic", "yarn", "window"],
)  # fmt: skip
def test_oracle_equals_transformers(tmp_path, overrides):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = write_tiny(tmp_path, **overrides)
    ids = np.random.default_rng(0).integers(0, 64, 40)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(Oracle(path).logits(ids.tolist()), expected, atol=1e-4)


def test_attention_decides_tinys_tokens(tmp_path):
    """Changing the first token of a prompt changes what follows: a wrong KV slot cannot go unnoticed."""
    oracle = Oracle(write_tiny(tmp_path))
    outputs = [oracle.greedy([first, 9, 17, 33, 5, 60], 8)[0] for first in (1, 2, 3, 4)]
    assert len({tuple(tokens) for tokens in outputs}) > 1


def test_chain_follows_its_script(tmp_path):
    oracle = Oracle(write_chain(tmp_path, successors([3, 4, 5, 6, 2], [9, 4]), nan_tokens=[8]))
    assert oracle.greedy([11, 3], 8, eos=[2])[0] == [4, 5, 6, 2]
    assert oracle.greedy([3, 9], 2)[0] == [4, 5]
    logits = oracle.logits([7, 8, 7, 3])
    assert np.isnan(logits[1]).all() and np.isfinite(logits[0]).all()
    np.testing.assert_allclose(logits[0], 0.0, atol=1e-5)
    with pytest.raises(ValueError, match="token 3 would need two successors: 4 and 5"):
        successors([3, 4], [3, 5])


def test_chain_logits_are_exactly_those_wanted(tmp_path):
    wanted = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) * 5
    logits = Oracle(write_chain(tmp_path, wanted)).logits([5, 63, 0])
    np.testing.assert_allclose(logits, wanted[[5, 63, 0]], atol=1e-4)
    assert chain_logits({1: 2}, 4)[1].tolist() == [0, 0, 20, 0]
