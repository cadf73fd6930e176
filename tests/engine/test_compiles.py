"""Nothing is compiled after warm-up, and no step copies the page pool."""

from pathlib import Path

import numpy as np
import pytest

from jaxpaged.errors import CapacityError, InvariantError
from jaxpaged.model.kv_pages import KVPool
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.scheduler.scheduler_output import ScheduledSequence, SchedulerOutput
from tests.kit.engines import add, check_rest, engine_for, fresh_engine, greedy, run, salt, tokens
from tests.kit.oracle import Oracle


def mixed_params(rng: np.random.Generator, seats: int) -> SamplingParams | BeamSearchParams:
    """Random parameters of every kind."""
    kind = int(rng.integers(10))
    if kind == 0:
        return BeamSearchParams(beam_width=int(rng.integers(1, seats + 1)), max_tokens=int(rng.integers(1, 10)))
    return SamplingParams(
        n=int(rng.integers(1, seats + 1)) if kind < 3 else 1,
        temperature=float(rng.choice([0.0, 0.8])),
        top_k=int(rng.choice([0, 10])),
        top_p=float(rng.choice([1.0, 0.9])),
        max_tokens=int(rng.integers(1, 30)),
        logprobs=[None, 0, 4][int(rng.integers(3))],
        seed=int(rng.integers(100)),
    )


@pytest.mark.parametrize(
    ("budget", "seats", "swap"),
    [(7, 3, 0.001), pytest.param(1, 3, 0.0, marks=pytest.mark.long), pytest.param(50, 5, 0.001, marks=pytest.mark.long)],
)
def test_nothing_is_compiled_after_warm_up(tiny_dir: Path, budget: int, seats: int, swap: float):
    """B60: 200 mixed requests (lengths, samples, beams, preemption, swap, aborts) with budgets and seats off every grid."""
    engine = fresh_engine(
        tiny_dir,
        few_buckets=False,
        num_pages=24,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        swap_space=swap,
        debug=False,
    )
    warm = engine.ledger.num_compilations
    named = len(engine.ledger.entries)
    assert 3 <= named <= 12
    rng = np.random.default_rng(budget)
    added = 0
    while added < 200 or engine.has_unfinished_requests():
        while added < 200 and len(engine._scheduler._requests) < 12:
            added += 1
            prompt = rng.integers(3, 64, int(rng.integers(1, 40))).tolist()
            try:
                request_id = add(engine, prompt, mixed_params(rng, seats), cache_salt=str(rng.integers(3)))
            except CapacityError:
                continue
            if rng.integers(10) == 0:
                engine.step()
                engine.abort_request(request_id)
        engine.step()
    check_rest(engine)
    stats = engine.stats()
    assert stats.num_page_copies > 10 and (stats.num_swapped_in_pages > 0) == bool(swap)
    assert stats.num_preemptions >= 5 or budget == 1, "with one token a step no two sequences grow at once"
    assert engine.ledger.num_compilations == warm and len(engine.ledger.entries) == named


@pytest.mark.parametrize(
    "kv_dtype", ["float32", "int8", *(pytest.param(d, marks=pytest.mark.long) for d in ("bfloat16", "fp8_e4m3", "fp8_e5m2"))]
)
def test_the_pool_is_updated_in_place(tiny_dir: Path, kv_dtype: str):
    """Each compiled step aliases the whole pool, and its temporaries are small beside it."""
    engine = fresh_engine(tiny_dir, kv_cache_dtype=kv_dtype, page_size=16, num_pages=4000, max_num_seqs=2, debug=False)
    pool = sum(array.nbytes for array in (engine.runner._pool.data, engine.runner._pool.scales) if array is not None)
    assert pool > 6e6
    for shape in engine.runner._buckets:
        memory = engine.runner.lower(shape).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= pool, str(shape)
        assert memory.temp_size_in_bytes < pool / 10, f"{shape}: {memory.temp_size_in_bytes} bytes beside a pool of {pool}"


def pool_rows(pool: KVPool) -> np.ndarray:
    """The pool as ``[L, num_pages * page_size, row bytes]``."""
    data = np.asarray(pool.data)
    return data.reshape(pool.spec.num_layers, pool.spec.num_pages * pool.spec.page_size, -1)


def test_padding_writes_nothing(tiny_dir: Path):
    """B44: 3 tokens in a bucket of 16: only 3 rows of each layer change, whatever the bucket."""
    pools = []
    for budget in (16, 32):
        engine = fresh_engine(tiny_dir, max_num_batched_tokens=budget, debug=False)
        before = pool_rows(engine.runner._pool).copy()
        assert not before.any()
        run(engine, [[5, 6, 7]], greedy(1))
        after = pool_rows(engine.runner._pool)
        changed = np.flatnonzero((after != before).any(axis=(0, 2)))
        assert len(changed) == 3 and changed[0] % 4 == 0 and changed[0] >= 4, "three slots of one page, never page 0"
        assert (after != before).any(axis=2)[:, changed].all()
        pools.append(after)
    np.testing.assert_array_equal(*pools)


@pytest.mark.parametrize("page", [65, 1000, -1])
def test_page_ids_outside_the_pool_are_stopped_on_the_host(tiny_dir: Path, tiny_oracle: Oracle, page: int):
    """B44: on the device such an id would silently hit the last page."""
    engine = engine_for(tiny_dir)
    row = ScheduledSequence(0, 0, 1, False, 0, (page,))
    for output in (SchedulerOutput(0, scheduled=(row,)), SchedulerOutput(0, copies=((1, page),))):
        with pytest.raises(InvariantError, match=f"page ids .*{page}.*the pool has 0..64"):
            engine.runner.run(output, engine.runner._buckets.decode[0], np.zeros(0, np.int32), wants_top=False)
    assert tokens(run(engine, [[5, 6]], greedy(3), cache_salt=salt())[0]) == tiny_oracle.greedy([5, 6], 3)[0]


def test_the_step_compiled_once_serves_every_step(tiny_dir: Path, tiny_oracle: Oracle):
    """B60: positions are inputs, not constants: steps 1, 2 and 50 of one compiled program give the oracle's tokens."""
    engine = engine_for(tiny_dir)
    before = engine.ledger.num_compilations
    got = tokens(run(engine, [[9, 5, 6]], greedy(55), cache_salt=salt())[0])
    own = engine.ledger.num_compilations - before
    want = tiny_oracle.greedy([9, 5, 6], 55)[0]
    assert own == 0 and got == want
