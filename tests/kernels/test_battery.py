"""One battery for every implementation of paged attention, against the float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.cases import AXES, Case

# Programs per implementation: in the default run, and in all. Each is run on up to eleven mixes of rows.
COUNTS = {"xla": (18, 160), "triton": (10, 60), "mosaic_tpu": (6, 30)}
MOST_MIXES = {"mosaic_tpu": (3, 5)}  # likewise: a mix costs a TPU interpreter a second


def runs_on(implementation: str):
    """Which cases to draw: supported ones, and small pools for interpreted kernels (each program of a grid copies the pool)."""
    most = 2**30 if implementation == "xla" else 2**21
    target = cases.TARGET[implementation]
    return lambda case: case.spec.num_bytes <= most and pk.supports("paged_attention", case.spec, target)[0]


@functools.cache
def sampled(name: str) -> list[Case]:
    return cases.sample(AXES, COUNTS[name][1], runs_on(name))


def battery(long: bool) -> list:
    params = []
    for name in cases.available("paged_attention"):
        few, chosen = COUNTS[name][0], sampled(name)
        chosen = chosen[few:] if long else chosen[:few]
        params += [pytest.param(name, case, id=f"{name}-{case.id}") for case in chosen]
    return params


def check(name: str, case: Case, mixes, dma: str = "on_wait") -> None:
    """Runs a case on some mixes. The error allowed is that of the case: the yardstick's largest over its mixes."""
    errors, allowed = {}, []
    for mix in mixes:
        step = cases.build(case, mix, name, unsigned=name == "xla" and case.seed % 2 == 0)
        want, want_lse = cases.oracle(step)
        got, lse = cases.run(step, name, dma=dma)
        assert got.dtype == step.q.dtype
        errors[mix] = np.abs(got.astype(np.float64) - want).max(initial=0.0)
        allowed.append(cases.tolerance(step, want))
        dead = np.isneginf(want_lse)
        np.testing.assert_array_equal(np.isneginf(lse), dead, err_msg=mix)
        assert not got[dead].any(), mix
        np.testing.assert_allclose(lse[~dead], want_lse[~dead], rtol=1e-5, atol=1e-4, err_msg=mix)
    worst = max(errors, key=lambda mix: errors[mix])
    assert errors[worst] <= max(allowed), f"{worst}: error {errors[worst]:.3g}, allowed {max(allowed):.3g}"


def some_mixes(name: str, case: Case, long: bool) -> list[str]:
    """The mixes to run a case on; where not all, another few in each case."""
    most = MOST_MIXES.get(name, (len(case.mixes),) * 2)[long]
    turned = case.mixes[case.seed % len(case.mixes) :] + case.mixes
    return turned[: min(most, len(case.mixes))]


@pytest.mark.parametrize(("name", "case"), battery(long=False))
def test_battery(name, case):
    check(name, case, some_mixes(name, case, False))


@pytest.mark.long
@pytest.mark.parametrize(("name", "case"), battery(long=True))
def test_battery_long(name, case):
    check(name, case, some_mixes(name, case, True), dma="eager" if case.seed % 2 else "on_wait")


LARGE = [
    Case("bf16", (32, 32), 128, 16, False, "none"),
    Case("bf16_int8", (128, 8), 128, 32, True, "none"),
    Case("f32", (128, 8), 32, 16, False, "window_40"),
]


@pytest.mark.long
@pytest.mark.parametrize("case", LARGE, ids=lambda c: c.id)
@pytest.mark.parametrize("name", cases.available("paged_attention"))
def test_many_heads(name, case):
    check(name, case, case.mixes[-3:])


def test_sample_meets_every_pair():
    """The long tail of the XLA path covers every pair of values of two axes; the sample is the same in every process."""
    chosen = sampled("xla")
    assert chosen == cases.sample(AXES, COUNTS["xla"][1], runs_on("xla"))
    for a, b in (("dtypes", "extras"), ("decode_only", "extras"), ("heads", "page_size"), ("heads", "head_dim")):
        missing = {(x, y) for x in AXES[a] for y in AXES[b]} - {(getattr(c, a), getattr(c, b)) for c in chosen}
        assert not missing


@pytest.mark.parametrize("dtypes", ["bf16", "f16"])
def test_plain_attention_is_what_jax_does(dtypes):
    """The yardstick's error is that of the same attention written in jax.numpy, within a factor of two."""
    step = cases.build(Case(dtypes, (4, 2), 64, 16), "prefill", "xla")
    want, _ = cases.oracle(step)
    t = step.rows[0][0]
    keys, values = pk.reference.gather_kv(step.pool, 1, step.tables[0], t)
    mine = cases.plain_attention(step.q[:t], keys, values, 0, cases.options_of(step))
    k, v = (jnp.repeat(jnp.asarray(x, step.q.dtype), 2, axis=1) for x in (keys, values))
    scores = jnp.einsum("tnh,snh->nts", step.q[:t], k) * jnp.asarray(0.125, step.q.dtype)
    weights = jax.nn.softmax(jnp.where(jnp.tri(t, dtype=bool), scores, -jnp.inf), axis=-1)
    theirs = np.asarray(jnp.einsum("nts,snh->tnh", weights, v))
    assert theirs.dtype == mine.dtype
    errors = [np.abs(x.astype(np.float64) - want[:t]).max() for x in (mine, theirs)]
    assert 0.5 < errors[0] / errors[1] < 2
