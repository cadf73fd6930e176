"""Steps to time: a pool of a given format and size, shuffled pages, and the jitted programs that read it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels import triton_call
from scripts.gpu_check.clock import Sizes


@dataclasses.dataclass(frozen=True)
class Point:
    """One thing to time.

    Attributes:
        batch: rows.
        context: kv tokens of every row, the step's own included.
        query: query tokens of every row; 1 is decode.
        page_size, dtype, heads, head_dim: the pool's format; heads are (query heads, KV heads).
        split_len: of the plan.
    """

    batch: int
    context: int
    query: int = 1
    page_size: int = 16
    dtype: str = "bfloat16"
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    split_len: int = 512

    @property
    def id(self) -> str:
        """Short label."""
        n, k = self.heads
        return f"{self.dtype} B={self.batch} ctx={self.context} q={self.query} page={self.page_size} {n}/{k}x{self.head_dim}"

    @property
    def kv_bytes(self) -> int:
        """KV and scale bytes that one layer's attention has to read at least once."""
        item = jnp.dtype(self.dtype).itemsize
        scales = 8 * self.heads[1] if item == 1 else 0
        return self.batch * self.context * (2 * self.heads[1] * self.head_dim * item + scales)

    @property
    def flops(self) -> int:
        """Multiplies and adds of the two products, causal: ``4 * N * H`` per (query, visible key) pair."""
        pairs = self.query * self.context - self.query * (self.query - 1) // 2
        return 4 * self.heads[0] * self.head_dim * self.batch * pairs


@dataclasses.dataclass(frozen=True)
class Work:
    """A point as arrays; ``pool`` has enough layers that going through all of them outruns the caches."""

    point: Point
    q: jax.Array
    pool: pk.KVPool
    plan: pk.AttentionPlan
    tables: np.ndarray


def pool_spec(point: Point, sizes: Sizes) -> pk.PoolSpec:
    """The pool for a point: as many layers as needed, and never of a size that the GPU backend refuses."""
    pages = point.batch * -(-point.context // point.page_size) + 1
    layers = int(np.clip(-(-sizes.flush_bytes // max(point.kv_bytes, 1)), 1, 64))
    spec = pk.PoolSpec(layers, max(pages, 2), point.page_size, point.heads[1], point.head_dim, point.dtype)
    if triton_call.offset_hazard(spec):
        per_page = spec.num_layers * spec.page_size * spec.row_elements * spec.itemsize
        spec = dataclasses.replace(spec, num_pages=2**32 // per_page + 2)
    return spec


def make(point: Point, sizes: Sizes) -> Work:
    """Allocates and fills a point's pool on the device.

    Raises:
        MemoryError: the pool is larger than ``sizes.max_pool_bytes``.
    """
    spec = pool_spec(point, sizes)
    if spec.num_bytes > sizes.max_pool_bytes:
        raise MemoryError(
            f"the pool takes {spec.num_bytes / 2**30:.1f} GiB, {sizes.max_pool_bytes / 2**30:.1f} GiB may be used"
        )
    rng = np.random.default_rng(0)
    width = -(-point.context // point.page_size)
    tables = rng.permutation(np.arange(1, spec.num_pages))[: point.batch * width].reshape(point.batch, width).astype(np.int32)
    plan = pk.plan(
        [point.query] * point.batch,
        [point.context] * point.batch,
        tables,
        spec=spec,
        target="gpu",
        split_len=point.split_len,
    )
    q_dtype = jnp.float32 if point.dtype == "float32" else jnp.bfloat16
    q = jax.random.normal(jax.random.key(0), (point.batch * point.query, point.heads[0], point.head_dim), q_dtype)
    return Work(point, q, _filled(spec), jax.tree.map(jnp.asarray, plan), tables)


def _filled(spec: pk.PoolSpec) -> pk.KVPool:
    store = jnp.dtype(spec.dtype)

    def make_data():
        column = jnp.sin(jnp.arange(spec.row_elements, dtype=jnp.float32) * 1.7)
        row = jnp.cos(jnp.arange(spec.page_size, dtype=jnp.float32) * 0.9)
        page = jnp.sin(jnp.arange(spec.data_shape[0], dtype=jnp.float32) * 0.37)
        values = (page[:, None, None] + row[:, None] + column) * (40.0 if spec.quant else 0.5)
        return values.astype(store), None if spec.scales_shape is None else jnp.full(spec.scales_shape, 0.02, jnp.float32)

    data, scales = jax.jit(make_data)()
    return pk.KVPool(data, scales, spec)


def layered(work: Work, implementation: str, interpret: bool, tiles: Any = None, steps: int = 0) -> tuple[Callable, tuple, int]:
    """A jitted program that runs attention on one layer after the other, each on the last one's output.

    Args:
        work: the point.
        implementation: of ``paged_attention``.
        interpret: run the kernel as plain jax operations.
        tiles: as in ``paged_attention``.
        steps: attention calls; 0 takes enough to make the dispatch overhead small.

    Returns:
        ``(program, arguments, attention calls in it)``.
    """
    layers = work.pool.spec.num_layers
    steps = steps or (layers if interpret else max(layers, 16))
    extra = {} if implementation != "triton" else {"interpret": interpret, "tiles": tiles}

    def program(q, pool, plan):
        def body(q, i):
            out = pk.paged_attention(q, pool, plan, layer=i % layers, implementation=implementation, **extra)
            return (q + out * 1e-3).astype(q.dtype), None

        return jax.lax.scan(body, q, jnp.arange(steps, dtype=jnp.int32))[0]

    return jax.jit(program), (work.q, work.pool, work.plan), steps
