"""Properties of paged attention that hold for every implementation, whatever the numbers are."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.cases import Case

IMPLEMENTATIONS = cases.implementations("paged_attention", "xla", "triton", "mosaic_tpu")
NOT_TPU = cases.implementations("paged_attention", "xla", "triton")
XLA = cases.implementations("paged_attention", "xla")
PAGE = 8


def few(values, main):
    """Parameters ``(value, implementation)``; interpreted kernels take only ``main`` by default."""
    return [
        pytest.param(value, *p.values, marks=p.marks if value == main or "xla" in p.values else [pytest.mark.long])
        for value in values
        for p in IMPLEMENTATIONS
    ]


BASE = Case("f32", (4, 2), 64, PAGE)
INT8 = Case("f32_int8", (4, 2), 64, PAGE)


@dataclasses.dataclass(frozen=True)
class World:
    """Rows with their K and V, to be laid out in pools in different ways."""

    rows: cases.Rows
    q: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]

    def pick(self, indices, queries=None):
        """Some rows in some order, optionally only the last ``queries[i]`` query tokens of each."""
        rows = [self.rows[i] if queries is None else (queries[j], self.rows[i][1]) for j, i in enumerate(indices)]
        q = [self.q[i] if queries is None else self.q[i][len(self.q[i]) - queries[j] :] for j, i in enumerate(indices)]
        return World(rows, q, [self.keys[i] for i in indices], [self.values[i] for i in indices])


def world(rows: cases.Rows, heads=(4, 2), dim=64, seed=0) -> World:
    rng = np.random.default_rng(seed)
    q = [rng.normal(size=(t, heads[0], dim)).astype(np.float32) for t, _ in rows]
    keys, values = ([rng.normal(size=(n, heads[1], dim)).astype(np.float32) for _, n in rows] for _ in "kv")
    return World(rows, q, keys, values)


def lay_out(w: World, name: str, spec: pk.PoolSpec, *, shape=None, seed=0, poison=0.0, garbage=None, window=None, **keywords):
    """The world in a pool (pages shuffled by ``seed``) as a step for ``cases.run``."""
    rng = np.random.default_rng(seed)
    tables = cases.make_tables(w.rows, spec, rng)
    if garbage is not None:
        tables = [np.r_[t[: len(t) - 2], np.full(2, garbage, np.int32)] for t in tables]
    given = (keywords.get("k_scale", 1.0), keywords.get("v_scale", 1.0))
    data, scales = cases.fill_pool(w.rows, tables, spec, w.keys, w.values, 1, poison, given)
    width = max(len(t) for t in tables)
    tokens = sum(len(q) for q in w.q)
    shape = shape or pk.PlanShape(tokens, len(w.rows), width)
    plan = cases.make_plan(w.rows, tables, spec, name, shape, window)
    q = np.zeros((shape.num_tokens, *w.q[0].shape[1:]), np.float32)
    q[:tokens] = np.concatenate(w.q)
    if window is not None:
        keywords["sliding_window"] = window
    return cases.Step(w.rows, q, cases.as_pool(data, scales, spec, False), plan, keywords, tables)


def spec_of(case: Case = BASE, pages=40) -> pk.PoolSpec:
    return dataclasses.replace(case.spec, num_pages=pages)


def attend(w: World, name: str, spec=None, **keywords):
    """Output per row."""
    step = lay_out(w, name, spec or spec_of(), **keywords)
    out, _ = cases.run(step, name)
    return np.split(out[: sum(len(q) for q in w.q)], np.cumsum([len(q) for q in w.q])[:-1])


SHAPE = pk.PlanShape(24, 5, 8)
ROWS = [(1, 30), (7, 21), (1, 8), (5, 5)]


@pytest.mark.parametrize(("case", "name"), few([BASE, INT8], INT8), ids=lambda x: x if isinstance(x, str) else x.dtypes)
def test_unowned_slots_do_not_matter(name, case):
    """B43: NaN, infinities and huge numbers in unused slots, unused scales and free pages change no bit, prefill and decode."""
    spec, w = spec_of(case), world(ROWS)
    clean = cases.run(lay_out(w, name, spec, shape=SHAPE), name)
    for poison in (np.nan, np.inf, -np.inf, 3e38):
        for a, b in zip(cases.run(lay_out(w, name, spec, shape=SHAPE, poison=poison), name), clean, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(poison))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_page_ids_behind_the_length_are_not_used(name):
    """Whatever stands behind a row's pages in its table (10**6, -1, another row's page) changes no bit."""
    w, spec = world(ROWS), spec_of()
    want = cases.run(lay_out(w, name, spec, shape=SHAPE, garbage=0), name)
    for garbage in (10**6, -1, 3):
        for a, b in zip(cases.run(lay_out(w, name, spec, shape=SHAPE, garbage=garbage), name), want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NOT_TPU)
def test_where_pages_lie_does_not_matter(name):
    """Any placement of the pages gives the same bits."""
    w, spec = world(ROWS), spec_of()
    want = cases.run(lay_out(w, name, spec, shape=SHAPE, seed=0), name)[0]
    for seed in (1, 2):
        np.testing.assert_array_equal(cases.run(lay_out(w, name, spec, shape=SHAPE, seed=seed), name)[0], want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_batch_mates_leave_a_row_bit_identical(name):
    """A row alone, among others and in another order: the same bits."""
    w = world(ROWS)
    full = attend(w, name, shape=SHAPE)
    order = [2, 3, 0, 1]
    for i, out in zip(order, attend(w.pick(order), name, shape=SHAPE), strict=True):
        np.testing.assert_array_equal(out, full[i])
    for i in range(len(ROWS)):
        np.testing.assert_array_equal(attend(w.pick([i]), name, shape=SHAPE)[0], full[i])


@pytest.mark.parametrize("name", NOT_TPU)
def test_buckets_leave_a_row_unchanged(name):
    """Larger buckets and wider tables give the same bits; the XLA path, whose code XLA chooses by shape, the same to 1e-6."""
    w = world(ROWS)
    full = attend(w, name, shape=SHAPE)
    for shape in (pk.PlanShape(40, 9, 8), pk.PlanShape(24, 5, 16)):
        for a, b in zip(attend(w, name, shape=shape), full, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 if name == "xla" else 0)


@pytest.mark.parametrize("name", NOT_TPU)
def test_chunks_equal_one_shot_and_decode_equals_the_last_row(name):
    """A prompt of 21 tokens in one step, in chunks of every size, and token by token: the same rows."""
    w = world([(21, 21)])
    whole = attend(w, name, shape=SHAPE)[0]
    for chunk in (1, 2, 5, 8, 16):
        parts = []
        for start in range(0, 21, chunk):
            stop = min(start + chunk, 21)
            part = World([(stop - start, stop)], [w.q[0][start:stop]], [w.keys[0][:stop]], [w.values[0][:stop]])
            parts.append(attend(part, name, shape=SHAPE)[0])
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_causal_mask_is_aligned_to_the_end(name):
    """R18, B40: query i of 3 over 11 keys sees keys 0 .. 8 + i alone; likewise one query, and as many as keys."""
    for t, n in ((3, 11), (1, 11), (11, 11)):
        w = world([(t, n)])
        base = attend(w, name, shape=SHAPE)[0]
        for i in range(t):
            last = n - t + i
            keys, values = w.keys[0].copy(), w.values[0].copy()
            keys[last + 1 :], values[last + 1 :] = 50.0, 1e4
            other = attend(dataclasses.replace(w, keys=[keys], values=[values]), name, shape=SHAPE)[0]
            np.testing.assert_array_equal(other[i], base[i])
            values = w.values[0].copy()
            values[last] = 1e4
            assert np.abs(attend(dataclasses.replace(w, values=[values]), name, shape=SHAPE)[0][i]).max() > 1


@pytest.mark.parametrize(("window", "name"), few([4, PAGE, 11, 37], 11))
def test_window_is_exact_at_its_edge(name, window):
    """B41: with a window of W the query at position p uses keys p - W + 1 .. p, for prefill, chunks and decode; a window longer
    than the row is none."""
    n = 37
    for t in (1, 5, n):
        w = world([(t, n)])
        step = {"shape": pk.PlanShape(37, 1, 8), "window": window}
        base = attend(w, name, **step)[0]
        edge = n - window  # the first key the last query sees
        if edge == 0:
            np.testing.assert_allclose(base, attend(w, name, shape=pk.PlanShape(37, 1, 8))[0], atol=1e-6, rtol=0)
            continue
        for position, seen in ((edge - 1, False), (edge, True)):
            values = w.values[0].copy()
            values[position] = 1e4
            out = attend(dataclasses.replace(w, values=[values]), name, **step)[0]
            if seen:
                assert np.abs(out[-1]).max() > 1
            else:
                np.testing.assert_array_equal(out[-1], base[-1])


@pytest.mark.parametrize(("heads", "name"), few([(4, 4), (4, 2), (6, 2), (5, 1), (20, 4)], (6, 2)), ids=str)
def test_query_heads_use_their_own_kv_head(name, heads):
    """B45: with V constant per KV head, query head h gives h // group, in decode and prefill."""
    num_heads, kv_heads = heads
    w = world([(1, 9), (6, 14)], heads)
    values = [np.broadcast_to(np.arange(kv_heads, dtype=np.float32)[:, None], v.shape).copy() for v in w.values]
    spec = pk.PoolSpec(2, 8, PAGE, kv_heads, 64, "float32")
    for out in attend(dataclasses.replace(w, values=values), name, spec):
        want = np.broadcast_to((np.arange(num_heads) // (num_heads // kv_heads))[None, :, None], out.shape)
        np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("name", XLA)
def test_every_length_in_small_pages(name):
    """R16, B39: every kv length from 0 to 33, alone and in uneven batches, against the reference."""
    spec = spec_of(pages=30)
    shape = pk.PlanShape(4, 4, 5 + 2, True)
    lengths = [(1, 4, 5), (8, 8, 3), (0, 7, 33)] + [(i, i + 1, i + 2) for i in range(9, 33, 3)]
    for batch in lengths:
        w = world([(min(n, 1), n) for n in batch], seed=sum(batch))
        w = dataclasses.replace(w, q=[q for q in w.q])
        step = lay_out(w, name, spec, shape=shape, poison=np.nan, seed=sum(batch))
        out, lse = cases.run(step, name)
        want, want_lse = cases.oracle(step)
        np.testing.assert_allclose(out, want, atol=5e-6, rtol=0)
        np.testing.assert_allclose(lse, want_lse, atol=1e-4, rtol=0)


KEYWORDS = {
    "sm_scale": 0.5,
    "causal": False,
    "sliding_window": 3,
    "soft_cap": 1.0,
    "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32),
    "sinks": np.array([1.0, 0.5, 2.0, -1.0], np.float32),
}


@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize("name", NOT_TPU)
def test_every_keyword_changes_the_output(name, keyword):
    """No option is silently dropped: each changes every row that it concerns, in decode and in prefill."""
    w = world([(1, 30), (7, 21)])
    step = lay_out(w, name, spec_of(), shape=SHAPE)
    base = cases.run(step, name)[0]
    other = cases.run(step, name, **{keyword: KEYWORDS[keyword]})[0]
    if keyword != "causal":  # one query at the end sees everything anyhow
        assert np.abs(other[0] - base[0]).max() > 1e-3
    assert np.abs(other[2] - base[2]).max() > 1e-3


@pytest.mark.parametrize("name", NOT_TPU)
def test_scales_of_tensor_pools_are_used_and_traced(name):
    """B47: both scales change the output, and a new scale does not recompile."""
    spec = pk.PoolSpec(2, 40, PAGE, 2, 64, "int8", "tensor")
    w = world([(1, 30), (7, 21)])
    scales = {"k_scale": np.float32(0.03), "v_scale": np.float32(0.03)}
    step = lay_out(w, name, spec, shape=SHAPE, **scales)
    program = cases.program(name, (), None, "on_wait")
    base, before = cases.run(step, name)[0], program._cache_size()
    for keyword in scales:
        other = cases.run(step, name, **{keyword: np.float32(0.05)})[0]
        assert np.abs(other[:8] - base[:8]).max() > 1e-3
    assert program._cache_size() == before


@pytest.mark.parametrize("name", NOT_TPU)
def test_out_dtype_and_layer(name):
    """``out_dtype`` is honoured; every layer reads its own pages."""
    w = world([(1, 30), (7, 21)])
    step = lay_out(w, name, spec_of(), shape=SHAPE)
    base = cases.run(step, name)[0]
    out = cases.run(step, name, out_dtype=jnp.bfloat16)[0]
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), base, atol=0.02)
    assert not cases.run(step, name, layer=0)[0].any()  # layer 0 of this pool holds zeros


@pytest.mark.parametrize("name", XLA)
@pytest.mark.parametrize("tile", [1, 2, 3])
def test_tiles_of_few_queries_are_causal(name, tile):
    """A tile of one query of a longer row is no decode row: it must not see the keys behind it."""
    w = world([(5, 5), (1, 9), (7, 30)])
    tables = cases.make_tables(w.rows, spec_of(), np.random.default_rng(0))
    step = lay_out(w, name, spec_of())
    plan = pk.plan([5, 1, 7], [5, 9, 30], tables, spec=spec_of(), target=cases.TARGET[name], query_tile=tile)
    step = dataclasses.replace(step, plan=plan)
    np.testing.assert_allclose(cases.run(step, name)[0], cases.oracle(step)[0], atol=1e-5)
