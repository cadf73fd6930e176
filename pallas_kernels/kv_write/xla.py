"""A pool write as one XLA scatter of whole rows: in place when the pool was donated, and exact on every platform.

On TPU it relayouts 8-bit pools with pages of 32 tokens or more; ``mosaic_tpu`` does not.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool, to_storage
from pallas_kernels.quant import quantize, row_scales


def write_kv(
    pool: KVPool, k, v, plan: AttentionPlan, layer, *, k_scale=None, v_scale=None, tiles=None, interpret=False
) -> KVPool:
    """See the public ``write_kv``.

    Raises:
        KernelUnsupportedError: ``tiles`` or ``interpret`` was given: there is nothing to tile or interpret.
    """
    if tiles is not None or interpret:
        raise KernelUnsupportedError('write_kv: implementation="xla" takes neither tiles nor interpret; pass neither')
    spec = pool.spec
    rows, scales = encode_rows(pool, k, v, k_scale, v_scale)
    slots = jnp.asarray(plan.slot_mapping)
    total = spec.num_layers * spec.num_pages * spec.page_size
    per_layer = spec.num_pages * spec.page_size
    index = jnp.where(slots < per_layer, slots + layer * per_layer, _out_of_range(total, len(slots)))
    flat = pool.data.reshape(total, spec.row_elements)
    flat = flat.at[index].set(rows, mode="drop", unique_indices=True)
    data = flat.reshape(spec.data_shape)
    if scales is None or pool.scales is None:
        return KVPool(data, pool.scales, spec)
    page, offset = index // spec.page_size, index % spec.page_size
    lane = jnp.arange(2 * spec.num_kv_heads) * spec.page_size + offset[:, None]  # [T, 2 * K]
    # No reshape of the pool's scales: XLA:CPU would give the view another layout, and copy all of them back and forth.
    updated = pool.scales.at[page[:, None], 0, lane].set(scales, mode="drop", unique_indices=True)
    return KVPool(data, updated, spec)


def encode_rows(pool: KVPool, k: jax.Array, v: jax.Array, k_scale, v_scale) -> tuple[jax.Array, jax.Array | None]:
    """K and V as the pool stores them.

    Args:
        pool: gives the format and the storage dtype.
        k, v: ``[T, K, H]``.
        k_scale, v_scale: float32 scalars of a "tensor" pool, else None.

    Returns:
        ``(rows [T, 2 * K * H] in the storage dtype, scales float32 [T, 2 * K] or None)``.
    """
    spec = pool.spec
    both = jnp.stack([k, v], axis=2)  # [T, K, 2, H]
    scales = None
    if spec.quant is None:
        stored = both.astype(spec.dtype)
    else:
        both = both.astype(jnp.float32)
        if spec.quant == "token_head":
            scale = scales = row_scales(both, spec.dtype)
        else:
            scale = jnp.stack([k_scale, v_scale])
        stored = quantize(both, scale[..., None], spec.dtype)
    tokens = k.shape[0]
    rows = to_storage(stored.reshape(tokens, spec.row_elements), pool.data.dtype)
    return rows, None if scales is None else scales.reshape(tokens, 2 * spec.num_kv_heads)


def _out_of_range(total: int, tokens: int) -> jax.Array:
    """``tokens`` different rows behind the end of the pool (never negative: JAX wraps those)."""
    last = np.iinfo(np.int32).max
    return jnp.asarray(np.minimum(total + np.arange(tokens, dtype=np.int64), last), jnp.int32)
