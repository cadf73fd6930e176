"""Every GPU kernel on the device against the float64 reference: the test battery's cases, and pools past 2**31 elements."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels import triton_call
from scripts.gpu_check.clock import Box, Sizes, reason
from tests.kernels import cases


def attend(step: cases.Step, interpret: bool, layer: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """``(out, lse)`` of a battery step by the GPU kernels."""
    keywords = step.keywords
    static = {n: v for n, v in keywords.items() if n in cases.STATIC}
    traced = {n: v for n, v in keywords.items() if n not in cases.STATIC}

    def run(q, pool, plan, layer, traced):
        return pk.paged_attention(
            q, pool, plan, layer=layer, return_lse=True, implementation="triton", interpret=interpret, **static, **traced
        )

    out, lse = jax.jit(run)(jnp.asarray(step.q), step.pool, step.plan, jnp.int32(layer), traced)
    return np.asarray(out), np.asarray(lse)


def compare(step: cases.Step, got: np.ndarray, lse: np.ndarray, want: np.ndarray, want_lse: np.ndarray) -> dict[str, Any]:
    """Errors of a result, what is allowed (twice the error of same-dtype attention), and whether it passes."""
    error = float(np.abs(got.astype(np.float64) - want).max(initial=0.0))
    allowed = cases.tolerance(step, want)
    alive = ~np.isneginf(want_lse)
    lse_error = float(np.abs(lse[alive] - want_lse[alive]).max(initial=0.0))
    passed = error <= allowed and lse_error <= 1e-3 and bool((np.isneginf(lse) == ~alive).all()) and not got[~alive].any()
    return {"error": error, "allowed": allowed, "lse_error": lse_error, "passed": passed}


def battery(sizes: Sizes, box: Box) -> list[dict[str, Any]]:
    """Attention cases that cover every pair of dtype, heads, head dim, page size and keyword as early as possible."""
    capability = triton_call.compute_capability(jax.devices()[0].device_kind)

    def keep(case: cases.Case) -> bool:
        old = capability is not None and capability < (8, 9) and case.spec.dtype == "float8_e4m3fn"
        small = not sizes.smoke or (case.head_dim <= 64 and case.heads[0] <= 9)
        return not old and small and pk.supports("paged_attention", case.spec, "gpu")[0]

    rows = []
    for case in cases.sample(cases.AXES, 1 if sizes.smoke else 60, keep):
        for mix in case.mixes[:1] if sizes.smoke else case.mixes:
            if not box.left:
                return rows
            start = time.monotonic()
            row: dict[str, Any] = {"op": "paged_attention", "case": f"{case.id} {mix}"}
            try:
                step = cases.build(case, mix, "triton")
                row |= compare(step, *attend(step, sizes.interpret), *cases.oracle(step))
            except Exception as problem:  # one bad case must not hide the others
                row |= {"passed": False, "problem": reason(problem)}
            rows.append(row | {"seconds": round(time.monotonic() - start, 2)})
    return rows


def write_and_copy(sizes: Sizes, box: Box) -> list[dict[str, Any]]:
    """Pool writes, page copies and swaps against their references; every byte of the pool is compared."""
    rows = []
    for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"):
        for heads, dim, page in ((3, 64, 16), (8, 128, 16), (1, 80, 5)):
            if not box.left or (sizes.smoke and (dtype not in ("bfloat16", "int8") or heads != 3)):
                continue
            row: dict[str, Any] = {"op": "write_kv, copy_pages, swap", "case": f"{dtype} {heads}x{dim} page {page}"}
            try:
                row |= _write_case(pk.PoolSpec(2, 24, page, heads, dim, dtype), sizes.interpret)
            except pk.KernelUnsupportedError as unsupported:
                row |= {"passed": True, "problem": f"refused: {unsupported}"[:300]}
            except Exception as problem:
                row |= {"passed": False, "problem": reason(problem)}
            rows.append(row)
    return rows


def _write_case(spec: pk.PoolSpec, interpret: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    lens = [1, spec.page_size, 2 * spec.page_size + 1]
    rows = [(n, n) for n in lens]
    tables = cases.make_tables(rows, spec, rng)
    shape = pk.PlanShape(sum(lens) + 3, 4, max(len(t) for t in tables))
    plan = pk.plan(lens, lens, tables, spec=spec, target="gpu", shape=shape)
    k, v = (jnp.asarray(rng.normal(size=(shape.num_tokens, spec.num_kv_heads, spec.head_dim)), jnp.float32) for _ in "kv")
    before = pk.alloc(spec)
    want = pk.write_kv(before, k, v, plan, layer=1, implementation="reference")
    got = jax.jit(
        lambda pool, k, v, plan: pk.write_kv(pool, k, v, plan, layer=1, implementation="triton", interpret=interpret),
        donate_argnums=0,
    )(before, k, v, plan)
    result = _same_pools(got, want)
    ids = np.asarray([t[0] for t in tables], np.int32)
    free = np.asarray([i for i in range(1, spec.num_pages) if i not in np.concatenate(tables)][:3], np.int32)
    moved = pk.copy_pages(got, ids, free, implementation="xla")
    saved = pk.gather_pages(moved, free, implementation="xla")
    back = pk.scatter_pages(moved, ids, jax.tree.map(np.asarray, saved), implementation="xla")
    same = all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(_bits(back)), jax.tree.leaves(_bits(moved)), strict=True))
    return result | {"passed": result["passed"] and same}


def _bits(pool: pk.KVPool) -> list[np.ndarray]:
    return [np.asarray(a).view(np.uint8) for a in (pool.data, pool.scales) if a is not None]


def _same_pools(got: pk.KVPool, want: pk.KVPool) -> dict[str, Any]:
    """Equal bytes; in 8-bit pools a value may be one step off where the device's division rounds otherwise."""
    spec = got.spec
    a, b = np.asarray(got.data), np.asarray(want.data)
    if a.dtype.name != spec.dtype:
        a, b = a.view(jnp.dtype(spec.dtype)), b.view(jnp.dtype(spec.dtype))
    differ = int((a.view(np.uint8) != b.view(np.uint8)).sum())
    if spec.quant is None:
        return {"differing_bytes": differ, "passed": differ == 0}
    step = {"int8": 1.0, "float8_e4m3fn": 32.0, "float8_e5m2": 8192.0}[spec.dtype]
    close = bool((np.abs(a.astype(np.float64) - b.astype(np.float64)) <= step).all()) and differ <= a.size // 100 + 1
    scales = np.allclose(np.asarray(got.scales), np.asarray(want.scales), rtol=1e-6)
    return {"differing_bytes": differ, "passed": close and scales}


def far_pages(sizes: Sizes, box: Box) -> list[dict[str, Any]]:
    """Pages behind the 2**31st element, for 16-bit and 8-bit pools: moved there, written there, read there."""
    rows = []
    for dtypes in ("bf16_int8",) if sizes.smoke else ("bf16", "bf16_int8", "bf16_e5m2"):
        if not box.left:
            break
        case = cases.Case(dtypes, (8, 2) if sizes.smoke else (32, 8), 64 if sizes.smoke else 128, 16, False, "none", 5)
        row: dict[str, Any] = {"op": "pages past 2**31 elements", "case": case.id}
        try:
            row |= _far_case(case, sizes)
        except Exception as problem:
            row |= {"passed": False, "problem": reason(problem)}
        rows.append(row)
    return rows


def _far_case(case: cases.Case, sizes: Sizes) -> dict[str, Any]:
    step = cases.build(case, "mixed", "triton", poison=0.0)
    small = step.pool.spec
    per_page = small.num_layers * small.page_size * small.row_elements
    target = 2**16 * small.page_size if sizes.smoke else (2**31 if small.itemsize > 1 else 2**32)
    pages = target // per_page + small.num_pages + 8
    spec = dataclasses.replace(small, num_pages=pages)
    if spec.num_bytes > sizes.max_pool_bytes:
        return {"passed": True, "problem": f"left out: {spec.num_bytes / 2**30:.1f} GiB is more than this device has free"}
    shift = pages - small.num_pages
    ids = np.arange(1, small.num_pages, dtype=np.int32)
    staged = pk.gather_pages(step.pool, ids, implementation="xla")
    put = jax.jit(lambda pool, ids, staged: pk.scatter_pages(pool, ids, staged, implementation="xla"), donate_argnums=0)
    pool = put(pk.alloc(spec, dtype=jnp.dtype(spec.dtype)), jnp.asarray(ids + shift), staged)
    tables = [np.where(t < small.num_pages, t + shift, t) for t in step.tables]
    plan = cases.make_plan(step.rows, tables, spec, "triton", case.shape)
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.normal(size=(case.shape.num_tokens, spec.num_kv_heads, spec.head_dim)), jnp.bfloat16) for _ in "kv")
    write = jax.jit(
        lambda pool, k, v, plan: pk.write_kv(pool, k, v, plan, layer=1, implementation="triton", interpret=sizes.interpret),
        donate_argnums=0,
    )
    pool = write(pool, k, v, plan)
    near = pk.gather_pages(pool, jnp.asarray(ids + shift), implementation="xla")
    compact = pk.scatter_pages(step.pool, ids, near, implementation="xla")
    wanted_pool = pk.write_kv(step.pool, k, v, step.plan, layer=1, implementation="reference")
    written = _same_pools(compact, wanted_pool)
    local = dataclasses.replace(step, pool=compact)
    far = dataclasses.replace(step, pool=pool, plan=plan)
    result = compare(local, *attend(far, sizes.interpret), *cases.oracle(local))
    return result | {"differing_bytes": written["differing_bytes"], "passed": result["passed"] and written["passed"]}


def run(sizes: Sizes, box: Box) -> list[dict[str, Any]]:
    """All of the above; the far pages first, because they matter most."""
    return far_pages(sizes, box) + write_and_copy(sizes, box) + battery(sizes, box)
