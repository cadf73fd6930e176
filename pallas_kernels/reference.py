"""Every operation by its definition: float64 (attention) or plain numpy (writes, copies), slow and exact.

The functions take what their public namesakes take, without ``implementation``, ``tiles`` and ``interpret``.
"""

import functools

from pallas_kernels.kv_write import api as _write
from pallas_kernels.page_copy import api as _copy
from pallas_kernels.paged_attention import adapter as _adapter
from pallas_kernels.paged_attention import api as _attention
from pallas_kernels.paged_attention import cascade as _cascade
from pallas_kernels.paged_attention.merge import merge_states
from pallas_kernels.paged_attention.reference import attention_float64, gather_kv

write_kv = functools.partial(_write.write_kv, implementation="reference")
paged_attention = functools.partial(_attention.paged_attention, implementation="reference")
paged_attention_kv = functools.partial(_adapter.paged_attention_kv, implementation="reference")
cascade_attention = functools.partial(_cascade.cascade_attention, implementation="reference")
copy_pages = functools.partial(_copy.copy_pages, implementation="reference")
gather_pages = functools.partial(_copy.gather_pages, implementation="reference")
scatter_pages = functools.partial(_copy.scatter_pages, implementation="reference")

__all__ = [
    "attention_float64",
    "cascade_attention",
    "copy_pages",
    "gather_kv",
    "gather_pages",
    "merge_states",
    "paged_attention",
    "paged_attention_kv",
    "scatter_pages",
    "write_kv",
]
