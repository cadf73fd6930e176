"""The definition, in float64 numpy: one row (query token, head) at a time, from absolute positions and the block table.

Every other implementation is tested against this one. It is slow on purpose: no tiles, no online softmax, no masks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import on_host
from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool


def paged_attention(
    q,
    pool: KVPool,
    plan: AttentionPlan,
    layer,
    options: AttentionOptions,
    *,
    tiles=None,
    interpret=False,
    return_lse: bool,
    out_dtype,
) -> tuple[jax.Array, jax.Array | None]:
    """The reference as an implementation: ``attention_float64``, rounded once at the end. See the public ``paged_attention``.

    Raises:
        KernelUnsupportedError: ``tiles`` or ``interpret`` was given: there is nothing to tile or interpret.
    """
    if tiles is not None or interpret:
        raise KernelUnsupportedError('paged_attention: implementation="reference" takes neither tiles nor interpret')

    def run(*args):
        out, lse = attention_float64(*args)
        return out.astype(out_dtype), lse.astype(np.float32)

    shapes = (jax.ShapeDtypeStruct(q.shape, out_dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32))
    out, lse = on_host(run, shapes, q, pool, plan, layer, options)
    return out, lse if return_lse else None


def attention_float64(q: Any, pool: KVPool, plan: AttentionPlan, layer: Any, options: AttentionOptions):
    """Paged attention by its definition, nothing rounded.

    Args:
        q: ``[T, N, H]``.
        pool: the page pool; only the slots that the definition names are read.
        plan: the step.
        layer: which layer's pages to read.
        options: the keywords of ``paged_attention``.

    Returns:
        ``(out [T, N, H], lse [T, N])`` as float64 numpy arrays.
    """
    queries = np.asarray(q).astype(np.float64)
    num_tokens, num_heads, head_dim = queries.shape
    spec = pool.spec
    group = num_heads // spec.num_kv_heads
    out = np.zeros((num_tokens, num_heads, head_dim))
    lse = np.full((num_tokens, num_heads), -np.inf)
    starts, seq_lens = np.asarray(plan.query_start_loc), np.asarray(plan.seq_lens)
    indptr, page_ids = np.asarray(plan.page_indptr), np.asarray(plan.page_ids)
    for row in range(len(seq_lens)):
        query_len = starts[row + 1] - starts[row]
        if not query_len:
            continue
        table = page_ids[indptr[row] : indptr[row + 1]]
        keys, values = gather_kv(pool, int(layer), table, int(seq_lens[row]), options.k_scale, options.v_scale)
        for i in range(query_len):
            token = starts[row] + i
            position = seq_lens[row] - query_len + i
            first = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
            last = position if options.causal else seq_lens[row] - 1
            if last < first:
                continue
            for head in range(num_heads):
                kv_head = head // group
                out[token, head], lse[token, head] = _one_row(
                    queries[token, head],
                    keys[first : last + 1, kv_head],
                    values[first : last + 1, kv_head],
                    np.arange(first, last + 1) - position,
                    head,
                    options,
                )
    return out, lse


def gather_kv(pool: KVPool, layer: int, table: np.ndarray, num_tokens: int, k_scale=None, v_scale=None):
    """A row's first ``num_tokens`` keys and values, token by token out of the pool.

    Args:
        pool: the page pool.
        layer: which layer.
        table: the row's physical page ids in logical order.
        num_tokens: how many tokens to read.
        k_scale, v_scale: scalars of a "tensor"-quantised pool.

    Returns:
        ``(keys, values)``, float64 ``[num_tokens, K, H]`` each, scales applied.
    """
    spec = pool.spec
    data = np.asarray(pool.data)
    scales = None if pool.scales is None else np.asarray(pool.scales)
    if data.dtype.name != spec.dtype:
        data = data.view(jnp.dtype(spec.dtype))
    keys = np.zeros((num_tokens, spec.num_kv_heads, spec.head_dim))
    values = np.zeros_like(keys)
    for position in range(num_tokens):
        page = layer * spec.num_pages + int(table[position // spec.page_size])
        offset = position % spec.page_size
        token = data[page, offset].astype(np.float64).reshape(spec.num_kv_heads, 2, spec.head_dim)
        if scales is not None:
            token = token * scales[page, 0].reshape(spec.num_kv_heads, 2, spec.page_size)[:, :, offset, None].astype(np.float64)
        keys[position], values[position] = token[:, 0], token[:, 1]
    if spec.quant == "tensor":
        keys, values = keys * float(np.asarray(k_scale)), values * float(np.asarray(v_scale))
    return keys, values


def _one_row(query, keys, values, distance, head: int, options: AttentionOptions):
    scores = keys @ query * float(np.asarray(options.sm_scale))
    if options.soft_cap is not None:
        scores = options.soft_cap * np.tanh(scores / options.soft_cap)
    if options.alibi_slopes is not None:
        scores = scores + float(np.asarray(options.alibi_slopes)[head]) * distance
    logits = scores if options.sinks is None else np.append(scores, float(np.asarray(options.sinks)[head]))
    top = logits.max()
    denominator = np.exp(logits - top).sum()
    return np.exp(scores - top) @ values / denominator, top + np.log(denominator)
