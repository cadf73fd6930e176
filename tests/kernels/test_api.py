"""The kernel library's door: checks, refusals, plans made on the device, the adapter, cascades and merging."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels.dispatch import platform_of
from tests.kernels import cases

IMPLEMENTATIONS = cases.available("paged_attention")
SPEC = pk.PoolSpec(2, 30, 8, 2, 64, "float32")


def random_pool(spec=SPEC, seed=0) -> pk.KVPool:
    return pk.KVPool(jnp.asarray(np.random.default_rng(seed).normal(size=spec.data_shape), jnp.float32), None, spec)


def test_errors_name_the_argument():
    pool, plan = random_pool(), pk.plan([1], [9], [[1, 2]], spec=SPEC)
    q = jnp.zeros((1, 4, 64))
    attend = pk.paged_attention
    for match, call in {
        r"q: got shape \[2, 4, 64\], wants \[1,": lambda: attend(jnp.zeros((2, 4, 64)), pool, plan),
        "q: got 3 query heads": lambda: attend(jnp.zeros((1, 3, 64)), pool, plan),
        "q: got dtype int32": lambda: attend(q.astype(jnp.int32), pool, plan),
        "layer: got 2": lambda: attend(q, pool, plan, layer=2),
        "sliding_window: got 0": lambda: attend(q, pool, plan, sliding_window=0),
        "soft_cap: got 0": lambda: attend(q, pool, plan, soft_cap=0.0),
        r"alibi_slopes: got shape \[2\], wants \[4\]": lambda: attend(q, pool, plan, alibi_slopes=jnp.zeros(2)),
        r"sinks: got shape \[4, 1\]": lambda: attend(q, pool, plan, sinks=jnp.zeros((4, 1))),
        "v_scale: got 2.0": lambda: attend(q, pool, plan, v_scale=2.0),
        "out_dtype: got int32": lambda: attend(q, pool, plan, out_dtype=jnp.int32),
        "implementation: got 'cudnn'": lambda: attend(q, pool, plan, implementation="cudnn"),  # pyright: ignore
        "pool.data: got shape": lambda: attend(q, dataclasses.replace(pool, data=pool.data[:-1]), plan),
        r"block_tables\[0, 1\]: got page 30": lambda: pk.plan([1], [9], [[1, 30]], spec=SPEC),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_a_plan_for_a_narrow_window_refuses_a_wider_one():
    """A GPU plan skips what lies behind its window, so attention with a wider window (or none) would lose keys."""
    plan = pk.plan([1], [200], [list(range(1, 26))], spec=SPEC, target="gpu", sliding_window=16, split_len=32)
    for window in (None, 17):
        with pytest.raises(ValueError, match="leaves out what lies behind a window of 16"):
            pk.paged_attention(jnp.zeros((1, 4, 64)), random_pool(), plan, sliding_window=window)


def test_differentiation_is_refused():
    pool, plan = random_pool(), pk.plan([1], [9], [[1, 2]], spec=SPEC)
    for argument in (0, 1):
        with pytest.raises(NotImplementedError, match="no gradient"):
            jax.grad(lambda *a: pk.paged_attention(a[0], pk.KVPool(a[1], None, SPEC), plan).sum(), argument)(
                jnp.ones((1, 4, 64)), pool.data
            )


def test_auto_runs_the_platforms_own_and_explicit_ones_never_fall_back():
    """On CPU "auto" is the XLA path; an explicit kernel that cannot run here raises instead of running something else."""
    pool = random_pool()
    plan = pk.plan([1], [9], [[1, 2]], spec=SPEC)
    q = jnp.ones((1, 4, 64))
    auto, xla = (pk.paged_attention(q, pool, plan, implementation=i) for i in ("auto", "xla"))
    np.testing.assert_array_equal(auto, xla)
    assert platform_of(q) == "cpu"
    for name in ("triton", "mosaic_tpu"):
        with pytest.raises(Exception, match=r"(?i)interpret|plan|tpu|gpu|triton"):
            jax.block_until_ready(pk.paged_attention(q, pool, plan, implementation=name))
    with pytest.raises(pk.KernelUnsupportedError, match="interpret"):
        pk.paged_attention(q, pool, plan, interpret=True)


def test_supports_says_why_not():
    assert pk.supports("paged_attention", SPEC, "cpu") == (True, "")
    assert pk.supports("paged_attention", SPEC, "h100") == (True, "")
    odd = dataclasses.replace(SPEC, num_kv_heads=1, head_dim=40)
    for spec, target, word in (
        (odd, "v5e", "multiple of 128"),
        (dataclasses.replace(SPEC, page_size=4), "tpu", "page_size"),
        (dataclasses.replace(SPEC, dtype="float8_e4m3fn"), "a100", "float8_e4m3fn"),
        (pk.PoolSpec(32, 3000, 16, 8, 128, "int8"), "gpu", "GiB"),
    ):
        ok, reason = pk.supports("paged_attention", spec, target)
        assert not ok
        assert word in reason
    with pytest.raises(ValueError, match="target: got 'v99'"):
        pk.supports("paged_attention", SPEC, "v99")
    with pytest.raises(ValueError, match="op: got 'softmax'"):
        pk.supports("softmax", SPEC, "cpu")


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("target", ["cpu", "gpu", "tpu"])
def test_plan_decode_makes_the_same_plan_inside_jit(target, window):
    """Traced lengths and tables give the arrays that the host plan has (padding rows at the end)."""
    lens = np.array([1, 9, 17, 16, 30, 0], np.int32)
    tables = np.random.default_rng(0).permutation(np.arange(1, 25)).reshape(6, 4).astype(np.int32)
    keywords = {"spec": SPEC, "target": target, "split_len": 16, "sliding_window": window}
    want = pk.plan([1] * 5 + [0], lens, tables, shape=pk.PlanShape(6, 6, 4, True), **keywords)
    got = jax.jit(lambda n, t: pk.plan_decode(n, t, **keywords))(lens, tables)
    for field in dataclasses.fields(pk.AttentionPlan):
        a, b = getattr(want, field.name), getattr(got, field.name)
        if field.name == "query_start_loc":
            a, b = a[:6], b[:6]  # the padding row's token stays in its place
        if field.name == "num_counts":
            a, b = a[1:], b[1:]
        np.testing.assert_array_equal(a, b, err_msg=field.name) if hasattr(a, "shape") else None
        assert (a is None) == (b is None)


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "reference"])
def test_adapter_for_separate_pages_inside_jit(name):
    """Head-major page arrays, a padded table and lengths (0 among them), all traced: equal to dense attention."""
    rng = np.random.default_rng(0)
    k_pages, v_pages = (rng.normal(size=(2, 12, 8, 64)).astype(np.float32) for _ in "kv")
    q = rng.normal(size=(3, 4, 64)).astype(np.float32)
    tables, lens = np.array([[3, 5, 10**6], [7, -1, -1], [9, 2, 1]], np.int32), np.array([11, 0, 24], np.int32)
    k_pages[:, 0] = np.nan
    interpret = cases.interpret_params(name)
    attend = jax.jit(
        lambda *a: pk.paged_attention_kv(*a, split_len=16, implementation=name, interpret=interpret, return_lse=True)
    )
    out, lse = attend(q, k_pages, v_pages, tables, lens)
    for b, n in enumerate(lens):
        if not n:
            assert not np.asarray(out[b]).any()
            assert np.isneginf(lse[b]).all()
            continue
        pages = tables[b, : -(-n // 8)]
        k, v = (np.concatenate(list(x[:, pages].transpose(1, 0, 2, 3)), axis=1)[:, :n] for x in (k_pages, v_pages))
        scores = np.einsum("nh,nsh->ns", q[b], np.repeat(k, 2, 0)) / 8
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.einsum("ns,nsh->nh", weights / weights.sum(-1, keepdims=True), np.repeat(v, 2, 0))
        np.testing.assert_allclose(out[b], want, atol=5e-6)


def test_adapter_refuses_wrong_shapes():
    pages, q = jnp.zeros((2, 12, 8, 64)), jnp.zeros((3, 4, 64))
    tables, lens = jnp.zeros((3, 2), jnp.int32), jnp.ones(3, jnp.int32)
    for match, args in {
        "v_pages: got": (q, pages, pages[:1], tables, lens),
        "block_tables: got": (q, pages, pages, tables[:2], lens),
        "lengths: got": (q, pages, pages, tables, lens[:1]),
        "k_pages: got": (q, pages[0], pages[0], tables, lens),
    }.items():
        with pytest.raises(ValueError, match=match):
            pk.paged_attention_kv(*args)
    with pytest.raises(TypeError, match="causal"):
        pk.paged_attention_kv(q, pages, pages, tables, lens, causal=True)


CASCADE = {
    "query_lens": [1, 4, 2, 3, 1],
    "seq_lens": [25, 32, 21, 11, 3],
    "block_tables": [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7], [9, 10], [11]],
}


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "reference"])
def test_cascade_equals_the_flat_step(name):
    """A group of three rows with two shared pages, and two rows without: same result, sinks and soft cap included."""
    target = cases.TARGET[name]
    flat = pk.plan(*CASCADE.values(), spec=SPEC)
    levels = pk.plan_cascade(**CASCADE, group_sizes=[3, 1, 1], prefix_pages=[2, 0, 0], spec=SPEC, target=target)
    np.testing.assert_array_equal(levels[1].slot_mapping, flat.slot_mapping)
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(11, 4, 64)), jnp.float32)
    keywords = {"sinks": jnp.asarray(rng.normal(size=4), jnp.float32), "soft_cap": 3.0, "layer": 1, "return_lse": True}
    pool = random_pool()
    want = pk.reference.paged_attention(q, pool, flat, **keywords)
    attend = jax.jit(
        lambda q, pool, levels: pk.cascade_attention(
            q, pool, levels, implementation=name, interpret=cases.interpret_params(name), **keywords
        ),
        compiler_options=cases.FAST_COMPILE if cases.interpret_params(name) else None,
    )
    got = pk.reference.cascade_attention(q, pool, levels, **keywords) if name == "reference" else attend(q, pool, levels)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_cascade_refuses_what_it_cannot_do():
    for change, match in (
        ({"group_sizes": [2, 1, 1]}, "group_sizes: got"),
        ({"prefix_pages": [3, 0, 0]}, r"prefix_pages\[0\]: got 3, but row 0 has only 24 tokens|does not begin"),
        ({"prefix_pages": [2, 2, 0]}, r"prefix_pages\[1\]"),
    ):
        with pytest.raises(ValueError, match=match):
            pk.plan_cascade(**CASCADE, **({"group_sizes": [3, 1, 1], "prefix_pages": [2, 0, 0], "spec": SPEC} | change))
    levels = pk.plan_cascade(**CASCADE, group_sizes=[3, 1, 1], prefix_pages=[2, 0, 0], spec=SPEC)
    with pytest.raises(pk.KernelUnsupportedError, match="sliding_window"):
        pk.cascade_attention(jnp.zeros((11, 4, 64)), random_pool(), levels, sliding_window=8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.just(-np.inf), st.floats(-30, 30)), min_size=3, max_size=3), st.integers(0, 2**31))
def test_merging_is_associative_and_safe(lses, seed):
    """(a + b) + c = a + (b + c) for any log-sum-exps, -inf among them; merging with nothing changes nothing."""
    rng = np.random.default_rng(seed)
    parts = [(jnp.asarray(rng.normal(size=(1, 8)), jnp.float32), jnp.full((1,), x, jnp.float32)) for x in lses]
    a, b, c = parts
    left, right = pk.merge_states(*pk.merge_states(*a, *b), *c), pk.merge_states(*a, *pk.merge_states(*b, *c))
    np.testing.assert_allclose(left[1], right[1], atol=1e-5)
    if not np.isneginf(left[1]).any():
        used = [p for p in parts if not np.isneginf(p[1][0])]
        weights = np.exp([float(p[1][0]) - float(left[1][0]) for p in used])
        want = sum(w * np.asarray(p[0], np.float64) for w, p in zip(weights, used, strict=True))
        for got in (left, right):
            np.testing.assert_allclose(got[0], want, atol=1e-4)
    empty = (jnp.zeros((1, 8)), jnp.full((1,), -jnp.inf))
    for got, want in zip(pk.merge_states(*a, *empty), a, strict=True):
        np.testing.assert_allclose(
            got, want if np.isfinite(lses[0]) else np.zeros_like(got) if got.ndim == 2 else want, atol=1e-6
        )


def test_bytes_per_token_match_known_models():
    """R1: KV bytes per token of published models, to the byte; 8-bit values take exactly half."""
    for layers, heads, dim, want in (
        (40, 40, 128, 819_200),  # OPT-13B
        (64, 72, 128, 2_359_296),  # OPT-66B
        (96, 96, 128, 4_718_592),  # OPT-175B
        (80, 8, 128, 327_680),  # Llama-3.1-70B
    ):
        spec = pk.PoolSpec(layers, 2, 16, heads, dim, "bfloat16")
        assert spec.bytes_per_token == want
        assert dataclasses.replace(spec, dtype="float8_e4m3fn", quant="tensor").bytes_per_token * 2 == want
    small = pk.PoolSpec(2, 5, 8, 2, 64, "int8")
    pool = pk.alloc(small)
    assert sum(x.nbytes for x in jax.tree.leaves(pool)) == small.num_bytes


def test_rows_that_write_the_same_slot_are_refused():
    with pytest.raises(ValueError, match="rows 0 and 2 both write slot 3 of page 5"):
        pk.plan([1, 2, 1], [4, 2, 4], [[5], [6], [5]], spec=SPEC)
    pk.plan([1, 2, 1], [4, 2, 4], [[5], [6], [5]], spec=SPEC, writes=False)


def test_an_explicit_kernel_on_the_wrong_platform_says_what_to_do():
    pool = pk.alloc(SPEC)
    kv = jnp.zeros((1, SPEC.num_kv_heads, SPEC.head_dim), jnp.bfloat16)
    for name, target in (("triton", "gpu"), ("mosaic_tpu", "tpu")):
        plan = pk.plan([1], [3], [[1]], spec=SPEC, target=target)
        for call in (
            lambda name=name, plan=plan: pk.paged_attention(kv, pool, plan, implementation=name),
            lambda name=name, plan=plan: pk.write_kv(pool, kv, kv, plan, implementation=name),
        ):
            with pytest.raises(pk.KernelUnsupportedError, match='the pool is on "cpu"; pass interpret=True'):
                call()


def test_page_ids_may_be_lists():
    pool = pk.alloc(SPEC)
    assert pk.copy_pages(pool, [1], [2]).data.shape == pool.data.shape
    pages = pk.gather_pages(pool, [1, 2])
    assert pk.scatter_pages(pool, [3, 4], pages).data.shape == pool.data.shape
    assert pk.gather_pages(pool, []).data.shape[1] == 0
    with pytest.raises(ValueError, match=r"src: got float64\[1\], wants int32"):
        pk.copy_pages(pool, [1.5], [2])


def test_lengths_beyond_the_table_are_refused():
    pages = jnp.zeros((2, 4, 16, 64), jnp.float32)
    with pytest.raises(ValueError, match="lengths: got 1000, wants 0 to 32"):
        pk.paged_attention_kv(jnp.zeros((1, 2, 64)), pages, pages, jnp.zeros((1, 2), jnp.int32), jnp.array([1000]))


def test_plans_take_integers_of_32_bits_and_no_others():
    wide = np.array([[2**32 + 5]])
    for match, call in {
        "block_tables: got 4294967301, wants 32-bit": lambda: pk.plan([1], [1], wide, spec=SPEC),
        "seq_lens: got 4294967297, wants 32-bit": lambda: pk.plan([1], np.array([2**32 + 1]), [[1]], spec=SPEC),
        "seq_lens: got float64, wants integers": lambda: pk.plan([1], [2.9], [[1]], spec=SPEC),
        r"block_tables\[0\]: got float64": lambda: pk.plan([1], [1], [[1.9]], spec=SPEC),
        r"block_tables: got shape \[1, 1, 1\]": lambda: pk.plan([1], [1], np.zeros((1, 1, 1), np.int32), spec=SPEC),
        "query_tile: got -4": lambda: pk.plan([3], [3], [[1]], spec=SPEC, query_tile=-4),
        "split_len: got 0": lambda: pk.plan([3], [3], [[1]], spec=SPEC, target="gpu", split_len=0),
        "target: got 'cuda'": lambda: pk.plan([1], [1], [[1]], spec=SPEC, target="cuda"),  # pyright: ignore
        'target: got "?5': lambda: pk.plan_decode(jnp.ones(1, int), jnp.ones((1, 1), int), spec=SPEC, target=5),  # pyright: ignore
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_values_that_are_known_are_checked():
    pool, plan = random_pool(), pk.plan([1], [9], [[1, 2]], spec=SPEC)
    q, kv = jnp.zeros((1, 4, 64)), jnp.zeros((1, 2, 64))
    tensor = dataclasses.replace(SPEC, dtype="int8", quant="tensor")
    eight = pk.alloc(tensor)
    for match, call in {
        "soft_cap: got inf": lambda: pk.paged_attention(q, pool, plan, soft_cap=float("inf")),
        "layer: got -1": lambda: pk.write_kv(pool, kv, kv, plan, layer=jnp.int32(-1)),
        "layer: got 7": lambda: pk.paged_attention(q, pool, plan, layer=np.array(7)),
        "layer: got 'a'": lambda: pk.paged_attention(q, pool, plan, layer="a"),
        "k_scale: got nan": lambda: pk.write_kv(eight, kv, kv, plan, k_scale=np.nan, v_scale=1.0),
        "v_scale: got -1": lambda: pk.paged_attention(q, eight, plan, k_scale=1.0, v_scale=-1.0),
        "dst: got page 3 twice": lambda: pk.copy_pages(pool, [1, 3], [3, 3]),
        "dst: got page 3, which is also a source": lambda: pk.copy_pages(pool, [1, 3], [3, 4]),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
