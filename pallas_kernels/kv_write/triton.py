"""The GPU implementation of ``write_kv`` (Pallas, Triton lowering): one program per token and some heads."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat, triton_call
from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool, PoolSpec, to_storage
from pallas_kernels.quant import quantize, row_scales

MAX_ELEMENTS = 1024  # of K (and of V) that one program handles
NUM_WARPS = 4
NUM_STAGES = 1


def write_kv(
    pool: KVPool,
    k: jax.Array,
    v: jax.Array,
    plan: AttentionPlan,
    layer: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> KVPool:
    """Writes a step's keys and values in place. See the public ``write_kv`` for the arguments.

    Args:
        pool: the page pool; its buffers are reused where it was donated.
        k, v: ``[T, K, H]``.
        plan: the step.
        layer: int32 scalar.
        k_scale, v_scale: float32 scalars of a "tensor" pool.
        tiles: only ``num_warps`` is used.
        interpret: run as plain jax operations, on any backend.

    Returns:
        The updated pool.

    Raises:
        KernelUnsupportedError: a pool this backend would address wrongly or whose numbers the device cannot convert, or a
            tile size that this kernel does not have.
    """
    spec = pool.spec
    if tiles is not None and (tiles.kv_tile or tiles.fetch_tile or tiles.num_stages or tiles.vmem_limit_bytes):
        raise KernelUnsupportedError("tiles: the GPU write has no tile sizes; only num_warps can be set")
    if not interpret:
        triton_call.check_pool(spec)
        triton_call.check_device(spec, triton_call.compute_capability(compat.device_kind()))
    dim = triton_call.next_power_of_2(spec.head_dim)
    heads = min(triton_call.next_power_of_2(spec.num_kv_heads), max(1, MAX_ELEMENTS // dim))
    cuts = -(-spec.num_kv_heads // heads)
    operands = {
        "pool": triton_call.pool_rows(pool),
        "k": k,
        "v": v,
        "slots": jnp.asarray(plan.slot_mapping),
        "layer": triton_call.scalar(layer, jnp.int32),
    }
    aliases = {"pool": "data"}
    if pool.scales is not None:
        operands["old_scales"] = pool.scales.reshape(pool.scales.shape[0], -1)
        aliases["old_scales"] = "scales"
    if spec.quant == "tensor":
        operands["k_scale"] = triton_call.scalar(k_scale, jnp.float32)
        operands["v_scale"] = triton_call.scalar(v_scale, jnp.float32)
    outputs = {out: jax.ShapeDtypeStruct(operands[name].shape, operands[name].dtype) for name, out in aliases.items()}
    result = triton_call.call(
        _kernel(spec, heads, cuts, dim),
        operands,
        outputs,
        programs=k.shape[0] * cuts,
        num_warps=(tiles and tiles.num_warps) or NUM_WARPS,
        num_stages=NUM_STAGES,
        aliases=aliases,
        interpret=bool(interpret),
    )
    data = to_storage(result["data"], pool.data.dtype).reshape(spec.data_shape)
    return KVPool(data, result["scales"].reshape(pool.scales.shape) if pool.scales is not None else None, spec)


def _kernel(spec: PoolSpec, heads: int, cuts: int, dim: int):
    slots_of_layer = spec.num_pages * spec.page_size

    def write_kv_rows(ins, outs):
        program = pl.program_id(0)
        token, first_head = lax.div(program, cuts), lax.rem(program, cuts) * heads
        slot = ins["slots"][token]

        @pl.when((slot >= 0) & (slot < slots_of_layer))
        def _():
            row = slot + ins["layer"][0] * slots_of_layer
            page, offset = lax.div(row, spec.page_size), lax.rem(row, spec.page_size)
            head_of = first_head + lax.broadcasted_iota(jnp.int32, (heads,), 0)
            shape = (heads, dim)
            head = jnp.broadcast_to(head_of[:, None], shape)
            cols = lax.broadcasted_iota(jnp.int32, shape, 1)
            real = (head < spec.num_kv_heads) & (cols < spec.head_dim)
            for which, name in enumerate(("k", "v")):
                source = (jnp.full(shape, token), head, cols)
                x = compat.masked_load(ins[name], source, mask=real, other=0.0)
                if spec.quant is None:
                    stored = x.astype(spec.dtype)
                else:
                    x = x.astype(jnp.float32)
                    if spec.quant == "token_head":
                        scale = row_scales(x, spec.dtype)
                        column = (2 * head_of + which) * spec.page_size + offset
                        compat.masked_store(
                            outs["scales"], (jnp.full_like(head_of, page), column), scale, mask=head_of < spec.num_kv_heads
                        )
                        stored = quantize(x, scale[:, None], spec.dtype)
                    else:
                        stored = quantize(x, ins[f"{name}_scale"][0], spec.dtype)
                column = (2 * head + which) * spec.head_dim + cols
                compat.masked_store(outs["data"], (jnp.full(shape, row), column), stored, mask=real)

    return write_kv_rows
