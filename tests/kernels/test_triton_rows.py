"""A row's result from the interpreted GPU kernels is its own: bit-identical whatever else is in the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.paged_attention.triton_tiles import TritonTiles
from tests.kernels import cases

SPEC = pk.PoolSpec(2, 40, 8, 2, 32)
TILES = TritonTiles(decode_tokens=16, ragged_rows=32, ragged_tokens=16, combine_splits=2)
SPLIT, TILE = 32, 8
LENGTHS = [70, 33, 5, 64]  # kv tokens of rows 0 to 3


def setup(seed: int = 0):
    """A pool whose slots hold random numbers, and a block table per row."""
    rng = np.random.default_rng(seed)
    data = jnp.asarray(rng.normal(size=SPEC.data_shape), jnp.bfloat16)
    ids = rng.permutation(np.arange(1, SPEC.num_pages))
    tables = np.split(ids[:36], 4)
    return pk.KVPool(data, None, SPEC), tables, rng


def program(window: int | None):
    def run(q, pool, plan):
        return pk.paged_attention(
            q,
            pool,
            plan,
            layer=1,
            implementation="triton",
            interpret=True,
            tiles=TILES,
            return_lse=True,
            sliding_window=window,
        )

    return jax.jit(run, compiler_options=cases.FAST_COMPILE)


def step(queries: dict[int, np.ndarray], order: list[int], tables, shape: pk.PlanShape, window=None, plan_window=None):
    """Plan and flat queries of some rows in some order; ``queries[row]`` is ``[t, N, H]``."""
    plan = pk.plan(
        [len(queries[r]) for r in order],
        [LENGTHS[r] for r in order],
        [tables[r] for r in order],
        spec=SPEC,
        target="gpu",
        shape=shape,
        split_len=SPLIT,
        query_tile=TILE,
        sliding_window=plan_window,
    )
    q = np.zeros((shape.num_tokens, 4, 32), np.float32)
    total = 0
    for r in order:
        q[total : total + len(queries[r])] = queries[r]
        total += len(queries[r])
    return jnp.asarray(q, jnp.bfloat16), plan


def rows_of(result, order, queries):
    """``row -> (out, lse)`` of a step's result, as bits."""
    out, lse = (np.asarray(x) for x in result)
    found, start = {}, 0
    for r in order:
        end = start + len(queries[r])
        found[r] = (out[start:end].view(np.uint16), lse[start:end].view(np.uint32))
        start = end
    assert not out[start:].view(np.uint16).any(), "padding tokens are zeros"
    assert np.isneginf(lse[start:]).all()
    return found


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [1, 11, 5, 20]], ids=["decode", "mixed"])
def test_batch_mates_order_and_bucket_change_no_bit(counts):
    pool, tables, rng = setup()
    queries = {r: rng.normal(size=(n, 4, 32)) for r, n in enumerate(counts)}
    decode = max(counts) == 1
    small = pk.PlanShape(4, 4, 9, True) if decode else pk.PlanShape(40, 4, 9)
    large = pk.PlanShape(6, 6, 16, True) if decode else pk.PlanShape(50, 6, 16)
    run = program(None)
    together = rows_of(run(*_args(pool, step(queries, [0, 1, 2, 3], tables, small))), [0, 1, 2, 3], queries)
    others = [([3, 1, 0, 2], small), ([0, 2], small), ([1], small), ([2, 3, 1, 0], large)]
    for order, shape in others:
        again = rows_of(run(*_args(pool, step(queries, order, tables, shape))), order, queries)
        for r in order:
            np.testing.assert_array_equal(again[r][0], together[r][0], err_msg=f"row {r} of {order}")
            np.testing.assert_array_equal(again[r][1], together[r][1], err_msg=f"row {r} of {order}")


@pytest.mark.long
def test_chunks_agree_with_the_whole_prompt():
    """A chunk's queries see the cached part of their prompt: same result, up to the rounding of masked and unmasked tiles."""
    pool, tables, rng = setup(1)
    whole = {3: rng.normal(size=(64, 4, 32))}
    shape = pk.PlanShape(64, 2, 9)
    run = program(None)
    want = rows_of(run(*_args(pool, step(whole, [3], tables, shape))), [3], whole)[3]
    done = 0
    for count in (11, 30, 23):
        LENGTHS[3] = done + count
        try:
            chunk = {3: whole[3][done : done + count]}
            got = rows_of(run(*_args(pool, step(chunk, [3], tables, shape))), [3], chunk)[3]
        finally:
            LENGTHS[3] = 64
        out, whole_out = (x.view(jnp.bfloat16).astype(np.float32) for x in (got[0], want[0][done : done + count]))
        np.testing.assert_allclose(out, whole_out, rtol=2**-7, atol=2**-9)
        np.testing.assert_allclose(got[1].view(np.float32), want[1][done : done + count].view(np.float32), atol=1e-5)
        done += count


def test_plans_that_skip_what_lies_behind_the_window_change_no_bit():
    """Freed pages behind a sliding window are not read: their ids may be garbage and their slots NaN."""
    pool, tables, rng = setup(2)
    queries = {r: rng.normal(size=(n, 4, 32)) for r, n in enumerate([1, 3, 1, 9])}
    shape, order, window = pk.PlanShape(16, 4, 9), [0, 1, 2, 3], 20
    run = program(window)
    want = rows_of(run(*_args(pool, step(queries, order, tables, shape))), order, queries)
    freed = [np.array(t) for t in tables]
    data = np.array(pool.data)
    for r in order:
        first = max(0, LENGTHS[r] - len(queries[r]) - window + 1) // SPEC.page_size
        data[SPEC.num_pages + freed[r][:first]] = np.nan
        freed[r][:first] = 0
    poisoned = dataclasses.replace(pool, data=jnp.asarray(data))
    got = rows_of(run(*_args(poisoned, step(queries, order, freed, shape, plan_window=window))), order, queries)
    for r in order:
        np.testing.assert_array_equal(got[r][0], want[r][0])


def _args(pool, planned):
    q, plan = planned
    return q, pool, plan
