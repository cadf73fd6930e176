"""Checks and times the TPU kernels on the TPU at hand, in under ten minutes.

NOT YET RUN on a TPU: its kernels are compiled for TPU v4, v5e, v5p, v6e and 7x and run in interpret mode (``--smoke``) only.
Runs from a plain checkout (jax with libtpu, and numpy; Python 3.11 or newer):

    python scripts/check_tpu.py --out tpu_report            # everything
    python scripts/check_tpu.py --out smoke --smoke         # on any CPU: tiny, interpreted; shows that it works

Three sections with time boxes: correctness against the float64 reference; timing beside the XLA path, as a share of a measured
copy bandwidth; a search over kv and fetch tiles. Exit code 0: every check passed; 1: one failed; 2: no TPU.
"""

import argparse
import json
import os
import pathlib
import platform
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if "--smoke" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402 - the lines above must come first
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import pallas_kernels as pk  # noqa: E402
from pallas_kernels.paged_attention.tiles import Tiles  # noqa: E402
from scripts.gpu_check.clock import Box, Sizes, median_seconds, reason  # noqa: E402
from scripts.gpu_check.workload import Point  # noqa: E402
from tests.kernels import cases  # noqa: E402

SHARES = {"correctness": 0.35, "timing": 0.4, "tiles": 0.25}


def _interpret(sizes: Sizes) -> Any:
    return cases.interpret_params("mosaic_tpu") if sizes.smoke else False


def correctness(sizes: Sizes, box: Box) -> list[dict[str, Any]]:
    """The battery's cases on the device, and writes compared bit by bit over whole pools."""
    rows = [_one_write(sizes, dtype) for dtype in (("int8",) if sizes.smoke else ("bfloat16", "int8", "float8_e4m3fn"))]
    chosen = cases.sample(cases.AXES, 1 if sizes.smoke else 60, lambda c: pk.supports("paged_attention", c.spec, "tpu")[0])
    for case in chosen:
        for mix in case.mixes[:1] if sizes.smoke else case.mixes:
            if not box.left:
                return rows
            row: dict[str, Any] = {"check": f"paged_attention {case.id} {mix}"}
            try:
                step = cases.build(case, mix, "mosaic_tpu")
                want, want_lse = cases.oracle(step)
                static = {n: v for n, v in step.keywords.items() if n in cases.STATIC}
                traced = {n: v for n, v in step.keywords.items() if n not in cases.STATIC}
                out, lse = jax.jit(
                    lambda q, pool, plan, traced, static=static: _attend(q, pool, plan, sizes, **static, **traced)
                )(jnp.asarray(step.q), step.pool, step.plan, traced)
                alive = ~np.isneginf(want_lse)
                row["error"] = float(np.abs(np.asarray(out).astype(np.float64) - want).max(initial=0.0))
                row["allowed"] = cases.tolerance(step, want)
                row["lse_error"] = float(np.abs(np.asarray(lse)[alive] - want_lse[alive]).max(initial=0.0))
                row["passed"] = row["error"] <= row["allowed"] and row["lse_error"] <= 1e-3
            except Exception as error:  # a failing case is a finding, the others still run
                row |= {"passed": False, "reason": reason(error)}
            rows.append(row)
    return rows


def _attend(q, pool, plan, sizes: Sizes, **keywords):
    return pk.paged_attention(
        q, pool, plan, layer=1, return_lse=True, implementation="mosaic_tpu", interpret=_interpret(sizes), **keywords
    )


def _one_write(sizes: Sizes, dtype: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows = [(1, 1 + i) for i in range(4 if sizes.smoke else 40)] + [(45, 75), (5, 9), (33, 64)]
    spec = pk.PoolSpec(2, sum(-(-n // 32) for _, n in rows) + 2, 32, 2, 64, dtype)
    data = rng.integers(-9, 9, spec.data_shape).astype(jnp.dtype(dtype))
    scales = None if spec.scales_shape is None else np.ones(spec.scales_shape, np.float32)
    pool = pk.KVPool(jnp.asarray(data), None if scales is None else jnp.asarray(scales), spec)
    tokens = sum(q for q, _ in rows)
    plan = cases.make_plan(rows, cases.make_tables(rows, spec, rng), spec, "mosaic_tpu", pk.PlanShape(tokens, len(rows), 5))
    k, v = (jnp.asarray(rng.normal(size=(tokens, 2, 64)), jnp.bfloat16) for _ in "kv")
    got = jax.jit(lambda p: pk.write_kv(p, k, v, plan, layer=1, implementation="mosaic_tpu", interpret=_interpret(sizes)))(pool)
    want = pk.write_kv(pool, k, v, plan, layer=1, implementation="reference")
    wrong = int((np.asarray(got.data).view(np.uint8) != np.asarray(want.data).view(np.uint8)).sum())
    return {"check": f"write_kv {dtype}", "error": wrong, "allowed": 0, "passed": wrong == 0}


def copy_bandwidth(sizes: Sizes) -> float:
    """Bytes a second, read and written together, of a large elementwise pass."""
    elements = 2**20 if sizes.smoke else 2**28
    x = jnp.ones(elements, jnp.float32)
    return 2 * 4 * elements / median_seconds(jax.jit(lambda x: x + 1), (x,), sizes.repeats)


def points(sizes: Sizes) -> list[Point]:
    """What to time, the most telling first."""
    if sizes.smoke:
        return [Point(2, 40, page_size=16, dtype="bfloat16", heads=(2, 1), head_dim=64)]
    found = [
        Point(b, c, page_size=128 if d != "bfloat16" else p, dtype=d)
        for b, c in ((64, 2048), (8, 16384), (1, 32768), (64, 128))
        for d, p in (("bfloat16", 16), ("int8", 128), ("float8_e4m3fn", 128))
    ]
    found += [Point(64, 2048, page_size=p) for p in (32, 64, 128)]
    found += [Point(64, 2048, page_size=64, heads=(9, 3), head_dim=64), Point(32, 2048, heads=(32, 32))]
    return [*found, Point(1, 2048, 2048), Point(8, 512, 512), Point(1, 8192, 512)]


def program(point: Point, sizes: Sizes, implementation: str, tiles: Tiles | None = None):
    """``(jitted function, arguments, layers)``: attention over every layer of a pool, one after the other."""
    pages = -(-point.context // point.page_size)
    layers = 1 if sizes.smoke else int(np.clip(sizes.flush_bytes // point.kv_bytes, 1, 32))
    spec = pk.PoolSpec(layers, point.batch * pages + 1, point.page_size, point.heads[1], point.head_dim, point.dtype)
    if spec.num_bytes > sizes.max_pool_bytes:
        raise MemoryError(f"the pool takes {spec.num_bytes / 2**30:.1f} GiB")
    ids = np.random.default_rng(0).permutation(np.arange(1, spec.num_pages)).reshape(point.batch, pages)
    plan = pk.plan(
        [point.query] * point.batch,
        [point.context] * point.batch,
        ids,
        spec=spec,
        target="tpu" if implementation == "mosaic_tpu" else "cpu",
        query_tile=128,
    )
    pool = jax.jit(lambda: pk.KVPool(jnp.ones(spec.data_shape, spec.dtype), _ones(spec), spec))()
    q = jnp.ones((point.batch * point.query, point.heads[0], point.head_dim), jnp.bfloat16)

    def run(q, pool, plan):
        def layer(i, q):
            extra = {"tiles": tiles, "interpret": _interpret(sizes)} if implementation == "mosaic_tpu" else {}
            return pk.paged_attention(q, pool, plan, layer=i, implementation=implementation, **extra)

        return jax.lax.fori_loop(0, layers, layer, q)

    return jax.jit(run), (q, pool, jax.tree.map(jnp.asarray, plan)), layers


def _ones(spec: pk.PoolSpec):
    return None if spec.scales_shape is None else jnp.ones(spec.scales_shape, jnp.float32)


def timing(sizes: Sizes, box: Box) -> list[dict[str, Any]]:
    """Microseconds a layer, GB/s of KV, share of the copy bandwidth, and the XLA path beside it."""
    bandwidth = copy_bandwidth(sizes)
    rows: list[dict[str, Any]] = [{"point": "copy", "GB_per_s": bandwidth / 1e9}]
    for point in points(sizes):
        if not box.left:
            break
        row: dict[str, Any] = {"point": point.id}
        for name in ("mosaic_tpu", "xla"):
            try:
                fn, args, layers = program(point, sizes, name)
                seconds = median_seconds(fn, args, sizes.repeats) / layers
                row[f"{name}_us"] = seconds * 1e6
                if name == "mosaic_tpu":
                    row["GB_per_s"] = point.kv_bytes / seconds / 1e9
                    row["share_of_copy"] = point.kv_bytes / seconds / bandwidth
                    row["TFLOP_per_s"] = point.flops / seconds / 1e12
            except Exception as error:  # too large for this chip, or a finding
                row[f"{name}_reason"] = reason(error)
        rows.append(row)
    return rows


def tiles(sizes: Sizes, box: Box) -> list[dict[str, Any]]:
    """Decode time by kv tile and fetch tile."""
    rows = []
    for point in points(sizes)[:3]:
        for kv in (256, 512, 1024)[: 1 if sizes.smoke else 3]:
            for times in (1, 2, 4)[: 1 if sizes.smoke else 3]:
                if not box.left:
                    return rows
                row: dict[str, Any] = {"point": point.id, "kv_tile": kv, "fetch_tile": kv * times}
                try:
                    fn, args, layers = program(point, sizes, "mosaic_tpu", Tiles(kv_tile=kv, fetch_tile=kv * times))
                    row["us"] = median_seconds(fn, args, sizes.repeats) / layers * 1e6
                except Exception as error:
                    row["reason"] = reason(error)
                rows.append(row)
    return rows


def markdown(results: dict[str, Any]) -> str:
    """The report as tables."""
    lines = [f"# {results['device']}, jax {results['jax']}" + (" (smoke: interpreted on CPU)" if results["smoke"] else "")]
    for section in SHARES:
        rows = results.get(section, [])
        names = list(dict.fromkeys(n for row in rows for n in row))
        lines += ["", f"## {section}", "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        lines += [
            "| "
            + " | ".join(f"{row.get(n, ''):.4g}" if isinstance(row.get(n), float) else str(row.get(n, "")) for n in names)
            + " |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the sections; writes ``report.json`` and ``report.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tpu_report"))
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of the whole run")
    parser.add_argument("--smoke", action="store_true", help="tiny and interpreted, on CPU")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "tpu":
        print(f"JAX sees no TPU (backend: {jax.default_backend()}). Install jax[tpu], or pass --smoke.")
        return 2
    free = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 12 * 2**30)
    sizes = Sizes(args.smoke, 1 if args.smoke else 20, 256 * 2**20, int(0.5 * free))
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    results: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "smoke": args.smoke,
    }
    for section, run in (("correctness", correctness), ("timing", timing), ("tiles", tiles)):
        results[section] = run(sizes, Box(60 * args.minutes * SHARES[section]))
        results["seconds"] = round(time.monotonic() - start, 1)
        (args.out / "report.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.out / "report.md").write_text(markdown(results))
    print((args.out / "report.md").read_text())
    return 0 if all(row["passed"] for row in results["correctness"]) else 1


if __name__ == "__main__":
    sys.exit(main())
