"""8-bit pools: how far results are from the unquantised ones, by every path that reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases

FORMATS = [
    ("int8", "token_head", 0.012),
    ("float8_e4m3fn", "token_head", 0.05),
    ("float8_e5m2", "token_head", 0.1),
    ("int8", "tensor", 0.12),
    ("float8_e4m3fn", "tensor", 0.12),
]
SCALES = {"k_scale": np.float32(0.125), "v_scale": np.float32(0.05)}
TOKENS, HEADS, KV_HEADS, DIM, PAGE = 24, 4, 2, 64, 8


def relative_error(got, want) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def attention_paths(name: str, spec: pk.PoolSpec, q, k, v) -> dict[str, np.ndarray]:
    """The last chunk's output ``[4, N, H]`` by prefill, chunked prefill, decode, a copied and a swapped pool."""
    interpret = cases.interpret_params(name)
    run = {"implementation": name, "interpret": interpret}
    options = FAST if interpret else None
    scales = SCALES if spec.quant == "tensor" else {}
    copies = {"implementation": "xla" if name == "triton" else name, "interpret": interpret if name == "mosaic_tpu" else False}
    shape = pk.PlanShape(TOKENS, 1, 4)

    def step(pool, q, k, v, plan, scales):
        pool = pk.write_kv(pool, k, v, plan, **run, **scales)
        return pool, pk.paged_attention(q, pool, plan, **run, **scales)

    step = jax.jit(step, compiler_options=options)

    def fed(sizes, table=(3, 1, 5)):
        pool, outs, start = pk.alloc(spec, dtype=jnp.dtype(spec.dtype)), [], 0
        for size in sizes:
            plan = cases.make_plan([(size, start + size)], [np.array(table, np.int32)], spec, name, shape)
            part = [jnp.zeros((TOKENS, *x.shape[1:])).at[:size].set(x[start : start + size]) for x in (q, k, v)]
            pool, out = step(pool, *part, plan, scales)
            outs.append(np.asarray(out)[:size])
            start += size
        return pool, np.concatenate(outs)[-4:]

    pool, prefill = fed([TOKENS])
    plan = cases.make_plan([(4, TOKENS)], [np.array([2, 4, 6], np.int32)], spec, name, shape)
    last = jnp.zeros((TOKENS, HEADS, DIM)).at[:4].set(q[-4:])
    attend = jax.jit(lambda *a: pk.paged_attention(*a[:3], **run, **a[3]), compiler_options=options)
    src, dst = np.array([3, 1, 5]), np.array([2, 4, 6])
    copied = pk.copy_pages(pool, src, dst, **copies)
    host = jax.tree.map(np.array, pk.gather_pages(pool, src, **copies))
    swapped = pk.scatter_pages(pk.alloc(spec, dtype=jnp.dtype(spec.dtype)), dst, jax.tree.map(jnp.asarray, host), **copies)
    return {
        "prefill": prefill,
        "chunks": fed([10, 10, 4])[1],
        "decode": fed([20, 1, 1, 1, 1])[1],
        "copied": np.asarray(attend(last, copied, plan, scales))[:4],
        "swapped": np.asarray(attend(last, swapped, plan, scales))[:4],
    }


FAST = cases.FAST_COMPILE


PARAMS = [
    pytest.param(name, *form, marks=[] if name == "xla" or form == FORMATS[-1] else [pytest.mark.long])
    for name in cases.available("paged_attention")
    for form in FORMATS
]


@pytest.mark.parametrize(("name", "dtype", "quant", "bound"), PARAMS)
def test_scales_reach_every_path(name, dtype, quant, bound):
    """B47: prefill, chunks, decode, copied and swapped pages are all as close to the unquantised result as the format allows,
    and within 1e-5 of each other."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(TOKENS, h, DIM)), jnp.float32) for h in (HEADS, KV_HEADS, KV_HEADS))
    exact = pk.PoolSpec(1, 8, PAGE, KV_HEADS, DIM, "float32")
    plan = pk.plan([TOKENS], [TOKENS], [[3, 1, 5]], spec=exact)
    pool = pk.reference.write_kv(pk.alloc(exact), k, v, plan)
    want = np.asarray(pk.reference.paged_attention(q, pool, plan), np.float64)[-4:]
    results = attention_paths(name, pk.PoolSpec(1, 8, PAGE, KV_HEADS, DIM, dtype, quant), q, k, v)
    for path, got in results.items():
        assert relative_error(got, want) < bound, path
        np.testing.assert_allclose(got, results["prefill"], atol=1e-5, err_msg=path)


def test_error_figures(capsys):
    """Relative L2 error of attention over 1,000 tokens of normal random K and V, by format; int8 is the most exact."""
    rng = np.random.default_rng(1)
    n, dim = 1000, 128
    q, k, v = (rng.normal(size=(t, 2, dim)).astype(np.float32) for t in (8, n, n))
    rows, errors = [(8, n)], {}
    for dtype, quant in [("float32", None), ("bfloat16", None), *((d, s) for d, s, _ in FORMATS)]:
        spec = pk.PoolSpec(2, 66, 16, 2, dim, dtype, quant)
        tables = cases.make_tables(rows, spec, rng)
        scales = {"k_scale": np.float32(0.035), "v_scale": np.float32(0.035)} if quant == "tensor" else {}
        data, pool_scales = cases.fill_pool(rows, tables, spec, [k], [v], 1, 0.0, tuple(scales.values()) or (1.0, 1.0))
        plan = cases.make_plan(rows, tables, spec, "xla")
        step = cases.Step(rows, q, cases.as_pool(data, pool_scales, spec, False), plan, scales, tables)
        errors[dtype, quant] = cases.oracle(step)[0]
    want = errors.pop(("float32", None))
    figures = {key: relative_error(out, want) for key, out in errors.items()}
    with capsys.disabled():
        print("\nrelative L2 error of attention, 1,000 tokens, 128 elements a head")
        for (dtype, quant), error in figures.items():
            print(f"  {dtype:15s} {quant or '':12s} {error:.2e}")
    assert figures["bfloat16", None] < figures["int8", "token_head"] < figures["float8_e4m3fn", "token_head"]
    assert figures["float8_e4m3fn", "token_head"] < figures["float8_e5m2", "token_head"] < 0.1
