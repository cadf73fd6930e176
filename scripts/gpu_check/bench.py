"""Time of decode, prefill, writes and copies, beside other implementations, as a share of the measured copy bandwidth."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from scripts.gpu_check.clock import Box, Sizes, median_seconds, reason
from scripts.gpu_check.workload import Point, Work, layered, make


def copy_bandwidth(sizes: Sizes) -> float:
    """Bytes a second (read and written together) of a large elementwise pass: what a kernel bound by memory can reach."""
    elements = 2**20 if sizes.smoke else 2**29
    x = jnp.ones(elements, jnp.float32)
    seconds = median_seconds(jax.jit(lambda x: x + 1), (x,), sizes.repeats)
    return 2 * 4 * elements / seconds


def points(sizes: Sizes) -> list[Point]:
    """What to time, the most telling points first."""
    if sizes.smoke:
        return [
            Point(2, 24, dtype="bfloat16", heads=(4, 2), head_dim=32, split_len=16),
            Point(1, 24, query=8, dtype="int8", heads=(4, 2), head_dim=32, split_len=16),
        ]
    main = [
        Point(b, c, dtype=d) for b, c in ((64, 2048), (8, 16384), (1, 32768)) for d in ("bfloat16", "float8_e4m3fn", "int8")
    ]
    prefill = [Point(1, 2048, 2048), Point(8, 512, 512), Point(1, 8192, 512), Point(1, 2048, 2048, dtype="int8")]
    small = [
        Point(b, c) for b, c in ((1, 128), (1, 2048), (8, 2048), (64, 128), (256, 128), (256, 2048), (64, 8192), (256, 8192))
    ]
    pages = [Point(64, 2048, page_size=p, dtype=d) for p in (32, 64) for d in ("bfloat16", "int8")]
    heads = [
        Point(64, 2048, heads=(9, 3), head_dim=64),
        Point(64, 2048, heads=(32, 32)),
        Point(64, 2048, heads=(16, 2), head_dim=256),
    ]
    large = [Point(256, 2048, dtype=d) for d in ("float8_e4m3fn", "int8")] + [Point(16, 32768), Point(64, 32768, dtype="int8")]
    return main + prefill + small + pages + heads + large


def one(point: Point, sizes: Sizes, bandwidth: float) -> dict[str, Any]:
    """A point's table row."""
    work = make(point, sizes)
    program, args, steps = layered(work, "triton", sizes.interpret)
    seconds = median_seconds(program, args, sizes.repeats) / steps
    row: dict[str, Any] = {
        "point": point.id,
        "us": seconds * 1e6,
        "GB_per_s": point.kv_bytes / seconds / 1e9,
        "share_of_copy": point.kv_bytes / seconds / bandwidth,
        "TFLOP_per_s": point.flops / seconds / 1e12,
    }
    others = {"xla_us": xla, "in_tree_us": in_tree, "sdpa_us": dense_sdpa}
    for name, fn in others.items():
        try:
            row[name] = fn(work, sizes) * 1e6
        except Exception as problem:  # another implementation's limits are a remark, not a failure
            row[name] = None
            row.setdefault("remarks", []).append(f"{name}: {reason(problem)}")
    return row


def xla(work: Work, sizes: Sizes) -> float:
    """Seconds of the XLA path."""
    program, args, steps = layered(work, "xla", False, steps=min(work.pool.spec.num_layers, 4))
    return median_seconds(program, args, max(1, sizes.repeats // 4)) / steps


def in_tree(work: Work, sizes: Sizes) -> float:
    """Seconds of JAX's own ``jax.experimental.pallas.ops.gpu.paged_attention`` on the same pages, float pools, decode.

    Raises:
        ValueError: it cannot do this point.
        ImportError: this jax has it no more.
    """
    point, spec = work.point, work.pool.spec
    if point.query > 1 or spec.quant or sizes.smoke:
        raise ValueError("decode over float pages on a GPU only")
    own = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention
    splits, block = 16, 8
    width = -(-work.tables.shape[1] // (splits * block)) * splits * block
    while splits > 1 and width > 2 * work.tables.shape[1]:
        splits //= 2
        width = -(-work.tables.shape[1] // (splits * block)) * splits * block
    tables = np.zeros((point.batch, width), np.int32)
    tables[:, : work.tables.shape[1]] = work.tables
    shape = (*work.pool.data.shape[:2], point.heads[1], 2, point.head_dim)
    split = jax.jit(lambda data: jnp.moveaxis(data.reshape(shape), (2, 3), (1, 0)))(work.pool.data)
    k_pages, v_pages = split[0], split[1]
    layers, steps = spec.num_layers, max(spec.num_layers, 16)

    @jax.jit
    def program(q, k_pages, v_pages, tables, lengths):
        def body(q, i):
            ids = tables + (i % layers) * spec.num_pages
            k, v = jnp.moveaxis(k_pages, 1, 0), jnp.moveaxis(v_pages, 1, 0)
            out = own(q, k, v, ids, lengths, k_splits=splits, pages_per_compute_block=block)
            return (q + out * 1e-3).astype(q.dtype), None

        return jax.lax.scan(body, q, jnp.arange(steps, dtype=jnp.int32))[0]

    lengths = jnp.full((point.batch,), point.context, jnp.int32)
    return median_seconds(program, (work.q, k_pages, v_pages, jnp.asarray(tables), lengths), sizes.repeats) / steps


def dense_sdpa(work: Work, sizes: Sizes) -> float:
    """Seconds of torch's ``scaled_dot_product_attention`` over contiguous bfloat16 K and V of the same lengths.

    Raises:
        ImportError: torch is not there.
        ValueError: torch sees no GPU, or the point has no dense counterpart here.
    """
    torch = importlib.import_module("torch")
    point = work.point
    if not torch.cuda.is_available():
        raise ValueError("torch sees no GPU")
    if 1 < point.query < point.context:
        raise ValueError("a chunk behind a prefix has no causal flag in torch")
    n, k = point.heads
    layers = int(np.clip(sizes.flush_bytes // max(point.kv_bytes, 1) + 1, 1, 16))
    kv = [[torch.randn(point.batch, k, point.context, point.head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
          for _ in range(layers)]  # fmt: skip
    q = torch.randn(point.batch, n, point.query, point.head_dim, device="cuda", dtype=torch.bfloat16)
    call = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=point.query > 1, enable_gqa=n != k)
    times = []
    for _ in range(max(3, sizes.repeats // 2)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for keys, values in kv:
            call(q, keys, values)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / layers)
    del kv, q
    torch.cuda.empty_cache()
    return sorted(times)[len(times) // 2]


def attention(sizes: Sizes, box: Box, bandwidth: float) -> list[dict[str, Any]]:
    """All points that the time box has room for."""
    rows = []
    for point in points(sizes):
        if not box.left:
            rows.append({"point": point.id, "problem": "left out: the section's time is over"})
            continue
        try:
            rows.append(one(point, sizes, bandwidth))
        except Exception as problem:
            rows.append({"point": point.id, "problem": reason(problem)})
    return rows


def mutations(sizes: Sizes, bandwidth: float) -> list[dict[str, Any]]:
    """Pool writes and page copies: time, bytes moved, and whether a donated pool stays in place."""
    heads, dim, pages, tokens, moved = (2, 32, 64, 32, 4) if sizes.smoke else (8, 128, 16384, 8192, 512)
    rows = []
    for dtype in ("bfloat16", "int8"):
        spec = pk.PoolSpec(2, pages, 16, heads, dim, dtype)
        rng = np.random.default_rng(0)
        tables = rng.permutation(np.arange(1, pages))[None, : tokens // 16].astype(np.int32)
        plan = jax.tree.map(jnp.asarray, pk.plan([tokens], [tokens], tables, spec=spec, target="gpu"))
        k = jnp.ones((tokens, heads, dim), jnp.bfloat16)
        ids = rng.permutation(np.arange(1, pages))[: 2 * moved].astype(np.int32)
        src, dst = jnp.asarray(ids[:moved]), jnp.asarray(ids[moved:])
        write = jax.jit(
            lambda pool, k, plan: pk.write_kv(pool, k, k, plan, layer=1, implementation="triton", interpret=sizes.interpret),
            donate_argnums=0,
        )
        copy = jax.jit(lambda pool, src, dst: pk.copy_pages(pool, src, dst, implementation="xla"), donate_argnums=0)
        written = tokens * spec.row_elements * (2 + spec.itemsize)
        for name, fn, args, size in (
            ("write_kv", write, (k, plan), written),
            ("copy_pages", copy, (src, dst), 2 * moved * spec.bytes_per_page),
        ):
            rows.append({"op": name, "dtype": dtype} | _timed_in_place(fn, spec, args, size, sizes, bandwidth))
    return rows


def _timed_in_place(fn, spec: pk.PoolSpec, args, size: int, sizes: Sizes, bandwidth: float) -> dict[str, Any]:
    try:
        pool = pk.alloc(spec)
        memory = fn.lower(pool, *args).compile().memory_analysis()
        state = {"pool": fn(pool, *args)}

        def step():
            state["pool"] = fn(state["pool"], *args)
            return state["pool"]

        seconds = median_seconds(step, (), sizes.repeats)
        return {
            "us": seconds * 1e6,
            "GB_per_s": size / seconds / 1e9,
            "share_of_copy": size / seconds / bandwidth,
            "aliased_bytes": memory.alias_size_in_bytes,
            "pool_bytes": spec.num_bytes,
            "passed": memory.alias_size_in_bytes >= spec.num_bytes,
        }
    except Exception as problem:
        return {"problem": reason(problem), "passed": False}
