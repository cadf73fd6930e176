"""Sampling against plain numpy definitions: which tokens may be drawn, how often, and from whose noise."""

import jax
import numpy as np
import pytest

from jaxpaged.model.inputs import SamplingInputs
from jaxpaged.model.sampling import MAX_TOP, filter_logits, first_argmax, sample

WIDTH = 4


def inputs(rows: int, **fields) -> SamplingInputs:
    """Sampling inputs of ``rows`` equal rows unless a field says otherwise; flags follow from the fields."""
    values = {
        "token_index": np.zeros(rows, np.int32), "seed": np.zeros((rows, 2), np.uint32), "sample": np.zeros(rows, np.int32),
        "position": np.arange(rows, dtype=np.int32), "temperature": np.ones(rows, np.float32),
        "top_p": np.ones(rows, np.float32), "min_p": np.zeros(rows, np.float32), "top_k": np.zeros(rows, np.int32),
        "banned": np.full((rows, WIDTH), -1, np.int32),
    }  # fmt: skip
    for name, value in fields.items():
        values[name] = np.broadcast_to(np.asarray(value, values[name].dtype), values[name].shape).copy()
    filters = (values["top_k"] > 0).any() or (values["top_p"] < 1).any()
    flags = np.array([(values["temperature"] > 0).any(), filters, 1, 1], np.int32)
    return SamplingInputs(flags=flags, **values)


_jit_sample = jax.jit(sample, static_argnames="valid_vocab")
_jit_filter = jax.jit(filter_logits)
VOCAB, SIZES = 64, (1, 8, 4096)  # few shapes: compiling is what these tests wait for


def _pad(logits: np.ndarray, s: SamplingInputs) -> tuple[np.ndarray, SamplingInputs, int]:
    """Rows to the next of ``SIZES`` (copies of the first) and columns to ``VOCAB`` (-inf, so they change nothing)."""
    rows, vocab = logits.shape
    size = next(size for size in SIZES if size >= rows)
    wide = np.full((size, VOCAB), -np.inf, np.float32)
    wide[:, :vocab] = logits[0]
    wide[:rows, :vocab] = logits

    def more(array):
        return array if array.shape == (4,) and array is s.flags else np.concatenate([array, array[:1].repeat(size - rows, 0)])

    return wide, jax.tree.map(more, s), rows


def _sample(logits, s: SamplingInputs, **options):
    wide, s, rows = _pad(np.asarray(logits), s)
    return jax.tree.map(lambda x: np.asarray(x)[:rows], _jit_sample(wide, s, **options))


def _filter(logits, s: SamplingInputs) -> np.ndarray:
    count = np.shape(logits)[1]
    wide, s, rows = _pad(np.asarray(logits), s)
    return np.asarray(_jit_filter(wide, s))[:rows, :count]


def kept_top_k(logits: np.ndarray, k: int) -> set[int]:
    """Every token at least as likely as the k-th."""
    return set(np.flatnonzero(logits >= np.sort(logits)[::-1][k - 1])) if 0 < k < len(logits) else set(range(len(logits)))


def kept_top_p(logits: np.ndarray, p: float) -> set[int]:
    """The most likely tokens until their probability reaches p, with all that tie with the last one."""
    x = logits.astype(np.float64)
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    last = order[int(np.searchsorted(np.cumsum(probs[order]), p))] if p < 1 else order[-1]
    return set(np.flatnonzero(logits >= logits[last]))


def kept(logits: np.ndarray, **fields) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.asarray(_filter(logits[None], inputs(1, **fields))))[0]))


@pytest.mark.parametrize("seed", range(4))
def test_top_k_keeps_the_definition(seed: int):
    logits = np.random.default_rng(seed).normal(0, 3, 50).astype(np.float32)
    logits[10:14] = logits[10]  # ties
    for k in (1, 2, 5, 20, 49, 50, 51, 1000):  # the columns of padding (-inf) are never kept
        assert kept(logits, top_k=k) == kept_top_k(logits, k)


@pytest.mark.parametrize("seed", range(4))
def test_top_p_keeps_the_definition(seed: int):
    logits = np.random.default_rng(seed).normal(0, 3, 50).astype(np.float32)
    for p in (0.05, 0.3, 0.5, 0.9, 0.99, 0.99999):
        assert kept(logits, top_p=p) == kept_top_p(logits, p), p
    assert kept(logits, top_p=1.0) == set(range(50))


@pytest.mark.parametrize("p", [1e-45, 1e-50, 1e-10])
def test_a_tiny_top_p_keeps_the_best_token(p: float):
    """Also where float32 rounds ``top_p`` to zero."""
    logits = np.array([0.0, 3.0, 1.0, 2.0], np.float32)
    assert kept(logits, top_p=p) == {1}
    assert int(_sample(logits[None], inputs(1, top_p=p)).token_ids[0]) == 1


def test_ties_at_the_edge_are_kept_together():
    logits = np.array([2.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    assert kept(logits, top_k=2) == {0, 1, 2, 3} and kept(logits, top_k=1) == {0}
    assert kept(logits, top_p=0.5) == {0, 1, 2, 3}
    flat = np.zeros(8, np.float32)
    assert kept(flat, top_p=0.1) == set(range(8)) and kept(flat, top_k=3) == set(range(8))


def test_top_p_works_on_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Of the two left, the first has 4/7 = 0.571.
    assert kept(logits, top_k=2, top_p=0.57) == {0} and kept(logits, top_k=2, top_p=0.58) == {0, 1}


def test_minus_infinity_and_zeros_of_both_signs():
    logits = np.array([-np.inf, 0.0, -0.0, -np.inf, -5.0], np.float32)
    assert kept(logits, top_p=0.9) <= {1, 2} and kept(logits) == {1, 2, 4}
    got = _sample(np.tile(logits, (4096, 1)), inputs(4096))
    assert set(np.asarray(got.token_ids).tolist()) <= {1, 2, 4} and bool(got.finite.all())


def draws(logits: np.ndarray, count: int, **fields) -> np.ndarray:
    """``count`` draws from one row of logits, one position each."""
    return np.asarray(_sample(np.tile(logits, (count, 1)), inputs(count, **fields)).token_ids)


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.2, 1.0])
def test_min_p_set(min_p: float):
    logits = np.log(np.array([0.5, 0.3, 0.1, 0.06, 0.02, 0.02], np.float32))
    probs = np.exp(logits)
    allowed = set(np.flatnonzero(probs >= min_p * probs.max() * (1 - 1e-6)))
    assert set(draws(logits, 4096, min_p=min_p)) == allowed


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(temperature: float):
    """Chi-square of 4,096 draws against the softmax; the 99.99 % quantile for 7 degrees of freedom is 29.9."""
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5, 0.25, -0.5, 1.5], np.float32)
    x = logits.astype(np.float64) / temperature
    probs = np.exp(x) / np.exp(x).sum()
    count = 4096
    seen = np.bincount(draws(logits, count, temperature=temperature), minlength=8)
    assert ((seen - count * probs) ** 2 / (count * probs)).sum() < 29.9


def test_filtered_distribution_is_renormalised():
    """Top-k 3 of 5: only those three, in their own proportions (99.99 % quantile, 2 degrees of freedom: 18.4)."""
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05], np.float32))
    seen = np.bincount(draws(logits, 4096, top_k=3), minlength=5)
    assert seen[0] == seen[4] == 0
    want = 4096 * np.array([0.4, 0.2, 0.25]) / 0.85
    assert ((seen[[1, 2, 3]] - want) ** 2 / want).sum() < 18.4


def test_a_row_does_not_know_its_neighbours_or_its_place():
    """The same row at any place, among any others, in any batch size: the same token and the same log-probability."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 1, VOCAB).astype(np.float32)
    own = {"seed": (7, 9), "sample": 2, "position": 41, "temperature": 0.9, "top_p": 0.8}
    alone = _sample(logits[None], inputs(1, **own))
    for rows in (8, 4096):
        others = rng.normal(0, 5, (rows, VOCAB)).astype(np.float32)
        for place in {0, rows - 1, rows // 2}:
            values = inputs(rows, temperature=rng.choice([0.0, 1.5], rows), top_k=rng.integers(0, 9, rows))
            for name, value in own.items():
                getattr(values, name)[place] = value
            values.top_k[place], values.min_p[place] = 0, 0
            values.flags[:2] = 1
            others[place] = logits
            got = _sample(others, values)
            assert int(got.token_ids[place]) == int(alone.token_ids[0])
            assert float(got.logprobs[place]) == pytest.approx(float(alone.logprobs[0]), abs=1e-6)


def test_every_part_of_the_noise_key_matters():
    logits = np.zeros(64, np.float32)
    base = {"seed": (1, 2), "sample": 0, "position": 0}
    first = draws(logits, 1, **base)[0]
    for name, variants in {
        "seed": [(1, i) for i in range(3, 43)] + [(i, 2) for i in range(2, 42)],
        "sample": range(1, 41),
        "position": range(1, 41),
    }.items():
        seen = {int(draws(logits, 1, **(base | {name: value}))[0]) for value in variants}
        assert len(seen) > 15, name
    assert draws(logits, 1, **base)[0] == first


def test_greedy_rows_among_warm_ones_and_banned_tokens():
    """B22: the best token banned: the greedy row takes the next one; both rows finite, raw log-probabilities unchanged."""
    logits = np.array([[0.0, 5.0, 3.0, 1.0]] * 2, np.float32)
    values = inputs(2, temperature=[0.0, 1.0], banned=[[1, -1, -1, -1], [-1, -1, -1, -1]])
    got = _sample(logits, values)
    raw = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert int(got.token_ids[0]) == 2 and bool(got.finite.all())
    np.testing.assert_allclose(np.asarray(got.logprobs), raw[np.asarray(got.token_ids)], atol=1e-6)
    assert set(draws(logits[0], 256, banned=[[1, 2, -1, -1]])) == {0, 3}


@pytest.mark.parametrize("temperature", [1e-39, 1e-12, 1e-5, 1e-4, 1e-3])
def test_temperatures_just_above_zero(temperature: float):
    """B22: dividing by them overflows or leaves one token; always the best one, never NaN."""
    logits = np.arange(64, dtype=np.float32)
    for fields in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert set(draws(logits, 32, temperature=temperature, **fields)) == {63}, fields


def test_padded_vocabulary_is_never_drawn():
    logits = np.zeros((8, VOCAB), np.float32)
    logits[:, 60:] = 50.0
    seen: set[int] = set()
    for position in range(0, 800, 8):
        values = inputs(8, temperature=[0.0, *[1.0] * 7], position=np.arange(position, position + 8))
        seen |= set(_sample(logits, values, valid_vocab=60).token_ids.tolist())
    assert max(seen) < 60 and len(seen) > 40


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_told_apart(bad: float):
    logits = np.tile(np.arange(8, dtype=np.float32), (3, 1))
    logits[1, 3] = bad
    got = _sample(logits, inputs(3, temperature=[0.0, 1.0, 0.0]))
    assert np.asarray(got.finite).tolist() == [True, False, True]
    assert np.asarray(got.token_ids)[[0, 2]].tolist() == [7, 7]
    all_bad = _sample(np.full((2, 8), -np.inf, np.float32), inputs(2))
    assert not bool(all_bad.finite.any())


def test_top_logprobs_are_the_log_softmax_best_first():
    logits = np.random.default_rng(2).normal(0, 2, (3, VOCAB)).astype(np.float32)
    got = _sample(logits, inputs(3, temperature=0.0))
    x = logits.astype(np.float64)
    raw = x - np.log(np.exp(x).sum(-1, keepdims=True))
    assert got.top_ids.shape == (3, MAX_TOP) and MAX_TOP <= VOCAB
    for row in range(3):
        order = np.argsort(-raw[row])[:MAX_TOP]
        assert np.asarray(got.top_ids)[row].tolist() == order.tolist()
        np.testing.assert_allclose(np.asarray(got.top_logprobs)[row], raw[row, order], atol=1e-5)
    no_flag = inputs(3, temperature=0.0)
    no_flag.flags[2] = 0
    assert not np.asarray(_sample(logits, no_flag).top_ids).any()
    no_flag.flags[3] = 0
    quiet = _sample(logits, no_flag)
    assert not quiet.logprobs.any() and quiet.token_ids.tolist() == got.token_ids.tolist() and quiet.finite.all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_one_bad_logit_in_a_large_vocabulary_is_seen(bad: float):
    """Also where no token is drawn from it: XLA:CPU's maximum over so many values drops NaN."""
    for place in (0, 77, 49151):
        logits = np.random.default_rng(3).normal(0, 2, (2, 49152)).astype(np.float32)
        logits[0, place] = bad
        got = _jit_sample(logits, inputs(2, temperature=0.0))
        assert got.finite.tolist() == [False, True]


@pytest.mark.parametrize("vocab", [49152, 128256, 32000, 1000, 97, 64])
def test_the_first_of_equal_largest_logits_wins(vocab: int):
    """Whatever block the maximum is looked for in: ties across and inside blocks go to the first index, as in ``argmax``."""
    rng = np.random.default_rng(vocab)
    x = rng.integers(0, 5, (6, vocab)).astype(np.float32)
    x[1] = 7.0
    x[2] = -np.inf
    x[2, vocab - 1] = -3.0
    x[3, [vocab // 2, vocab - 1]] = 9.0
    x[4] = -np.inf
    assert jax.jit(first_argmax)(x).tolist() == np.argmax(x, axis=-1).tolist()
