"""Pool writes of every implementation, the whole pool compared bit by bit with the reference."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.quant import QMAX
from tests.kernels import cases
from tests.kernels.cases import DTYPES, TARGET

IMPLEMENTATIONS = cases.available("kv_write")
FORMATS = {
    "f32": ("float32", None),
    "bf16": ("bfloat16", None),
    "f16": ("float16", None),
    "int8": ("int8", "token_head"),
    "e4m3": ("float8_e4m3fn", "token_head"),
    "e5m2": ("float8_e5m2", "token_head"),
    "int8_tensor": ("int8", "tensor"),
    "e4m3_tensor": ("float8_e4m3fn", "tensor"),
}
# Rows as (query tokens, kv tokens), page size 16: unaligned runs, runs across pages, a full page, the last slot of a page.
ROWS = {
    "decode": [(1, 1), (1, 16), (1, 17), (1, 40)],
    "chunks": [(5, 21), (16, 32), (1, 48), (20, 35), (0, 0)],
}


def interpreted(name: str):
    return cases.interpret_params(name)


def random_pool(spec: pk.PoolSpec, rng, unsigned: bool = False) -> pk.KVPool:
    """A pool of random finite numbers (scales too), so that any stray write shows."""
    data = rng.integers(-100, 100, spec.data_shape).astype(np.float32).astype(jnp.dtype(spec.dtype))
    scales = None if spec.scales_shape is None else rng.uniform(0.5, 2, spec.scales_shape).astype(np.float32)
    return cases.as_pool(data, scales, spec, unsigned)


def planned(rows, spec, name, rng, extra_tokens=3, shape=None):
    tables = cases.make_tables(rows, spec, rng)
    tokens = sum(q for q, _ in rows) + extra_tokens
    shape = shape or pk.PlanShape(tokens, len(rows) + 1, 5)
    return cases.make_plan(rows, tables, spec, name, shape)


@functools.cache
def program(name):
    def step(pool, k, v, plan, layer, scales):
        return pk.write_kv(pool, k, v, plan, layer=layer, implementation=name, interpret=interpreted(name), **scales)

    return jax.jit(step, compiler_options=cases.FAST_COMPILE if interpreted(name) else None)


def write(name, pool, k, v, plan, layer=1, scales=None):
    scales = scales or {}

    return program(name)(pool, k, v, plan, jnp.int32(layer), scales)


def assert_same_pool(got: pk.KVPool, want: pk.KVPool, skip_data=None) -> None:
    """Every byte of two pools, NaNs included."""
    a, b = (np.asarray(p.data).view(np.uint8) for p in (got, want))
    if skip_data is not None:
        a, b = (np.where(skip_data, 0, x) for x in (a, b))
    np.testing.assert_array_equal(a, b)
    if want.scales is not None:
        np.testing.assert_array_equal(np.asarray(got.scales), np.asarray(want.scales))


def tensor_scales(spec):
    return {"k_scale": np.float32(0.03), "v_scale": np.float32(0.011)} if spec.quant == "tensor" else {}


def spec_of(form: str, *, heads=2, dim=64, page=16, pages=16) -> pk.PoolSpec:
    dtype, quant = FORMATS[form]
    return pk.PoolSpec(3, pages, page, heads, dim, dtype, quant)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_write_is_bit_exact(name, form, rows):
    """Written rows hold the reference's bits, every other byte of the pool (all layers, scratch page) is unchanged."""
    rng = np.random.default_rng(sum(map(ord, form)))
    spec = spec_of(form)
    if not pk.supports("kv_write", spec, TARGET[name])[0]:
        pytest.skip(pk.supports("kv_write", spec, TARGET[name])[1])
    plan = planned(ROWS[rows], spec, name, rng)
    k, v = (jnp.asarray(rng.normal(size=(plan.shape.num_tokens, 2, 64)), jnp.bfloat16) for _ in "kv")
    k = k.at[0].set(0)  # a zero row takes scale 1
    pool = random_pool(spec, rng, unsigned=name == "xla")
    scales = tensor_scales(spec)
    want = pk.reference.write_kv(pool, k, v, plan, layer=1, **scales)
    assert_same_pool(write(name, pool, k, v, plan, scales=scales), want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_padding_tokens_write_nothing(name):
    """B44: three tokens padded to 8, 16 and 32 change three pool rows, and all buckets give the same bytes."""
    rng = np.random.default_rng(0)
    spec = spec_of("bf16", pages=6)
    pool = random_pool(spec, rng, unsigned=name == "xla")
    rows, results = [(3, 7)], []
    for tokens in (8, 16, 32):
        plan = cases.make_plan(rows, [np.array([5], np.int32)], spec, name, pk.PlanShape(tokens, 4, 2))
        k, v = (np.ones((tokens, 2, 64), np.float32) * x for x in (2.0, 3.0))
        results.append(write(name, pool, jnp.asarray(k), jnp.asarray(v), plan, layer=2))
    before, after = (np.asarray(p.data).view(np.uint8) for p in (pool, results[0]))
    changed = np.argwhere((before != after).any(-1))
    np.testing.assert_array_equal(changed, [[2 * 6 + 5, offset] for offset in (4, 5, 6)])
    for other in results[1:]:
        assert_same_pool(other, results[0])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_last_slot_of_the_pool_and_dropped_slots(name):
    """Layer 0's dropped tokens never land in layer 1; the very last slot of the last layer can be written."""
    rng = np.random.default_rng(1)
    spec = spec_of("f32", pages=4)
    pool = random_pool(spec, rng)
    plan = cases.make_plan([(1, 16), (0, 0)], [np.array([3], np.int32), []], spec, name, pk.PlanShape(4, 3, 2))
    k = jnp.full((4, 2, 64), 7.0)
    for layer in range(3):
        got = write(name, pool, k, k, plan, layer=layer)
        changed = np.argwhere((np.asarray(got.data) != np.asarray(pool.data)).any(-1))
        np.testing.assert_array_equal(changed, [[layer * 4 + 3, 15]])


@pytest.mark.parametrize("form", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_nan_stays_in_its_row_and_huge_values_are_clipped(name, form):
    """A NaN key makes its own head's row NaN and nothing else; a huge one comes back finite."""
    rng = np.random.default_rng(2)
    spec = spec_of(form, pages=6)
    pool = random_pool(spec, rng, unsigned=name == "xla")
    plan = cases.make_plan([(4, 4)], [np.array([2], np.int32)], spec, name, pk.PlanShape(4, 2, 1))
    clean = rng.normal(size=(4, 2, 64)).astype(np.float32)
    bad = clean.copy()
    bad[1, 0, 3] = np.nan
    bad[2, 1, 5] = 3e38
    got, base = (write(name, pool, jnp.asarray(x), jnp.asarray(clean), plan) for x in (bad, clean))
    assert (
        not pk.reference.gather_kv(got, 1, np.array([2]), 4)[0][1, 0].any()
        or np.isnan(pk.reference.gather_kv(got, 1, np.array([2]), 4)[0][1, 0]).all()
    )
    keys, values = pk.reference.gather_kv(got, 1, np.array([2]), 4)
    base_keys, base_values = pk.reference.gather_kv(base, 1, np.array([2]), 4)
    touched = np.zeros((4, 2), bool)
    touched[[1, 2], [0, 1]] = True
    np.testing.assert_array_equal(keys[~touched], base_keys[~touched])
    np.testing.assert_array_equal(values, base_values)
    assert np.isnan(keys[1, 0]).all()
    assert np.isfinite(keys[2, 1]).all()
    np.testing.assert_allclose(keys[2, 1, 5], 3e38, rtol=1e-2)


@pytest.mark.parametrize(("form", "factor"), itertools.product(["int8_tensor", "e4m3_tensor"], [500.0, -500.0]))
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_values_far_over_the_scale_become_the_maximum(name, form, factor):
    """B47: 500 times the scale comes back as the format's largest number, never NaN; a new scale changes the bytes."""
    spec = spec_of(form, pages=4)
    plan = cases.make_plan([(1, 1)], [np.array([2], np.int32)], spec, name, pk.PlanShape(1, 1, 1))
    k = jnp.full((1, 2, 64), factor * 0.125)
    pool = cases.as_pool(np.zeros(spec.data_shape, jnp.dtype(spec.dtype)), None, spec, False)
    scales = {"k_scale": np.float32(0.125), "v_scale": np.float32(0.125)}
    got = write(name, pool, k, k, plan, scales=scales)
    stored = np.asarray(got.data).view(jnp.dtype(spec.dtype))[4 + 2, 0].astype(np.float32)
    np.testing.assert_array_equal(stored, np.full(256, np.clip(factor, -QMAX[spec.dtype], QMAX[spec.dtype])))
    other = write(name, pool, k / 50, k / 50, plan, scales={"k_scale": np.float32(0.25), "v_scale": np.float32(0.125)})
    row = np.asarray(other.data).view(jnp.dtype(spec.dtype))[4 + 2, 0].astype(np.float32).reshape(2, 2, 64)
    assert (row[:, 0] != row[:, 1]).all()


@pytest.mark.parametrize("form", ["f32", "bf16", "int8", "e4m3"])
def test_round_trip_error(form):
    """What is read back differs from what was written by at most the format's rounding."""
    rng = np.random.default_rng(3)
    spec = spec_of(form)
    plan = planned([(30, 30)], spec, "xla", rng, extra_tokens=0, shape=pk.PlanShape(30, 1, 2))
    k, v = (rng.normal(size=(30, 2, 64)).astype(np.float32) for _ in "kv")
    pool = pk.write_kv(pk.alloc(spec), jnp.asarray(k), jnp.asarray(v), plan, layer=0)
    table = np.asarray(plan.page_ids)[:2]
    for got, want in zip(pk.reference.gather_kv(pool, 0, table, 30), (k, v), strict=True):
        step = {"float32": 0, "bfloat16": 2**-7, "int8": 1 / 127, "float8_e4m3fn": 2**-3}[spec.dtype] / 2
        amax = np.abs(want).max(-1, keepdims=True)
        bound = amax if spec.dtype == "int8" else np.maximum(np.abs(want), amax * 2**-14)
        assert (np.abs(got - want) <= step * 1.01 * bound).all()


@pytest.mark.parametrize("form", ["f32", "bf16", "int8", "e4m3_tensor"])
@pytest.mark.parametrize("name", ["xla"])
def test_write_is_in_place(name, form):
    """A donated pool carried through a scan over layers, written and then read: aliased, no copy of it anywhere."""
    spec = pk.PoolSpec(4, 8192, 16, 4, 64, *FORMATS[form])
    scales = tensor_scales(spec)
    plan = cases.make_plan([(1, 5)] * 4, np.arange(1, 5, dtype=np.int32)[:, None], spec, name)

    def step(pool, k, plan):
        def body(carry, layer):
            pool, k = carry
            pool = pk.write_kv(pool, k, k, plan, layer=layer, implementation=name, **scales)
            out = pk.paged_attention(k, pool, plan, layer=layer, implementation=name, **scales)
            return (pool, out), None

        return jax.lax.scan(body, (pool, k), jnp.arange(4))[0]

    pool = jax.eval_shape(lambda: pk.alloc(spec))  # compiled only
    analysis = jax.jit(step, donate_argnums=0).lower(pool, jnp.ones((4, 4, 64)), plan).compile().memory_analysis()
    assert analysis.alias_size_in_bytes == spec.num_bytes
    assert analysis.temp_size_in_bytes < 0.01 * spec.num_bytes


def test_errors_name_the_argument():
    spec = pk.PoolSpec(2, 4, 4, 2, 8, "float32")
    pool = pk.alloc(spec)
    plan = pk.plan([2], [2], [[1]], spec=spec)
    good = jnp.zeros((2, 2, 8))
    for match, call in {
        r"k: got shape \[3, 2, 8\], wants \[2, 2, 8\]": lambda: pk.write_kv(pool, jnp.zeros((3, 2, 8)), good, plan),
        "v: got dtype int32": lambda: pk.write_kv(pool, good, good.astype(jnp.int32), plan),
        "layer: got 2": lambda: pk.write_kv(pool, good, good, plan, layer=2),
        "k_scale: got 0.5": lambda: pk.write_kv(pool, good, good, plan, k_scale=0.5),
        "implementation: got 'cuda'": lambda: pk.write_kv(pool, good, good, plan, implementation="cuda"),  # pyright: ignore
        "plan: made for page_size 8": lambda: pk.write_kv(
            pool, good, good, pk.plan([2], [2], [[1]], spec=dataclasses.replace(spec, page_size=8))
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(lambda k: pk.write_kv(pool, k, good, plan).data.sum())(good)
    tensor = pk.alloc(dataclasses.replace(spec, dtype="int8", quant="tensor"))
    with pytest.raises(ValueError, match="v_scale: got None"):
        pk.write_kv(tensor, good, good, plan, k_scale=1.0)


def test_formats_cover_the_battery():
    assert {DTYPES[d][1] for d in DTYPES} == {f[0] for f in FORMATS.values()}
