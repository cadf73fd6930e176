"""The definition of a pool write in numpy: one token at a time into a copy of the whole pool."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import on_host
from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool
from pallas_kernels.quant import quantize_np, row_scales_np


def write_kv(
    pool: KVPool, k, v, plan: AttentionPlan, layer, *, k_scale=None, v_scale=None, tiles=None, interpret=False
) -> KVPool:
    """See the public ``write_kv``.

    Raises:
        KernelUnsupportedError: ``tiles`` or ``interpret`` was given: there is nothing to tile or interpret.
    """
    if tiles is not None or interpret:
        raise KernelUnsupportedError('write_kv: implementation="reference" takes neither tiles nor interpret')

    def run(data, scales, *rest):
        return write_numpy(KVPool(data, scales, pool.spec), *rest)

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (pool.data, pool.scales))
    slots = plan.slot_mapping
    data, scales = on_host(run, shapes, pool.data, pool.scales, k, v, slots, layer, k_scale, v_scale)
    return KVPool(data, scales, pool.spec)


def write_numpy(pool: KVPool, k, v, slots, layer, k_scale, v_scale):
    """``(data, scales)`` of ``pool`` after the write, as numpy arrays of the same storage dtype."""
    spec = pool.spec
    data = np.array(pool.data)
    number = data if data.dtype.name == spec.dtype else data.view(jnp.dtype(spec.dtype))
    scales = None if pool.scales is None else np.array(pool.scales)
    for token, slot in enumerate(np.asarray(slots)):
        if slot >= spec.num_pages * spec.page_size:
            continue
        page = int(layer) * spec.num_pages + int(slot) // spec.page_size
        offset = int(slot) % spec.page_size
        row = np.stack([np.asarray(k)[token], np.asarray(v)[token]], axis=1)  # [K, 2, H]
        if spec.quant is None:
            stored = row.astype(jnp.dtype(spec.dtype))
        else:
            if scales is None:
                scale = np.broadcast_to(np.array([k_scale, v_scale], np.float32), row.shape[:2])
            else:
                scale = row_scales_np(row, spec.dtype)
                scales[page, 0].reshape(spec.num_kv_heads, 2, spec.page_size)[:, :, offset] = scale
            stored = quantize_np(row, scale[..., None], spec.dtype)
        number[page, offset] = stored.reshape(-1)
    return data, scales
