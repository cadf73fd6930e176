"""The model's view of the page pool: which format a model needs, and moving pages about."""

import jax
import numpy as np

from jaxpaged.model_config import ModelConfig
from pallas_kernels import copy_pages, gather_pages, scatter_pages
from pallas_kernels.plan import AttentionPlan, PlanShape, plan
from pallas_kernels.pool import KVPool, PoolSpec, alloc
from pallas_kernels.triton_call import offset_hazard

KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}

__all__ = [
    "AttentionPlan",
    "KVPool",
    "PlanShape",
    "PoolSpec",
    "addressable_pages",
    "alloc",
    "copy_pages",
    "gather_pages",
    "plan",
    "poison_pages",
    "pool_spec",
    "scatter_pages",
]


def pool_spec(config: ModelConfig, *, num_pages: int, page_size: int, dtype: str) -> PoolSpec:
    """The pool format of a model.

    Args:
        config: the model.
        num_pages: pages, the scratch page included.
        page_size: tokens of a page.
        dtype: an engine's ``kv_cache_dtype``, already resolved ("fp8" is "fp8_e4m3").
    """
    return PoolSpec(config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim, KV_DTYPES.get(dtype, dtype))


def addressable_pages(spec: PoolSpec, implementation: str) -> int:
    """Most pages of this format, at most ``spec.num_pages``, whose addresses the kernels compute right.

    The Triton backend wraps offsets in 8-bit pools between 2**31 elements and 4 GiB; such a pool is cut to 2**31 elements.
    """
    if implementation == "triton" and offset_hazard(spec) is not None:
        return 2**31 // (spec.num_layers * spec.page_size * spec.row_elements)
    return spec.num_pages


def poison_pages(pool: KVPool, ids: jax.Array) -> KVPool:
    """Fills pages with NaN (int8 pools: their scales), so that a stale read shows. ``ids`` int32 ``[M]``, padded with 0."""
    spec = pool.spec
    every = (ids[None, :] + np.arange(spec.num_layers, dtype=np.int32)[:, None] * spec.num_pages).reshape(-1)
    data, scales = pool.data, pool.scales
    if spec.dtype != "int8":
        nan = np.full((), np.nan, np.dtype(spec.dtype)).view(f"u{spec.itemsize}")
        value = jax.numpy.asarray(nan)
        value = value.astype(data.dtype) if data.dtype == value.dtype else jax.lax.bitcast_convert_type(value, data.dtype)
        data = data.at[every].set(value)
    if scales is not None:
        scales = scales.at[every].set(np.float32(np.nan))
    return KVPool(data, scales, spec)
