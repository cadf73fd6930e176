"""Writes a step's keys and values on TPU: aligned groups of pool rows are fetched, merged with the new rows and put back.

TPU copies move whole memory tiles, and a packed dtype has several rows in a word, so a single token's row cannot be written on
its own. The plan cuts the step's tokens at aligned groups of 8 to 32 rows; the kernel holds a ring of groups in VMEM, so that
many reads and write-backs are in flight. A group that is new as a whole is not read. Merging selects bits, so the rows that
stay are unchanged to the last bit, whatever they hold.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write.xla import encode_rows
from pallas_kernels.paged_attention import mosaic_common as common
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool, PoolSpec, from_storage, to_storage

RING_BYTES = 4 * 2**20
RING = 16


def write_kv(
    pool: KVPool,
    k: jax.Array,
    v: jax.Array,
    plan: AttentionPlan,
    layer,
    *,
    k_scale=None,
    v_scale=None,
    tiles: Tiles | None = None,
    interpret=False,
) -> KVPool:
    """See the public ``write_kv``.

    Raises:
        KernelUnsupportedError: the pool's rows or pages are no whole TPU tiles.
    """
    spec = pool.spec
    common.check_pool("write_kv", spec)
    common.check_plan("write_kv", plan)
    data = from_storage(pool.data, spec)
    rows, scales = encode_rows(KVPool(data, pool.scales, spec), k, v, k_scale, v_scale)
    groups = jnp.asarray(plan.write_groups)
    first_page = jnp.asarray(layer, jnp.int32) * spec.num_pages
    count = jnp.reshape(jnp.asarray(plan.num_counts)[3], (1,))
    data = _write_rows(data, rows, groups, count, first_page, plan.write_group_rows, spec, tiles, interpret)
    if scales is not None:
        most = plan.shape.num_tokens // spec.page_size + 2 * plan.shape.num_seqs
        pages = page_runs(groups, count[0], min(most, groups.shape[0]))
        assert pool.scales is not None
        new = _write_scales(pool.scales, scales, pages, first_page, spec, interpret)
    else:
        new = pool.scales
    return KVPool(to_storage(data, pool.data.dtype), new, spec)


def page_runs(groups: jax.Array, count, most: int) -> tuple[jax.Array, jax.Array]:
    """Joins the write groups of each page, which stand next to each other.

    Args:
        groups: int32 ``[G, 5]``, the plan's ``write_groups``.
        count: how many of them are used.
        most: pages a step can write to at most.

    Returns:
        ``(runs, number)``: int32 ``[most, 4]`` of (page, first source token, first row in page, rows), and int32 ``[1]``.
    """
    total = groups.shape[0]
    index = jnp.arange(total, dtype=jnp.int32)
    used = index < count
    head = jnp.logical_and(used, jnp.logical_or(index == 0, groups[:, 0] != jnp.roll(groups[:, 0], 1)))
    run = jnp.cumsum(head, dtype=jnp.int32) - 1
    rows = jnp.zeros(most, jnp.int32).at[jnp.where(used, run, most)].add(groups[:, 4], mode="drop")
    heads = jnp.stack([groups[:, 0], groups[:, 2], groups[:, 1] + groups[:, 3]], axis=1)
    firsts = jnp.zeros((most, 3), jnp.int32).at[jnp.where(head, run, most)].set(heads, mode="drop")
    return jnp.concatenate([firsts, rows[:, None]], axis=1), jnp.reshape(jnp.sum(head, dtype=jnp.int32), (1,))


def _write_rows(data, rows, groups, count, first_page, group_rows: int, spec: PoolSpec, tiles, interpret):
    width, per_word = spec.row_elements, 4 // spec.itemsize
    chunks = width // common.LANES
    tall = -(-chunks // 8) * 8  # 32-bit rows of 128 lanes that a token takes in the source, whole memory tiles
    # A token's bits, one element to a 32-bit lane: copies may then start at any token, and strided loads pick every
    # ``per_word``-th row of the group, which shifts put into the words of the packed row.
    bits = to_storage(rows, {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}[spec.itemsize]).astype(jnp.uint32)
    source = jnp.pad(bits.reshape(-1, chunks, common.LANES), ((group_rows, group_rows), (0, tall - chunks), (0, 0))).reshape(
        -1, common.LANES
    )
    bytes_each = group_rows * (width * spec.itemsize + tall * common.LANES * 4)
    depth = _depth(bytes_each)
    lists = (groups[:, 0] + first_page, groups[:, 1], groups[:, 2] - groups[:, 3] + group_rows, groups[:, 3], groups[:, 4])

    def kernel(count, page, row, src, first, rows_new, source, pool_in, pool_out, old, new, reads, stages, writes):
        del pool_in  # the same memory as pool_out

        def place(g):
            return pool_out.at[page[g], pl.ds(pl.multiple_of(row[g], group_rows), group_rows)]

        def read(g, b):
            return pltpu.make_async_copy(place(g), old.at[b], reads.at[b])

        def stage(g, b):
            tokens = pl.ds(pl.multiple_of(src[g] * tall, 8), group_rows * tall)
            return pltpu.make_async_copy(source.at[tokens], new.at[b], stages.at[b])

        def write(g, b):
            return pltpu.make_async_copy(old.at[b], place(g), writes.at[b])

        def fetch(g, b):
            pl.when(rows_new[g] < group_rows)(lambda: read(g, b).start())
            stage(g, b).start()

        def merge(g, b):
            stage(g, b).wait()
            pl.when(rows_new[g] < group_rows)(lambda: read(g, b).wait())
            keep = common.word_mask(first[g], first[g] + rows_new[g], group_rows, common.LANES, spec.itemsize)
            for c in range(chunks):
                lanes = pl.ds(c * common.LANES, common.LANES)
                fresh = new[b, pl.ds(c, group_rows // per_word, stride=per_word * tall), :]
                for i in range(1, per_word):
                    more = new[b, pl.ds(c + i * tall, group_rows // per_word, stride=per_word * tall), :]
                    fresh = fresh | (more << jnp.uint32(8 * spec.itemsize * i))
                kept = pltpu.bitcast(old[b, :, lanes], jnp.uint32)
                old[b, :, lanes] = pltpu.bitcast((fresh & keep) | (kept & ~keep), old.dtype)

        _ring(count[0], depth, fetch, merge, write)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(data.shape, data.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((depth, group_rows, width), data.dtype),
                pltpu.VMEM((depth, group_rows * tall, common.LANES), jnp.uint32),
                *[pltpu.SemaphoreType.DMA((depth,))] * 3,
            ],
        ),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=common.check_vmem("write_kv", depth * bytes_each, tiles)),
        interpret=interpret,
        name="kv_write",
    )(count, *lists, source, data)


def _write_scales(pool_scales, scales, pages, first_page, spec: PoolSpec, interpret):
    runs, count = pages
    size, width = spec.page_size, pool_scales.shape[-1]
    tokens = scales.shape[0]
    # New scales laid out like the pages they go to; rows outside of the run hold anything.
    token = jnp.clip((runs[:, 1] - runs[:, 2])[:, None] + jnp.arange(size, dtype=jnp.int32), 0, tokens - 1)
    source = scales[token].transpose(0, 2, 1).reshape(runs.shape[0], 1, width)
    depth = _depth(2 * 4 * width * 8)

    def kernel(count, page, first, rows_new, source, pool_in, pool_out, old, new, reads, stages, writes):
        del pool_in

        def read(g, b):
            return pltpu.make_async_copy(pool_out.at[page[g]], old.at[b], reads.at[b])

        def stage(g, b):
            return pltpu.make_async_copy(source.at[g], new.at[b], stages.at[b])

        def write(g, b):
            return pltpu.make_async_copy(old.at[b], pool_out.at[page[g]], writes.at[b])

        def fetch(g, b):
            pl.when(rows_new[g] < size)(lambda: read(g, b).start())
            stage(g, b).start()

        def merge(g, b):
            stage(g, b).wait()
            pl.when(rows_new[g] < size)(lambda: read(g, b).wait())
            lane = lax.broadcasted_iota(jnp.int32, (1, width), 1)
            offset = lax.rem(lane, jnp.int32(size))
            inside = jnp.logical_and(offset >= first[g], offset < first[g] + rows_new[g])
            old[b] = jnp.where(inside, new[b], old[b])

        _ring(count[0], depth, fetch, merge, write)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(pool_scales.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                *[pltpu.VMEM((depth, 1, width), jnp.float32)] * 2,
                *[pltpu.SemaphoreType.DMA((depth,))] * 3,
            ],
        ),
        input_output_aliases={5: 0},
        interpret=interpret,
        name="kv_write_scales",
    )(count, runs[:, 0] + first_page, runs[:, 2], runs[:, 3], source, pool_scales)


def _depth(bytes_each: int) -> int:
    """Groups in the ring: an even number that fits ``RING_BYTES``, at least 2."""
    return max(2, min(RING, RING_BYTES // bytes_each // 2 * 2))


def _ring(count, depth: int, fetch, merge, write) -> None:
    """Runs ``count`` groups through ``depth`` buffers: reads run half a ring ahead, write-backs have the other half to end."""
    ahead = depth // 2

    def prime(g, carry):
        fetch(g, g)
        return carry

    def body(g, carry):
        coming = g + ahead

        @pl.when(coming < count)
        def _():
            pl.when(coming >= depth)(lambda: write(coming - depth, lax.rem(coming, depth)).wait())
            fetch(coming, lax.rem(coming, depth))

        merge(g, lax.rem(g, depth))
        write(g, lax.rem(g, depth)).start()
        return carry

    def drain(g, carry):
        write(g, lax.rem(g, depth)).wait()
        return carry

    lax.fori_loop(0, jnp.minimum(count, ahead), prime, 0)
    lax.fori_loop(0, count, body, 0)
    lax.fori_loop(jnp.maximum(count - depth, 0), count, drain, 0)
