"""What is particular to the TPU kernels: clean copies, limits, lanes, packed words, aligned work lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels as pk
from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.kv_write import mosaic_tpu as kv_write
from pallas_kernels.paged_attention import mosaic_common as common
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.plan import max_query_tiles
from tests.kernels import cases
from tests.kernels.cases import Case

MODES = ["on_wait", "eager"]


def assert_clean(capfd) -> None:
    """No data race was found and every copy that was started has been waited for."""
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found
    text = "".join(capfd.readouterr())
    assert "non-zero count" not in text, text


@pytest.mark.parametrize("dma", MODES)
@pytest.mark.parametrize(
    ("mix", "dtypes", "extras", "tiles"),
    [
        ("decode_long_short", "f32", "none", Tiles(kv_tile=32, fetch_tile=128)),
        ("mixed", "bf16_int8", "window_40", Tiles(kv_tile=32, fetch_tile=64)),
    ],
)
def test_attention_leaves_no_race_and_no_copy(mix, dtypes, extras, tiles, dma, capfd):
    """Several fetches a row, empty rows between others: right to the battery's tolerance, no race, no leaked copy."""
    case = Case(dtypes, (4, 2), 64, 32 if "int8" in dtypes else 8, mix.startswith("decode"), extras)
    step = cases.build(case, mix, "mosaic_tpu")
    want, _ = cases.oracle(step)
    got, _ = cases.run(step, "mosaic_tpu", tiles=tiles, dma=dma)
    assert np.abs(got.astype(np.float64) - want).max() <= cases.tolerance(step, want)
    assert_clean(capfd)


@pytest.mark.parametrize("dma", MODES)
@pytest.mark.parametrize("form", ["bfloat16", "float8_e4m3fn"])
def test_write_of_random_bits_is_exact(form, dma, capfd):
    """Runs that start and end anywhere, more groups than the ring holds: only the step's rows change, to the last bit.

    The pool holds random bits, NaNs of every payload among them, and its scales NaN: what stays must stay as it was.
    """
    rng = np.random.default_rng(0)
    rows = [(1, 1 + i) for i in range(20)] + [(70, 75), (5, 9), (0, 0), (33, 64)]
    spec = pk.PoolSpec(2, sum(-(-n // 32) for _, n in rows) + 2, 32, 1, 64, form)
    size = {2: np.uint16, 1: np.uint8}[spec.itemsize]
    bits = rng.integers(0, np.iinfo(size).max, spec.data_shape, dtype=size, endpoint=True)
    scales = None if spec.scales_shape is None else np.full(spec.scales_shape, np.nan, np.float32)
    pool = cases.as_pool(bits.view(jnp.dtype(form)), scales, spec, False)
    tokens = sum(q for q, _ in rows)
    tables = cases.make_tables(rows, spec, rng)
    plan = cases.make_plan(rows, tables, spec, "mosaic_tpu", pk.PlanShape(tokens + 3, len(rows), 4))
    k, v = (jnp.asarray(rng.normal(size=(tokens + 3, 1, 64)), jnp.bfloat16) for _ in "kv")
    interpret = cases.interpret_params("mosaic_tpu", dma)
    new = jax.jit(lambda p: pk.write_kv(p, k, v, plan, layer=1, implementation="mosaic_tpu", interpret=interpret))(pool)
    want = pk.write_kv(pool, k, v, plan, layer=1, implementation="reference")
    np.testing.assert_array_equal(np.asarray(new.data).view(size), np.asarray(want.data).view(size))
    if scales is not None:
        np.testing.assert_array_equal(np.asarray(new.scales).view(np.uint32), np.asarray(want.scales).view(np.uint32))
    changed = (np.asarray(new.data).view(size) != bits).any(-1).sum()
    assert changed == tokens
    assert_clean(capfd)


@pytest.mark.parametrize("dma", MODES)
def test_page_copies_leave_no_race_and_no_copy(dma, capfd):
    """Copying, taking out and putting back pages moves the right bytes in every layer and waits for every copy."""
    spec = pk.PoolSpec(3, 9, 16, 1, 64, "bfloat16")
    data = np.random.default_rng(0).normal(size=spec.data_shape).astype(jnp.bfloat16)
    pool = cases.as_pool(data, None, spec, False)
    src, dst = np.array([1, 3, 0, 0], np.int32), np.array([2, 8, 0, 0], np.int32)
    how = {"implementation": "mosaic_tpu", "interpret": cases.interpret_params("mosaic_tpu", dma)}
    copied = jax.jit(lambda p: pk.copy_pages(p, src, dst, **how))(pool)
    back = jax.jit(lambda p: pk.scatter_pages(p, dst, pk.gather_pages(p, src, **how), **how))(pool)
    want = data.copy().reshape(3, 9, 16, 128)
    want[:, [2, 8]] = want[:, [1, 3]]
    for got in (copied, back):
        np.testing.assert_array_equal(np.asarray(got.data).view(np.uint16), want.reshape(data.shape).view(np.uint16))
    assert_clean(capfd)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (pk.PoolSpec(1, 4, 16, 1, 32), "multiple of 128"),
        (pk.PoolSpec(1, 4, 12, 1, 64), "multiple of 8"),
        (pk.PoolSpec(1, 4, 16, 1, 64, "float16"), "float16"),
    ],
)
def test_pools_the_tpu_cannot_address_are_refused(spec, words):
    """Every operation says why, and what would work instead."""
    for op in ("paged_attention", "kv_write", "page_copy"):
        ok, reason = pk.supports(op, spec, "tpu")
        assert not ok
        assert words in reason
        assert 'implementation="xla"' in reason


def test_steps_beyond_scalar_or_vector_memory_are_refused():
    """The message names the size, the room there is, and what to change."""
    spec = pk.PoolSpec(1, 4, 16, 1, 64)
    plan = pk.plan([1], [1], [[1]], spec=spec, target="tpu", shape=pk.PlanShape(512, 512, 512))
    with pytest.raises(KernelUnsupportedError, match=r"262144|26\d{4} words of scalar memory.*larger"):
        common.check_plan("paged_attention", plan)
    with pytest.raises(KernelUnsupportedError, match=r"MiB of VMEM.*kv_tile"):
        common.check_vmem("paged_attention", 2**30, None)
    with pytest.raises(KernelUnsupportedError, match=r"4\.0 MiB of VMEM, there are 1"):
        common.check_vmem("paged_attention", 4 * 2**20, Tiles(vmem_limit_bytes=2**20))
    cpu = pk.plan([1], [1], [[1]], spec=spec)
    with pytest.raises(ValueError, match='target="tpu"'):
        common.check_plan("write_kv", cpu)


@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (8, 128), (4, 80), (2, 96), (2, 32), (2, 256), (1, 64), (2, 192)])
def test_lanes_cover_every_head(heads, dim):
    """The lanes taken for a head hold its K and V where they are said to be, start at memory tiles and stay in the row."""
    spec = pk.PoolSpec(1, 2, 16, heads, dim)
    row = np.arange(spec.row_elements)
    lanes = common.head_lanes(spec)
    assert lanes.width % 128 == 0
    q = jnp.asarray(np.random.default_rng(0).normal(size=(5, heads, 2, dim)), jnp.float32)
    wide = common.pad_query(q, lanes.k_skip, lanes.width)
    assert wide.shape == (5, heads, 2, lanes.width)
    for h in range(heads):
        for start, skip, first in (
            (lanes.k_start[h], lanes.k_skip[h], 2 * dim * h),
            (lanes.v_start[h], lanes.v_skip[h], 2 * dim * h + dim),
        ):
            assert start % 128 == 0
            assert start + lanes.width <= spec.row_elements
            np.testing.assert_array_equal(row[start : start + lanes.width][skip : skip + dim], np.arange(first, first + dim))
        np.testing.assert_array_equal(wide[:, h, :, lanes.k_skip[h] : lanes.k_skip[h] + dim], q[:, h])
        assert np.count_nonzero(wide[:, h]) == np.count_nonzero(q[:, h])
    out = jnp.stack([jnp.broadcast_to(jnp.arange(lanes.width) - lanes.v_skip[h], (2, lanes.width)) for h in range(heads)])
    np.testing.assert_array_equal(common.take_output(out, lanes.v_skip, dim), np.broadcast_to(np.arange(dim), (heads, 2, dim)))


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("first", "last"), [(None, 0), (None, 7), (0, 32), (3, 4), (5, 30), (-9, 40), (8, 8), (12, 3)])
def test_word_mask_keeps_exactly_these_rows(itemsize, first, last):
    """A mask over 32-bit words keeps rows first..last of packed data, first row in the lowest bits."""
    mask = np.asarray(common.word_mask(first, jnp.int32(last), 32, 128, itemsize))
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32}[itemsize]
    rows = np.stack([((mask[:, 0] >> (8 * itemsize * i)) & np.iinfo(dtype).max) for i in range(4 // itemsize)], 1).reshape(-1)
    keep = (np.arange(32) >= (0 if first is None else first)) & (np.arange(32) < last)
    np.testing.assert_array_equal(rows, np.where(keep, np.iinfo(dtype).max, 0))


def test_query_tiles_are_cut_at_the_flat_batch():
    """Planned for TPU a tile stays within one window of the flat batch, and all tiles together are the long rows' tokens."""
    spec = pk.PoolSpec(1, 60, 16, 1, 64)
    q_lens, seq_lens = [5, 1, 40, 0, 2, 16], [9, 30, 40, 0, 2, 100]
    tables = [np.arange(1, 8) + 8 * row for row in range(6)]
    shape = pk.PlanShape(80, 8, 8)
    plan = pk.plan(q_lens, seq_lens, tables, spec=spec, target="tpu", shape=shape, query_tile=16)
    tiles = plan.query_tiles[: plan.num_counts[1]]
    assert len(plan.query_tiles) == max_query_tiles(shape, 16)
    assert (tiles[:, 1] // 16 == (tiles[:, 1] + tiles[:, 2] - 1) // 16).all()
    starts = plan.query_start_loc
    tokens = [
        (r, t, p)
        for r, first, count, position in tiles
        for t, p in zip(range(first, first + count), range(position, position + count), strict=True)
    ]
    want = [(r, starts[r] + i, seq_lens[r] - q + i) for r, q in enumerate(q_lens) if q > 1 for i in range(q)]
    assert tokens == want


def test_page_runs_join_the_groups_of_a_page():
    """Write groups of one page become one run; unused groups none."""
    groups = np.array([[5, 0, 0, 3, 13], [5, 16, 13, 0, 16], [7, 0, 29, 0, 2], [9, 16, 31, 15, 1], [0, 0, 0, 0, 0]], np.int32)
    runs, count = kv_write.page_runs(jnp.asarray(groups), 4, 6)
    assert count.tolist() == [3]
    assert runs[:3].tolist() == [[5, 0, 3, 29], [7, 29, 0, 2], [9, 31, 31, 1]]


def test_interpreter_catches_what_these_tests_rely_on(capfd):
    """The same checks fail for a kernel that forgets to wait: they can fail at all."""

    def kernel(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, sem).start()

    from jax.experimental import pallas as pl

    x = jnp.ones((8, 128), jnp.float32)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        interpret=cases.interpret_params("mosaic_tpu", "eager"),
    )
    try:
        call(x).block_until_ready()
        told = "".join(capfd.readouterr())
    except jax.errors.JaxRuntimeError as error:  # newer versions raise
        told = str(error)
    assert "non-zero count" in told or "RACE DETECTED" in told
