"""Whole pages copied, taken out and put back, by every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.test_kv_write import FORMATS, assert_same_pool, random_pool, spec_of

IMPLEMENTATIONS = cases.available("page_copy")
FORMS = ["f32", "bf16", "int8", "e4m3"]


def without_scratch(pool: pk.KVPool) -> pk.KVPool:
    """The pool with page 0 of every layer zeroed (its content is nobody's)."""
    spec = pool.spec
    rows = np.arange(spec.num_layers) * spec.num_pages
    data = np.array(pool.data).view(np.uint8)
    data[rows] = 0
    scales = None if pool.scales is None else np.array(pool.scales)
    if scales is not None:
        scales[rows] = 0
    return pk.KVPool(data, scales, spec)  # pyright: ignore[reportArgumentType]


def call(name, function, *args):
    interpret = cases.interpret_params(name)
    step = functools.partial(function, implementation=name, interpret=interpret)
    return jax.jit(step, compiler_options=cases.FAST_COMPILE if interpret else None)(*args)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_copy_moves_all_layers_and_nothing_else(name, form):
    """Copy-on-write: destinations equal their sources in every layer, scales included; padding copies page 0 onto itself."""
    pool = random_pool(spec_of(form, pages=9), np.random.default_rng(0), unsigned=name == "xla")
    src, dst = jnp.array([3, 3, 8, 0, 0], jnp.int32), jnp.array([1, 5, 2, 0, 0], jnp.int32)
    got = call(name, pk.copy_pages, pool, src, dst)
    assert_same_pool(got, pk.reference.copy_pages(pool, src, dst))
    layers = np.asarray(got.data).reshape(3, 9, *pool.data.shape[1:])
    np.testing.assert_array_equal(layers[:, 5].view(np.uint8), np.asarray(pool.data).reshape(layers.shape)[:, 3].view(np.uint8))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_swap_cycle_through_the_host(name, form):
    """Pages taken out, kept in host memory and put back at other ids hold the same bytes; all other pages are unchanged."""
    rng = np.random.default_rng(1)
    spec = spec_of(form, pages=9)
    pool = random_pool(spec, rng, unsigned=name == "xla")
    ids, back = jnp.array([8, 2, 5, 0], jnp.int32), jnp.array([1, 8, 3, 0], jnp.int32)
    pages = call(name, pk.gather_pages, pool, ids)
    want = pk.reference.gather_pages(pool, ids)
    for a, b in zip(jax.tree.leaves(pages), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    host = jax.tree.map(np.array, pages)
    other = random_pool(spec, rng, unsigned=name == "xla")
    got = call(name, pk.scatter_pages, other, back, jax.tree.map(jnp.asarray, host))
    assert_same_pool(without_scratch(got), without_scratch(pk.reference.scatter_pages(other, back, host)))


@pytest.mark.parametrize("form", FORMATS)
def test_copies_are_in_place(form):
    """Donated pools are aliased; temporary memory is the moved pages', not the pool's."""
    spec = pk.PoolSpec(2, 1024, 16, 2, 64, *FORMATS[form])
    pool, ids = pk.alloc(spec), jnp.arange(1, 5)
    pages = pk.gather_pages(pool, ids)
    for step, args in ((pk.copy_pages, (ids, ids + 4)), (pk.scatter_pages, (ids, pages))):
        analysis = jax.jit(step, donate_argnums=0).lower(pool, *args).compile().memory_analysis()
        assert analysis.alias_size_in_bytes == spec.num_bytes
        assert analysis.temp_size_in_bytes < 0.01 * spec.num_bytes


def test_errors_name_the_argument():
    spec = pk.PoolSpec(2, 6, 4, 2, 8, "float32")
    pool = pk.alloc(spec)
    ids = np.array
    pages = pk.gather_pages(pool, ids([1, 2]))
    for match, step in {
        "src: got page 6": lambda: pk.copy_pages(pool, ids([6]), ids([1])),
        "dst: got page -1": lambda: pk.copy_pages(pool, ids([1]), ids([-1])),
        "dst: got page 2 twice": lambda: pk.copy_pages(pool, ids([1, 3]), ids([2, 2])),
        "dst: got page 3, which is also a source": lambda: pk.copy_pages(pool, ids([1, 3]), ids([3, 4])),
        "dst: got 1 ids, wants 2": lambda: pk.copy_pages(pool, ids([1, 3]), ids([2])),
        "ids: got float64": lambda: pk.gather_pages(pool, ids([1.0])),
        "ids: got page 2 twice": lambda: pk.scatter_pages(pool, ids([2, 2]), pages),
        "pages.data: got float32": lambda: pk.scatter_pages(pool, ids([2]), pages),
        "pages.scales: got None": lambda: pk.scatter_pages(
            pk.alloc(pk.PoolSpec(2, 6, 4, 2, 8, "int8")), ids([1, 2]), pk.Pages(jnp.zeros((2, 2, 4, 32), jnp.uint8), None)
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            step()
    with pytest.raises(pk.KernelUnsupportedError, match='implementation="xla"'):
        pk.copy_pages(pool, ids([1]), ids([2]), implementation="triton")
