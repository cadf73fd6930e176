"""Paged attention for JAX on TPU, GPU and CPU: attention over a page pool, pool writes and page copies, as a library."""

from pallas_kernels import reference
from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.page_copy.api import copy_pages, gather_pages, scatter_pages
from pallas_kernels.page_copy.pages import Pages
from pallas_kernels.paged_attention.adapter import paged_attention_kv
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.cascade import cascade_attention, plan_cascade
from pallas_kernels.paged_attention.merge import merge_states
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.plan import DROPPED_SLOT, AttentionPlan, PlanShape, plan
from pallas_kernels.plan_decode import plan_decode
from pallas_kernels.pool import KVPool, PoolSpec, alloc, from_kv_pages, from_storage, to_storage
from pallas_kernels.supports import supports

__all__ = [
    "DROPPED_SLOT",
    "AttentionPlan",
    "KVPool",
    "KernelUnsupportedError",
    "Pages",
    "PlanShape",
    "PoolSpec",
    "Tiles",
    "alloc",
    "cascade_attention",
    "copy_pages",
    "from_kv_pages",
    "from_storage",
    "gather_pages",
    "merge_states",
    "paged_attention",
    "paged_attention_kv",
    "plan",
    "plan_cascade",
    "plan_decode",
    "reference",
    "scatter_pages",
    "supports",
    "to_storage",
    "write_kv",
]
