"""What the two TPU attention kernels share: lanes of a head, page copies, masks in packed words, one online-softmax step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compat import device_kind
from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool, PoolSpec

LANES = 128
KV_TILE = 512
FETCH_BYTES = 2 * 2**20  # a buffer of pages is filled up to about this size
EMPTY = -1e30  # running maximum before any key
MASKED = -2e30  # score of a key that is not seen: exp(MASKED - EMPTY) is 0, so that even a row of none sums to 0
SMEM_WORDS = 250_000  # scalar memory is 1 MiB; the compiler keeps some for itself
VMEM_LIMIT = 100 * 2**20
VMEM_BYTES = {"TPU v4": 16 * 2**20, "TPU v5": 64 * 2**20, "TPU v5p": 64 * 2**20, "TPU7x": 64 * 2**20}


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Which lanes of a token's row a kernel multiplies for each KV head.

    A head's K starts at lane ``2 * H * head`` and its V at ``H`` lanes further. Where these are not multiples of 128, the
    kernel takes the whole 128-lane tiles around them: the query is padded with zeros to the tiles' width, so the product is
    the same, and of the output only the head's own lanes are kept. No lane is ever shifted in the kernel.

    Attributes:
        width: lanes multiplied for each head.
        k_start, v_start: first lane taken, a multiple of 128, one per head.
        k_skip, v_skip: where the head's own values begin in these lanes.
    """

    width: int
    k_start: tuple[int, ...]
    v_start: tuple[int, ...]
    k_skip: tuple[int, ...]
    v_skip: tuple[int, ...]


@functools.lru_cache
def head_lanes(spec: PoolSpec) -> Lanes:
    """The lanes of each KV head of ``spec`` (see ``Lanes``)."""
    dim, row = spec.head_dim, spec.row_elements
    k_first = [2 * dim * h for h in range(spec.num_kv_heads)]
    v_first = [2 * dim * h + dim for h in range(spec.num_kv_heads)]
    width = max(-(-(f + dim) // LANES) * LANES - f // LANES * LANES for f in k_first + v_first)
    starts = [min(f // LANES * LANES, row - width) for f in k_first + v_first]
    skips = [f - s for f, s in zip(k_first + v_first, starts, strict=True)]
    n = spec.num_kv_heads
    return Lanes(width, tuple(starts[:n]), tuple(starts[n:]), tuple(skips[:n]), tuple(skips[n:]))


def check_pool(op: str, spec: PoolSpec) -> None:
    """Refuses pools whose rows or pages the TPU cannot address in whole memory tiles.

    Raises:
        KernelUnsupportedError: with the reason and what would work.
    """
    instead = 'use implementation="xla", or '
    if spec.row_elements % LANES:
        raise KernelUnsupportedError(
            f"{op}: a token's row has 2 * num_kv_heads * head_dim = {spec.row_elements} elements, TPU kernels want a "
            f"multiple of {LANES}; {instead}allocate the pool with more (unused) KV heads"
        )
    if spec.page_size % 8:
        raise KernelUnsupportedError(
            f"{op}: page_size {spec.page_size} is no multiple of 8, which TPU copies want; {instead}a page_size of 16 or more"
        )
    if spec.dtype == "float16":
        raise KernelUnsupportedError(f'{op}: TPUs have no float16; {instead}allocate the pool with dtype="bfloat16"')


def check_plan(op: str, plan: AttentionPlan) -> None:
    """Refuses plans that lack the TPU's work lists or do not fit scalar memory.

    Raises:
        ValueError: the plan was made for another target.
        KernelUnsupportedError: it does not fit, with what would.
    """
    if plan.write_groups is None:
        raise ValueError(f'{op}: plan: was not made for TPU; make it with plan(..., target="tpu")')
    words = plan.page_ids.shape[0] + 3 * plan.shape.num_seqs + 4 * plan.query_tiles.shape[0]
    if words > SMEM_WORDS:
        raise KernelUnsupportedError(
            f"{op}: the step's page lists take {words} words of scalar memory, a TPU core has room for {SMEM_WORDS}; use "
            f"larger pages (now {plan.page_size} tokens), fewer sequences ({plan.shape.num_seqs}) or shorter ones "
            f"({plan.shape.max_pages} pages)"
        )


def tile_sizes(spec: PoolSpec, tiles: Tiles | None) -> tuple[int, int]:
    """Tokens of a compute tile and of a fetch, multiples of the page and of each other.

    Args:
        spec: the pool.
        tiles: what the caller asked for; ``kv_tile`` and ``fetch_tile`` are rounded to whole pages.

    Returns:
        ``(kv_tile, fetch_tile)``.
    """
    page = spec.page_size
    kv = tiles.kv_tile if tiles and tiles.kv_tile else KV_TILE
    kv = max(kv // page, 1) * page
    if not (tiles and tiles.kv_tile):
        room = VMEM_BYTES.get(device_kind(), VMEM_LIMIT) // 2  # for the two buffers
        while 2 * kv * spec.row_elements * spec.itemsize > room and kv % (2 * page) == 0:
            kv //= 2
    if tiles and tiles.fetch_tile:
        return kv, max(tiles.fetch_tile // kv, 1) * kv
    times = max(1, min(8, FETCH_BYTES // (kv * spec.row_elements * spec.itemsize)))
    return kv, kv * times


def check_vmem(op: str, needed: int, tiles: Tiles | None) -> int:
    """The VMEM limit to hand to the compiler.

    Args:
        op: for the message.
        needed: bytes of buffers and scratch of the kernel.
        tiles: may carry ``vmem_limit_bytes``.

    Raises:
        KernelUnsupportedError: the buffers alone do not fit.
    """
    limit = tiles.vmem_limit_bytes if tiles and tiles.vmem_limit_bytes else None
    if limit is None:
        limit = min(VMEM_LIMIT, VMEM_BYTES.get(device_kind(), VMEM_LIMIT))
    if needed > limit:
        raise KernelUnsupportedError(
            f"{op}: its buffers take {needed / 2**20:.1f} MiB of VMEM, there are {limit / 2**20:.0f}; pass smaller "
            "tiles=Tiles(kv_tile=..., fetch_tile=...) or plan with a smaller query_tile"
        )
    return limit


def operand_dtype(q_dtype, spec: PoolSpec):
    """The dtype of queries and probabilities in the matrix unit: float32 if queries or pool are, else bfloat16."""
    return jnp.dtype(jnp.bfloat16 if q_dtype == jnp.bfloat16 and spec.dtype != "float32" else jnp.float32)


def pad_query(q: jax.Array, skips: tuple[int, ...], width: int) -> jax.Array:
    """Puts each KV head's queries ``[..., K, G, H]`` at its lanes: ``[..., K, G, width]``, zeros elsewhere."""
    if width == q.shape[-1]:
        return q
    room = width - q.shape[-1]
    if len(set(skips)) == 1:
        return jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(skips[0], room - skips[0])])
    heads = [jnp.pad(q[..., h, :, :], [(0, 0)] * (q.ndim - 2) + [(s, room - s)]) for h, s in enumerate(skips)]
    return jnp.stack(heads, axis=-3)


def take_output(o: jax.Array, skips: tuple[int, ...], dim: int) -> jax.Array:
    """The head's own lanes of ``[..., K, G, width]``: ``[..., K, G, H]``."""
    if o.shape[-1] == dim:
        return o
    if len(set(skips)) == 1:
        return o[..., skips[0] : skips[0] + dim]
    return jnp.stack([o[..., h, :, s : s + dim] for h, s in enumerate(skips)], axis=-3)


def per_row_heads(values: jax.Array | None, heads: int, rows: int, repeat: int) -> jax.Array | None:
    """A number per query head ``[N]`` as ``[K, rows, 128]``: each KV head's ``G`` numbers ``repeat`` times, then zeros."""
    if values is None:
        return None
    grouped = jnp.tile(values.astype(jnp.float32).reshape(heads, -1), (1, repeat))
    grouped = jnp.pad(grouped, ((0, 0), (0, rows - grouped.shape[1])))
    return jnp.broadcast_to(grouped[:, :, None], (heads, rows, LANES))


def scalars(pool: KVPool, layer, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """The traced numbers of a call: ``([first page of the layer], [score factor, value factor])``."""
    first = jnp.reshape(jnp.asarray(layer, jnp.int32) * pool.spec.num_pages, (1,))
    k = 1.0 if options.k_scale is None else options.k_scale
    v = 1.0 if options.v_scale is None else options.v_scale
    factors = jnp.stack([jnp.asarray(options.sm_scale, jnp.float32) * k, jnp.asarray(v, jnp.float32)])
    return first, factors.astype(jnp.float32)


def word_mask(first, last, tokens: int, width: int, itemsize: int) -> jax.Array:
    """Bits that keep rows ``first <= row < last`` of packed data viewed as 32-bit words.

    Args:
        first, last: int32 scalars, may lie outside of the tile.
        tokens: rows of the tile.
        width: lanes.
        itemsize: bytes of an element; ``4 // itemsize`` rows share a word, the first in its lowest bits.

    Returns:
        uint32 ``[tokens * itemsize // 4, width]``.
    """
    per_word = 4 // itemsize
    row = per_word * lax.broadcasted_iota(jnp.int32, (tokens // per_word, width), 0)

    def below(bound):
        count = jnp.clip(bound - row, 0, per_word)
        if per_word == 1:
            return jnp.where(count == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
        bits = (jnp.minimum(count, per_word - 1) * (8 * itemsize)).astype(jnp.uint32)
        return jnp.where(count == per_word, jnp.uint32(0xFFFFFFFF), (jnp.uint32(1) << bits) - jnp.uint32(1))

    return below(last) if first is None else below(last) & ~below(first)


def keep_rows(tile: jax.Array, mask: jax.Array) -> jax.Array:
    """Zeroes the rows of a (packed) tile that ``mask`` leaves out; whatever they held, NaN included, is gone."""
    return pltpu.bitcast(pltpu.bitcast(tile, jnp.uint32) & mask, tile.dtype)


def dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """``a @ b`` over ``b``'s axis ``contract`` in float32. An 8-bit ``b`` goes into the matrix unit unconverted."""
    if a.dtype == jnp.float32 and b.dtype != jnp.float32:
        b = b.astype(jnp.float32)
    elif b.dtype.name.startswith("float8") and device_kind() == "TPU v4":
        b = b.astype(jnp.float32).astype(a.dtype)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def softmax_step(scores, seen, v, v_scale, dtype, m_ref, l_ref, acc_ref, index) -> None:
    """Adds one tile of keys to a head's running softmax.

    Args:
        scores: float32 ``[R, kv_tile]``, scaled and biased.
        seen: bool, same shape.
        v: ``[kv_tile, width]``, unseen rows zeroed.
        v_scale: float32 ``[1, kv_tile]`` with zeros for unseen tokens, or None.
        dtype: of the probabilities in the product.
        m_ref, l_ref: float32 ``[K, R, 128]``, running maximum and sum (the same number in every lane).
        acc_ref: float32 ``[K, R, width]``.
        index: the head.

    Source: Milakov and Gimelshein 2018, online normaliser calculation for softmax.
    """
    scores = jnp.where(seen, scores, MASKED)
    old = m_ref[index]
    new = jnp.maximum(old, jnp.broadcast_to(jnp.max(scores, axis=1, keepdims=True), old.shape))
    p = jnp.exp(scores - new[:, :1])
    decay = jnp.exp(old - new)
    l_ref[index] = l_ref[index] * decay + jnp.broadcast_to(jnp.sum(p, axis=1, keepdims=True), old.shape)
    m_ref[index] = new
    if v_scale is not None:
        p = p * v_scale
    acc_ref[index] = acc_ref[index] * decay[:, :1] + dot(p.astype(dtype), v, 0)


def finish(m, total, acc, sink, v_factor) -> tuple[jax.Array, jax.Array]:
    """The output and log-sum-exp of a head from its running softmax; rows that saw no key give 0 and -inf.

    Args:
        m, total: float32 ``[R, 128]``, running maximum and sum.
        acc: float32 ``[R, width]``.
        sink: float32 ``[R, 128]`` or None.
        v_factor: scalar scale of the values.

    Returns:
        ``(out [R, width], lse [R, 128])``, float32.
    """
    some = total > 0
    if sink is not None:
        top = jnp.maximum(m, sink)
        decay = jnp.exp(m - top)
        total = total * decay + jnp.exp(sink - top)
        acc = acc * decay[:, :1]
        m = top
    safe = jnp.where(some, total, 1.0)
    out = jnp.where(some[:, :1], acc * v_factor / safe[:, :1], 0.0)
    return out, jnp.where(some, m + jnp.log(safe), -jnp.inf)


def for_each_head(lanes: Lanes, fn) -> None:
    """Calls ``fn(head, k_start, v_start, same)`` for every KV head: in a loop where all heads lie alike, else unrolled.

    Args:
        lanes: the lanes of each head.
        fn: called with the head's number (traced in a loop), the first lanes of its K and V, and whether these are the same.
    """
    heads = len(lanes.k_start)
    same = lanes.k_start == lanes.v_start
    pitch = lanes.k_start[-1] // max(heads - 1, 1)
    gap = lanes.v_start[0] - lanes.k_start[0]
    regular = all(k == pitch * h and v == k + gap for h, (k, v) in enumerate(zip(lanes.k_start, lanes.v_start, strict=True)))
    if heads == 1 or not regular:
        for h in range(heads):
            fn(h, lanes.k_start[h], lanes.v_start[h], lanes.k_start[h] == lanes.v_start[h])
        return

    def body(h, carry):
        k_start = pl.multiple_of(h * pitch, LANES)
        fn(h, k_start, pl.multiple_of(h * pitch + gap, LANES), same)
        return carry

    lax.fori_loop(0, heads, body, 0)


class PageFetch:
    """Copies of a row's pages into one of two VMEM buffers, and of their scales where the pool has any.

    Args:
        spec: the pool's format.
        fetch: tokens of a buffer.
        first_page: SMEM ref ``[1]``, the layer's first page.
        indptr, pages: SMEM refs of the plan.
        data, scales: the pool in HBM; ``scales`` may be None.
        buffer: VMEM ``[2, fetch, C]``.
        scale_buffer: VMEM ``[2, fetch // page_size, 1, 2 * K * page_size]`` or None.
        semaphores: DMA semaphores ``[2, 2]``.
    """

    def __init__(self, spec, fetch, first_page, indptr, pages, data, scales, buffer, scale_buffer, semaphores):
        self.spec, self.fetch, self.first_page, self.indptr, self.pages = spec, fetch, first_page, indptr, pages
        self.data, self.scales, self.buffer, self.scale_buffer, self.semaphores = data, scales, buffer, scale_buffer, semaphores

    def _each(self, block, low, high, fn) -> None:
        per = self.fetch // self.spec.page_size
        first = jnp.maximum(block * per, low // self.spec.page_size)
        last = jnp.minimum((block + 1) * per, lax.div(high + self.spec.page_size - 1, self.spec.page_size))
        lax.fori_loop(first, last, lambda page, carry: (fn(page, page - block * per), carry)[1], 0)

    def _copies(self, page, place, slot):
        size = self.spec.page_size
        rows = pl_ds(place * size, size)
        yield pltpu.make_async_copy(self.data.at[page], self.buffer.at[slot, rows], self.semaphores.at[slot, 0])
        if self.scales is not None:
            yield pltpu.make_async_copy(self.scales.at[page], self.scale_buffer.at[slot, place], self.semaphores.at[slot, 1])

    def start(self, row, block, low, high, slot) -> None:
        """Starts the copies of the pages of ``block`` (of ``fetch`` tokens) that hold tokens ``low <= t < high`` of a row."""

        def copy(page, place):
            for c in self._copies(self.first_page[0] + self.pages[self.indptr[row] + page], place, slot):
                c.start()

        self._each(block, low, high, copy)

    def wait(self, block, low, high, slot) -> None:
        """Waits for the copies that ``start`` with the same arguments began."""

        def copy(page, place):
            del page
            for c in self._copies(0, place, slot):
                c.wait()

        self._each(block, low, high, copy)

    def scale_row(self, slot, first_place, pages: int, segment) -> jax.Array:
        """Scales of ``pages`` pages from ``first_place`` on, of one head's K or V (``segment``): float32 ``[1, tokens]``."""
        size = self.spec.page_size
        first = segment * size
        lanes = pl.ds(first if isinstance(first, int) else pl.multiple_of(first, size), size)
        parts = [self.scale_buffer[slot, first_place + j, :, lanes] for j in range(pages)]
        return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def pl_ds(start, size: int):
    """``pl.ds`` whose start is known to be a multiple of ``size``."""
    return pl.ds(pl.multiple_of(start, size), size)
