"""Cases of the kernel battery: what varies, how a case becomes arrays, and how exact a result has to be."""

import dataclasses
import functools
import importlib.util
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.quant import quantize_np, row_scales_np
from pallas_kernels.reference import attention_float64

SPLIT_LEN, QUERY_TILE = 32, 16
TARGET: dict[str, Any] = {"xla": "cpu", "triton": "gpu", "mosaic_tpu": "tpu", "reference": "cpu"}
GARBAGE_IDS = np.array([10**6, -1], np.int32)

Rows = list[tuple[int, int]]  # (query tokens, kv tokens) of each row


def available(op: str) -> list[str]:
    """Implementations of ``op`` beside the reference."""
    return [n for n in ("xla", "triton", "mosaic_tpu") if importlib.util.find_spec(f"pallas_kernels.{op}.{n}")]


def implementations(op: str, *default: str) -> list[Any]:
    """Test parameters: implementations of ``op``, those outside ``default`` in the long tail (interpreting costs seconds)."""
    return [pytest.param(n, marks=[] if n in default else [pytest.mark.long]) for n in available(op)]


def interpret_params(implementation: str, dma: str = "on_wait") -> Any:
    """How to run an implementation on CPU: TPU kernels with race detection and memory that starts as NaN."""
    if implementation == "triton":
        return True
    if implementation == "mosaic_tpu":
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode=dma)
    return False


MIXES: dict[str, Any] = {
    "decode_edges": lambda ps: [(1, 1), (1, max(ps - 1, 1)), (1, ps), (1, ps + 1)],
    "decode_split": lambda ps: [(1, SPLIT_LEN - 1), (1, SPLIT_LEN), (1, SPLIT_LEN + 1), (1, 2 * SPLIT_LEN + 1)],
    "decode_long_short": lambda ps: [(1, 300), (1, 3), (1, 2), (1, 5)],
    "decode_padded": lambda ps: [(1, 7), (0, 0), (1, ps + 2), (0, 0)],
    "prefill": lambda ps: [(QUERY_TILE - 1, QUERY_TILE - 1), (QUERY_TILE, QUERY_TILE), (QUERY_TILE + 1, QUERY_TILE + 1)],
    "chunked": lambda ps: [(5, 40), (QUERY_TILE, 3 * QUERY_TILE), (2, 2 * ps + 1)],
    "speculative": lambda ps: [(2, 9), (8, 33), (4, 4)],
    "mixed": lambda ps: [(1, 33), (9, 9), (0, 0), (20, 50), (1, 1)],
    "long_prefix": lambda ps: [(3, 200)],
    "one_token": lambda ps: [(1, 1)],
    "empty": lambda ps: [],
}
DTYPES = {
    "f32": ("float32", "float32", None),
    "bf16": ("bfloat16", "bfloat16", None),
    "f16": ("float16", "float16", None),
    "f32_bf16": ("float32", "bfloat16", None),
    "bf16_int8": ("bfloat16", "int8", "token_head"),
    "bf16_e4m3": ("bfloat16", "float8_e4m3fn", "token_head"),
    "bf16_e5m2": ("bfloat16", "float8_e5m2", "token_head"),
    "f32_int8": ("float32", "int8", "token_head"),
    "bf16_int8_tensor": ("bfloat16", "int8", "tensor"),
    "bf16_e4m3_tensor": ("bfloat16", "float8_e4m3fn", "tensor"),
}
EXTRAS: dict[str, dict[str, Any]] = {
    "none": {},
    "window_1": {"sliding_window": 1},
    "window_5": {"sliding_window": 5},
    "window_40": {"sliding_window": 40},
    "window_long": {"sliding_window": 1000},
    "soft_cap": {"soft_cap": 3.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "not_causal": {"causal": False},
    "scale": {"sm_scale": 0.31},
    "all": {"sliding_window": 20, "soft_cap": 5.0, "alibi": True, "sinks": True, "sm_scale": 0.2},
    "cap_sinks_not_causal": {"soft_cap": 5.0, "sinks": True, "causal": False},
}
AXES: dict[str, list[Any]] = {
    "dtypes": list(DTYPES),
    "heads": [(1, 1), (4, 4), (8, 1), (8, 2), (9, 3), (12, 2), (14, 2), (5, 1), (32, 8)],
    "head_dim": [32, 64, 80, 96, 128, 192, 256],
    "page_size": [1, 8, 16, 32, 64, 128, 256],
    "decode_only": [True, False],
    "extras": list(EXTRAS),
}
NUM_SEQS, NUM_TOKENS = 6, 56  # every mix fits, so that a case compiles once
DECODE_MIXES = ("decode_edges", "decode_split", "decode_long_short", "decode_padded", "one_token", "empty")


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the battery: one program, run on every mix of rows that fits it."""

    dtypes: str = "f32"
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    page_size: int = 8
    decode_only: bool = False
    extras: str = "none"
    seed: int = 0

    @property
    def id(self) -> str:
        """A test id that says everything."""
        n, k = self.heads
        kind = "decode" if self.decode_only else "mixed"
        return f"{kind}-{self.dtypes}-{n}x{k}x{self.head_dim}-page{self.page_size}-{self.extras}"

    @property
    def mixes(self) -> list[str]:
        """Names in ``MIXES`` that the program can run."""
        return list(DECODE_MIXES if self.decode_only else MIXES)

    def pages(self, mix: str) -> list[int]:
        """Pages each row of a mix takes."""
        return [-(-n // self.page_size) for _, n in MIXES[mix](self.page_size)]

    @property
    def spec(self) -> pk.PoolSpec:
        """A pool of two layers with room for every mix (and three pages that belong to nobody)."""
        _, dtype, quant = DTYPES[self.dtypes]
        most = max(sum(self.pages(m)) for m in self.mixes) + 3
        return pk.PoolSpec(2, most, self.page_size, self.heads[1], self.head_dim, dtype, quant)

    @property
    def shape(self) -> pk.PlanShape:
        """The shape that every mix is padded to."""
        width = max(max(self.pages(m), default=0) for m in self.mixes) + 2
        return pk.PlanShape(NUM_SEQS if self.decode_only else NUM_TOKENS, NUM_SEQS, width, self.decode_only)


def sample(axes: dict[str, list[Any]], count: int, keep, seed: int = 0) -> list[Case]:
    """``count`` cases (or fewer) that meet every pair of values of two axes as soon as possible; ``keep`` filters them."""
    rng = np.random.default_rng(seed)
    names = list(axes)
    pairs = list(itertools.combinations(range(len(names)), 2))
    sizes = [len(axes[n]) for n in names]
    open_pairs = {(a, x, b, y): None for a, b in pairs for x in range(sizes[a]) for y in range(sizes[b])}  # in order
    cases: list[Case] = []
    for _ in range(count):
        best, best_new = None, []
        waiting = list(open_pairs)
        for attempt in range(12):
            pick = [int(rng.integers(s)) for s in sizes]
            if waiting and attempt < 8:
                a, x, b, y = waiting[int(rng.integers(len(waiting)))]
                pick[a], pick[b] = x, y
            case = Case(**{n: axes[n][i] for n, i in zip(names, pick, strict=True)}, seed=len(cases))
            if not keep(case):
                continue
            new = [p for p in ((a, pick[a], b, pick[b]) for a, b in pairs) if p in open_pairs]
            if best is None or len(new) > len(best_new):
                best, best_new = case, new
        if best is not None:
            cases.append(best)
            for p in best_new:
                del open_pairs[p]
    return cases


@dataclasses.dataclass(frozen=True)
class Step:
    """A case as arrays. ``keys`` and ``values`` are what the pool stands for, per row, float64 ``[n, K, H]``."""

    rows: Rows
    q: np.ndarray
    pool: pk.KVPool
    plan: pk.AttentionPlan
    keywords: dict[str, Any]
    tables: list[np.ndarray]


def make_tables(rows: Rows, spec: pk.PoolSpec, rng: np.random.Generator) -> list[np.ndarray]:
    """A block table per row: shuffled pages, never page 0, garbage ids behind the row's length."""
    ids = rng.permutation(np.arange(1, spec.num_pages)).astype(np.int32)
    tables, used = [], 0
    for _, n in rows:
        count = -(-n // spec.page_size)
        tables.append(np.r_[ids[used : used + count], GARBAGE_IDS])
        used += count
    return tables


def fill_pool(rows: Rows, tables, spec: pk.PoolSpec, keys, values, layer: int, poison: float, scales=(1.0, 1.0)):
    """A pool holding ``keys[r], values[r]`` (float32 ``[n, K, H]``) of every row; all other slots hold ``poison``."""
    number = jnp.dtype(spec.dtype)
    quiet = 127 if spec.dtype == "int8" else poison
    data = np.full(spec.data_shape, quiet).astype(number)
    pool_scales = None if spec.scales_shape is None else np.full(spec.scales_shape, poison, np.float32)
    for r, (_, n) in enumerate(rows):
        both = np.stack([keys[r], values[r]], axis=2)  # [n, K, 2, H]
        position = np.arange(n)
        page = layer * spec.num_pages + tables[r][position // spec.page_size]
        offset = position % spec.page_size
        if spec.quant is None:
            stored = both.astype(number)
        elif pool_scales is None:
            stored = quantize_np(both, np.asarray(scales, np.float32)[:, None], spec.dtype)
        else:
            row_scale = row_scales_np(both, spec.dtype)  # [n, K, 2]
            stored = quantize_np(both, row_scale[..., None], spec.dtype)
            view = pool_scales.reshape(-1, spec.num_kv_heads, 2, spec.page_size)
            view[page, :, :, offset] = row_scale
        data[page, offset] = stored.reshape(n, spec.row_elements)
    return data, pool_scales


def as_pool(data: np.ndarray, scales, spec: pk.PoolSpec, unsigned: bool) -> pk.KVPool:
    """Numpy arrays as a pool, stored as numbers or as unsigned bits."""
    if unsigned and spec.itemsize < 4:
        data = data.view({2: np.uint16, 1: np.uint8}[spec.itemsize])
    return pk.KVPool(jnp.asarray(data), None if scales is None else jnp.asarray(scales), spec)


def keywords_of(extras: str, num_heads: int, quant, rng: np.random.Generator) -> dict[str, Any]:
    """Keyword arguments of ``paged_attention`` for a named set."""
    out = dict(EXTRAS[extras])
    if out.pop("alibi", False):
        out["alibi_slopes"] = rng.uniform(0.02, 0.5, num_heads).astype(np.float32)
    if out.pop("sinks", False):
        out["sinks"] = rng.normal(size=num_heads).astype(np.float32)
    if quant == "tensor":
        out |= {"k_scale": np.float32(0.03), "v_scale": np.float32(0.025)}
    return out


def build(case: Case, mix: str, implementation: str, *, poison: float = np.nan, unsigned: bool = False) -> Step:
    """A mix of rows as arrays, planned for ``implementation``; every slot that no row owns holds ``poison``."""
    rng = np.random.default_rng(1000 + case.seed)
    spec, rows = case.spec, MIXES[mix](case.page_size)
    keywords = keywords_of(case.extras, case.heads[0], spec.quant, rng)
    tables = make_tables(rows, spec, rng)
    keys, values = ([rng.normal(size=(n, spec.num_kv_heads, spec.head_dim)).astype(np.float32) for _, n in rows] for _ in "kv")
    scales = (keywords.get("k_scale", 1.0), keywords.get("v_scale", 1.0))
    data, pool_scales = fill_pool(rows, tables, spec, keys, values, 1, poison, scales)
    plan = make_plan(rows, tables, spec, implementation, case.shape, keywords.get("sliding_window"))
    dtype = jnp.dtype(DTYPES[case.dtypes][0])
    q = rng.normal(size=(case.shape.num_tokens, case.heads[0], case.head_dim)).astype(dtype)
    return Step(rows, q, as_pool(data, pool_scales, spec, unsigned), plan, keywords, tables)


def make_plan(
    rows: Rows, tables, spec: pk.PoolSpec, implementation: str, shape=None, window=None, **keywords
) -> pk.AttentionPlan:
    """The plan of ``rows`` for an implementation, with the battery's small tiles."""
    return pk.plan(
        [q for q, _ in rows],
        [n for _, n in rows],
        tables,
        spec=spec,
        target=TARGET[implementation],
        shape=shape,
        split_len=SPLIT_LEN,
        query_tile=QUERY_TILE,
        sliding_window=window,
        **keywords,
    )


STATIC = ("sliding_window", "soft_cap", "causal", "out_dtype")
# Interpreted kernels need no optimised machine code: compiling is most of what a case costs.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@functools.lru_cache(64)
def program(implementation: str, static: tuple, tiles, dma: str):
    """The jitted call: everything but ``static`` keywords is traced, the layer too."""
    interpret = interpret_params(implementation, dma)

    def attend(q, pool, plan, layer, traced):
        return pk.paged_attention(
            q,
            pool,
            plan,
            layer=layer,
            return_lse=True,
            implementation=implementation,
            tiles=tiles,
            interpret=interpret,
            **dict(static),
            **traced,
        )

    return jax.jit(attend, compiler_options=FAST_COMPILE if interpret else None)


def run(step: Step, implementation: str, *, layer: int = 1, tiles=None, dma: str = "on_wait", **extra):
    """``(out, lse)`` of one implementation as numpy arrays."""
    keywords = step.keywords | extra
    static = tuple(sorted((n, v) for n, v in keywords.items() if n in STATIC))
    traced = {n: v for n, v in keywords.items() if n not in STATIC}
    out, lse = program(implementation, static, tiles, dma)(step.q, step.pool, step.plan, jnp.int32(layer), traced)
    return np.asarray(out), np.asarray(lse)


def options_of(step: Step) -> AttentionOptions:
    """The step's keywords with their defaults filled in."""
    return AttentionOptions(**({"sm_scale": step.pool.spec.head_dim**-0.5} | step.keywords))


def oracle(step: Step, layer: int = 1):
    """``(out, lse)`` in float64."""
    return attention_float64(step.q, step.pool, step.plan, layer, options_of(step))


def plain_attention(q, keys, values, first_position: int, options: AttentionOptions, scales=None) -> np.ndarray:
    """Attention of one row as plain JAX code would write it, every intermediate result in the queries' dtype.

    Args:
        q: ``[t, N, H]``; its dtype is that of the whole computation (products accumulate in float32, as matrix units do).
        keys, values: ``[n, K, H]`` as stored.
        first_position: of the first query.
        options: keywords of the call.
        scales: ``(k [n, K], v [n, K])`` of 8-bit keys and values: they multiply scores and probabilities. None for floats.

    Returns:
        ``[t, N, H]`` in q's dtype.
    """
    dtype, wide = q.dtype, np.float32

    def rounded(x):
        return x.astype(dtype).astype(wide)

    group = q.shape[1] // keys.shape[1]
    k, v = (rounded(np.repeat(x, group, axis=1)) for x in (keys, values))
    scores = rounded(np.einsum("tnh,snh->nts", q.astype(wide), k))
    if scales is not None:
        k_scales, v_scales = (np.repeat(x, group, axis=1).T[:, None].astype(wide) for x in scales)  # [N, 1, n]
        scores = rounded(scores * k_scales)
    scores = rounded(scores * wide(options.sm_scale))
    if options.soft_cap is not None:
        cap = wide(options.soft_cap)
        scores = rounded(rounded(np.tanh(rounded(scores / cap))) * cap)
    distance = np.arange(len(k))[None] - (first_position + np.arange(len(q)))[:, None]  # key - query
    if options.alibi_slopes is not None:
        scores = rounded(scores + rounded(options.alibi_slopes[:, None, None] * distance))
    seen = np.ones_like(distance, bool) if not options.causal else distance <= 0
    if options.sliding_window is not None:
        seen &= distance > -options.sliding_window
    logits = np.where(seen, scores, -np.inf)
    if options.sinks is not None:
        sinks = np.broadcast_to(rounded(options.sinks)[:, None, None], (*logits.shape[:2], 1))
        logits = np.concatenate([logits, sinks], axis=-1)
    weights = rounded(np.exp(rounded(logits - logits.max(-1, keepdims=True))))
    weights = rounded(weights / rounded(weights.sum(-1, keepdims=True)))[..., : len(k)]
    if scales is not None:
        weights = rounded(weights * v_scales)
    return np.einsum("nts,snh->tnh", weights, v).astype(dtype)


def stored_row(pool: pk.KVPool, layer: int, table, n: int, options: AttentionOptions):
    """A row's ``(keys, values, scales)`` as stored, for ``plain_attention``."""
    spec = pool.spec
    if spec.quant is None:
        return (*pk.reference.gather_kv(pool, layer, table, n), None)
    bits = dataclasses.replace(spec, quant="tensor")
    keys, values = pk.reference.gather_kv(pk.KVPool(pool.data, None, bits), layer, table, n, 1.0, 1.0)
    if spec.quant == "tensor":
        return keys, values, [np.full((n, spec.num_kv_heads), x) for x in (options.k_scale, options.v_scale)]
    position = np.arange(n)
    view = np.asarray(pool.scales).reshape(-1, spec.num_kv_heads, 2, spec.page_size)
    scales = view[layer * spec.num_pages + table[position // spec.page_size], :, :, position % spec.page_size]
    return keys, values, (scales[:, :, 0], scales[:, :, 1])


def tolerance(step: Step, want: np.ndarray, layer: int = 1) -> float:
    """The largest error allowed: twice that of plain attention in the queries' dtype, plus 1e-6; in float32 at least 5e-6.

    Source: the rule of the FlashAttention test suite (compare with a reference of the same dtype).
    """
    options = options_of(step)
    worst, start = 0.0, 0
    for r, (query_len, n) in enumerate(step.rows):
        if query_len:
            rows = slice(start, start + query_len)
            keys, values, scales = stored_row(step.pool, layer, step.tables[r], n, options)
            got = plain_attention(step.q[rows], keys, values, n - query_len, options, scales)
            worst = max(worst, float(np.abs(got.astype(np.float64) - want[rows]).max()))
        start += query_len
    return max(2 * worst + 1e-6, 5e-6 if step.q.dtype == np.float32 else 0.0)
