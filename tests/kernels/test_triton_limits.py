"""What the GPU backend cannot do is refused by name, and what is lowered is what was asked for. Nothing runs here."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallas_kernels as pk
from pallas_kernels import compat, triton_call
from pallas_kernels.paged_attention import triton
from pallas_kernels.target_compile import described
from pallas_kernels.targets import TARGETS

GIB = 2**30


def described_gpu(name: str = "h200"):
    """Lower as if this GPU were there."""
    return described(TARGETS[name], None)


def lowered(fn, *args) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def spec_of(gib: float, dtype: str) -> pk.PoolSpec:
    """A one-layer pool of about this size."""
    spec = pk.PoolSpec(1, 2, 16, 8, 128, dtype)
    pages = int(gib * GIB) // (spec.page_size * spec.row_elements * spec.itemsize)
    return dataclasses.replace(spec, num_pages=pages)


def shapes_of(spec: pk.PoolSpec) -> pk.KVPool:
    scales = None if spec.scales_shape is None else jax.ShapeDtypeStruct(spec.scales_shape, jnp.float32)
    return pk.KVPool(jax.ShapeDtypeStruct(spec.data_shape, jnp.dtype(spec.dtype)), scales, spec)


def plan_shapes(spec: pk.PoolSpec, decode_only: bool = True) -> pk.AttentionPlan:
    shape = pk.PlanShape(4, 4, 4, decode_only)
    plan = pk.plan([1], [3], [[1]], spec=spec, target="gpu", shape=shape)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), plan)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"])
@pytest.mark.parametrize("gib", [1.9, 2.1, 3.0, 4.1])
def test_8_bit_pools_of_2_to_4_gib_are_refused(gib, dtype):
    """The backend counts elements in 32 signed bits up to 4 GiB, so an 8-bit pool past 2**31 elements would be read before
    its start. Reads and writes refuse it and name page counts that work."""
    spec = spec_of(gib, dtype)
    wraps = spec.itemsize == 1 and gib in (2.1, 3.0)
    assert (triton_call.offset_hazard(spec) is not None) == wraps
    kv = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((4, 16, 128), jnp.bfloat16)
    calls = [
        (lambda q, pool, plan: pk.paged_attention(q, pool, plan, implementation="triton"), q),
        (lambda k, pool, plan: pk.write_kv(pool, k, k, plan, implementation="triton"), kv),
    ]
    with described_gpu():
        for fn, x in calls:
            if wraps:
                with pytest.raises(pk.KernelUnsupportedError, match=r"num_pages: got \d+.*between 2 and 4 GiB"):
                    jax.eval_shape(fn, x, shapes_of(spec), plan_shapes(spec))
            else:
                jax.eval_shape(fn, x, shapes_of(spec), plan_shapes(spec))


def test_suggested_page_counts_are_accepted():
    spec = spec_of(3.0, "int8")
    reason = triton_call.offset_hazard(spec)
    assert reason is not None
    below, above = (int(x) for x in re.findall(r"num_pages <= (\d+) or >= (\d+)", reason)[0])
    for pages in (below, above):
        assert triton_call.offset_hazard(dataclasses.replace(spec, num_pages=pages)) is None
    assert triton_call.offset_hazard(dataclasses.replace(spec, num_pages=below + 1)) is not None
    assert triton_call.offset_hazard(dataclasses.replace(spec, num_pages=above - 1)) is not None


@pytest.mark.parametrize("gib", [1.9, 2.1, 4.1])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_the_hazard_is_still_there(gib, dtype, capfd):
    """What the refusal rests on: the backend's offsets into an array are 64-bit only past 2**32 bytes. If a later jax widens
    them, this test says so and the refusal can go."""
    spec = spec_of(gib, dtype)

    def read(ref, out):
        rows = jax.lax.broadcasted_iota(jnp.int32, (16, 64), 0)
        out[...] = compat.masked_load(ref, (rows, jax.lax.broadcasted_iota(jnp.int32, (16, 64), 1)))

    def fn(rows):
        return pl.pallas_call(
            read,
            out_shape=jax.ShapeDtypeStruct((16, 64), rows.dtype),
            compiler_params=compat.triton_params(num_warps=4, num_stages=1),
            debug=True,
        )(rows)

    rows = spec.num_pages * spec.page_size
    with described_gpu():
        lowered(fn, jax.ShapeDtypeStruct((rows, spec.row_elements), jnp.dtype(dtype)))
    text = capfd.readouterr().out
    assert "tt.load" in text
    wide = "tensor<16x64xi64>" in text
    assert wide == (rows * spec.row_elements * spec.itemsize > 2**32)
    if triton_call.offset_hazard(spec):
        assert not wide and rows * spec.row_elements > 2**31


@pytest.mark.parametrize("decode_only", [True, False])
def test_kernels_are_lowered_by_triton(decode_only):
    """Compiler parameters are always explicit: without them some jax versions pick another GPU backend."""
    spec = pk.PoolSpec(2, 9, 16, 2, 64, "int8")
    plan, pool = plan_shapes(spec, decode_only), shapes_of(spec)
    q = jax.ShapeDtypeStruct((4, 8, 64), jnp.bfloat16)

    def step(q, pool, plan):
        pool = pk.write_kv(pool, q[:, :2], q[:, 2:4], plan, layer=1)
        return pk.paged_attention(q, pool, plan, layer=1), pool

    with described_gpu():
        text = lowered(step, q, pool, plan)
    names = ["write_kv_rows", "paged_decode", "combine_decode_splits"] + ([] if decode_only else ["paged_ragged"])
    assert text.count("xla.gpu.triton") == len(names)
    assert all(name in text for name in names)
    assert "mosaic" not in text


def test_e4m3_wants_a_newer_gpu_than_a100():
    spec = pk.PoolSpec(2, 9, 16, 2, 64, "float8_e4m3fn")
    args = (jax.ShapeDtypeStruct((4, 8, 64), jnp.bfloat16), shapes_of(spec), plan_shapes(spec))
    with described_gpu("a100"), pytest.raises(pk.KernelUnsupportedError, match=r'float8_e4m3fn.*8\.0.*"int8"'):
        jax.eval_shape(pk.paged_attention, *args)
    with described_gpu("h100"):
        jax.eval_shape(pk.paged_attention, *args)


def test_a_plan_for_another_target_is_refused():
    spec = pk.PoolSpec(1, 9, 16, 2, 64)
    plan = pk.plan([1], [3], [[1]], spec=spec, target="cpu")
    q = jnp.zeros((1, 4, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match='target="gpu"'):
        pk.paged_attention(q, pk.alloc(spec), plan, implementation="triton", interpret=True)


def test_write_has_no_kv_tile():
    spec = pk.PoolSpec(1, 9, 16, 2, 64)
    plan = pk.plan([1], [3], [[1]], spec=spec, target="gpu")
    k = jnp.zeros((1, 2, 64), jnp.bfloat16)
    with pytest.raises(pk.KernelUnsupportedError, match="num_warps"):
        pk.write_kv(pk.alloc(spec), k, k, plan, implementation="triton", interpret=True, tiles=pk.Tiles(kv_tile=16))


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA B200", (10, 0)),
        ("cpu", None),
    ],
)
def test_compute_capability(kind, capability):
    assert triton_call.compute_capability(kind) == capability


def test_tile_overrides():
    spec = pk.PoolSpec(1, 9, 16, 2, 64)
    sizes = triton.resolve_tiles(pk.Tiles(kv_tile=32, num_warps=2, num_stages=1), spec, "cpu")
    assert (sizes.decode_tokens, sizes.ragged_tokens) == (32, 32)
    assert (sizes.decode_warps, sizes.ragged_warps, sizes.decode_stages, sizes.ragged_stages) == (2, 2, 1, 1)
    assert triton.resolve_tiles(sizes, spec, "cpu") is sizes
    with pytest.raises(ValueError, match="decode_tokens: got 24, wants a power of two"):
        triton.resolve_tiles(pk.Tiles(kv_tile=24), spec, "cpu")
    assert np.log2(triton.resolve_tiles(None, spec, "cpu").decode_tokens).is_integer()
