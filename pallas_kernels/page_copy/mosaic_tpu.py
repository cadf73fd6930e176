"""Whole pages on TPU by direct copies within device memory: every copy is started, then every copy is waited for."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.page_copy.pages import Pages
from pallas_kernels.paged_attention import mosaic_common as common
from pallas_kernels.pool import KVPool

_ANY = pl.BlockSpec(memory_space=pl.ANY)


def copy_pages(pool: KVPool, src, dst, *, interpret=False) -> KVPool:
    """See the public ``copy_pages``. Copies of a page onto itself are left out.

    Raises:
        KernelUnsupportedError: the pool's rows or pages are no whole TPU tiles, or there are too many ids for scalar memory.
    """
    _check("copy_pages", pool, 2 * len(src))
    src, dst = jnp.asarray(src, jnp.int32), jnp.asarray(dst, jnp.int32)

    def move(x):
        def kernel(src_ids, dst_ids, pool_in, pool_out, sem):
            del pool_in
            _run(
                pool.spec.num_layers,
                src_ids.shape[0],
                lambda i: src_ids[i] != dst_ids[i],
                lambda layer, i: (
                    pool_out.at[layer * pool.spec.num_pages + src_ids[i]],
                    pool_out.at[layer * pool.spec.num_pages + dst_ids[i]],
                ),
                sem,
            )

        return _call(kernel, "page_copy", (src, dst), (x,), x, {2: 0}, interpret)

    return _each(pool, move)


def gather_pages(pool: KVPool, ids, *, interpret=False) -> Pages:
    """See the public ``gather_pages``.

    Raises:
        KernelUnsupportedError: as for ``copy_pages``.
    """
    _check("gather_pages", pool, len(ids))
    ids = jnp.asarray(ids, jnp.int32)

    def take(x):
        def kernel(page_ids, pool_in, out, sem):
            _run(
                pool.spec.num_layers,
                page_ids.shape[0],
                lambda i: i >= 0,
                lambda layer, i: (pool_in.at[layer * pool.spec.num_pages + page_ids[i]], out.at[layer, i]),
                sem,
            )

        out = jax.ShapeDtypeStruct((pool.spec.num_layers, len(ids), *x.shape[1:]), x.dtype)
        return _call(kernel, "page_gather", (ids,), (x,), out, {}, interpret)

    return Pages(take(pool.data), None if pool.scales is None else take(pool.scales))


def scatter_pages(pool: KVPool, ids, pages: Pages, *, interpret=False) -> KVPool:
    """See the public ``scatter_pages``. Entries with id 0 are left out.

    Raises:
        KernelUnsupportedError: as for ``copy_pages``.
    """
    _check("scatter_pages", pool, len(ids))
    ids = jnp.asarray(ids, jnp.int32)
    news = iter((pages.data, pages.scales))

    def put(x):
        def kernel(page_ids, pages_in, pool_in, pool_out, sem):
            del pool_in
            _run(
                pool.spec.num_layers,
                page_ids.shape[0],
                lambda i: page_ids[i] != 0,
                lambda layer, i: (pages_in.at[layer, i], pool_out.at[layer * pool.spec.num_pages + page_ids[i]]),
                sem,
            )

        return _call(kernel, "page_scatter", (ids,), (jnp.asarray(next(news)), x), x, {2: 0}, interpret)

    return _each(pool, put)


def _each(pool: KVPool, fn) -> KVPool:
    data = fn(pool.data)
    return KVPool(data, None if pool.scales is None else fn(pool.scales), pool.spec)


def _check(op: str, pool: KVPool, ids: int) -> None:
    common.check_pool(op, pool.spec)
    if ids > common.SMEM_WORDS:
        raise KernelUnsupportedError(f"{op}: got {ids} page ids, scalar memory holds {common.SMEM_WORDS}; call it in parts")


def _run(layers: int, count: int, wanted, copy, sem) -> None:
    """Starts, then waits for, ``copy(layer, i) -> (source, destination)`` of every layer and every ``i`` with ``wanted(i)``."""

    def each(act):
        def move(layer, i, carry):
            source, target = copy(layer, i)
            act(pltpu.make_async_copy(source, target, sem))
            return carry

        def one(i, carry):
            @pl.when(wanted(i))
            def _():
                lax.fori_loop(0, layers, lambda layer, carry: move(layer, i, carry), 0)

            return carry

        lax.fori_loop(0, count, one, 0)

    each(lambda c: c.start())
    each(lambda c: c.wait())


def _call(kernel, name: str, ids, arrays, out, aliases, interpret):
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(ids),
            grid=(1,),
            in_specs=[_ANY] * len(arrays),
            out_specs=_ANY,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases=aliases,
        interpret=interpret,
        name=name,
    )(*ids, *arrays)
