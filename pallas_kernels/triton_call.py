"""One way to call a Triton kernel: operands and outputs by name, whole arrays, one-dimensional grid."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.pool import KVPool, PoolSpec, from_storage

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def next_power_of_2(value: int) -> int:
    """Smallest power of two >= ``value`` (>= 1)."""
    return 1 << max(value - 1, 0).bit_length()


def call(
    kernel: Callable[[dict[str, Any], dict[str, Any]], None],
    operands: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    programs: int,
    num_warps: int,
    num_stages: int,
    aliases: Mapping[str, str] | None = None,
    interpret: bool = False,
) -> dict[str, jax.Array]:
    """Runs ``kernel(inputs, outputs)`` once per program; both are dicts of refs to whole arrays.

    Args:
        kernel: the body; reads its number with ``pl.program_id(0)``.
        operands: name -> array.
        outputs: name -> shape and dtype.
        programs: grid size, >= 1.
        num_warps: warps of a program.
        num_stages: pipeline stages of its loops.
        aliases: operand name -> output name that shares its buffer.
        interpret: run as plain jax operations on any backend.

    Returns:
        name -> output array.
    """
    in_names, out_names = list(operands), list(outputs)

    def body(*refs):
        kernel(
            dict(zip(in_names, refs[: len(in_names)], strict=True)), dict(zip(out_names, refs[len(in_names) :], strict=True))
        )

    body.__name__ = kernel.__name__
    results = pl.pallas_call(
        body,
        out_shape=tuple(outputs.values()),
        grid=(programs,),
        input_output_aliases={in_names.index(a): out_names.index(b) for a, b in (aliases or {}).items()},
        compiler_params=compat.triton_params(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=kernel.__name__,
    )(*operands.values())
    return dict(zip(out_names, results, strict=True))


def scalar(value, dtype) -> jax.Array:
    """A traced or literal number as the ``[1]`` array that kernels load scalars from."""
    return jax.numpy.asarray(value, dtype).reshape(1)


def pool_rows(pool: KVPool) -> jax.Array:
    """The pool as ``[L * num_pages * page_size, 2 * K * H]`` in its number format (a view, except from CPU storage)."""
    spec = pool.spec
    return from_storage(pool.data, spec).reshape(-1, spec.row_elements)


def offset_hazard(spec: PoolSpec) -> str | None:
    """Why the Triton backend would compute wrong addresses in this pool, or None.

    It uses 64-bit offsets only for arrays of more than 2**32 bytes, but counts elements in signed 32 bits below that: an
    8-bit array of 2 to 4 GiB wraps to addresses before its start.
    """
    elements = int(np.prod(spec.data_shape, dtype=np.int64))
    size = elements * spec.itemsize
    if elements <= 2**31 or size > 2**32:
        return None
    per_page = spec.num_layers * spec.page_size * spec.row_elements * spec.itemsize
    below, above = 2**31 // per_page, 2**32 // per_page + 1
    return (
        f"num_pages: got {spec.num_pages}, which makes an {spec.dtype} pool of {size / 2**30:.2f} GiB; the Triton backend "
        f"miscomputes addresses in 8-bit pools between 2 and 4 GiB. Use num_pages <= {below} or >= {above}, or a 16-bit pool"
    )


def check_pool(spec: PoolSpec) -> None:
    """Refuses pools whose addresses the Triton backend would get wrong.

    Raises:
        KernelUnsupportedError: see ``offset_hazard``.
    """
    reason = offset_hazard(spec)
    if reason:
        raise KernelUnsupportedError(reason)


def check_device(spec: PoolSpec, capability: tuple[int, int] | None) -> None:
    """Refuses number formats that the Triton backend cannot convert on a GPU of this compute capability.

    Raises:
        KernelUnsupportedError: float8_e4m3fn before compute capability 8.9.
    """
    if capability is not None and spec.dtype == "float8_e4m3fn" and capability < (8, 9):
        raise KernelUnsupportedError(
            f"dtype: got a float8_e4m3fn pool on compute capability {capability[0]}.{capability[1]}; conversions of that "
            'format want 8.9 or newer. Use "int8" (more accurate) or "float8_e5m2"'
        )


# Source: NVIDIA, "CUDA GPUs" (compute capability by product).
_CAPABILITY = {"A100": (8, 0), "A10": (8, 6), "A40": (8, 6), "L4": (8, 9), "L40": (8, 9), "H100": (9, 0), "H200": (9, 0)}
_CAPABILITY |= {
    "H20": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "B300": (10, 3),
    "V100": (7, 0),
    "T4": (7, 5),
}


def compute_capability(device_kind: str) -> tuple[int, int] | None:
    """Compute capability of a GPU by its name; of the device at hand where the name is not known; else None.

    Args:
        device_kind: as JAX names the device.
    """
    words = re.split(r"[^A-Za-z0-9]+", device_kind)
    for word in words:
        if word in _CAPABILITY:
            return _CAPABILITY[word]
    for device in jax.devices():
        number = getattr(device, "compute_capability", None)
        if device.device_kind == device_kind and number:
            major, minor = str(number).split(".")
            return int(major), int(minor)
    return None
