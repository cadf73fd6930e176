"""The few names that differ between jax versions, or may vanish from one.

Pallas' Triton backend is deprecated since jax 0.11 and still the only one that runs these GPU kernels (jax 0.10.2 to 0.12).
All its names pass through here, so that another GPU backend has one place to replace.
"""

import warnings

import jax
from jax.experimental import pallas as pl

from pallas_kernels.errors import KernelUnsupportedError

try:
    from jax.experimental.pallas import triton as _triton
except ImportError:  # a jax without the Triton backend
    _triton = None

# One warning for every lowering of every kernel says nothing new to someone who runs a supported jax version.
warnings.filterwarnings("ignore", message=".*Pallas Triton backend is deprecated.*", category=DeprecationWarning)

HAS_TRITON = _triton is not None


def triton_params(*, num_warps: int, num_stages: int):
    """Compiler parameters that pick Pallas' Triton backend (always explicit: the default backend changed between versions).

    Args:
        num_warps: warps of one program, a power of two.
        num_stages: stages of software pipelining, >= 1.

    Raises:
        KernelUnsupportedError: this jax has no Triton backend.
    """
    if _triton is None:
        raise KernelUnsupportedError(
            f'implementation="triton": jax {jax.__version__} ships no Pallas Triton backend; install jax>=0.10.2,<0.13 or '
            'use implementation="xla"'
        )
    return _triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def masked_load(ref, index: tuple, *, mask=None, other=None) -> jax.Array:
    """Loads ``ref[index]`` (integer arrays on every axis make a gather); ``other`` stands where ``mask`` is False."""
    if _triton is None:
        triton_params(num_warps=4, num_stages=1)
    return _triton.load(ref.at[index], mask=mask, other=other)  # pyright: ignore[reportOptionalMemberAccess]


def masked_store(ref, index: tuple, value: jax.Array, *, mask=None) -> None:
    """Stores ``value`` to ``ref[index]`` where ``mask`` is True."""
    if _triton is None:
        triton_params(num_warps=4, num_stages=1)
    _triton.store(ref.at[index], value, mask=mask)  # pyright: ignore[reportOptionalMemberAccess]


def device_kind() -> str:
    """Kind of the device that code is being lowered for ("NVIDIA H100 80GB HBM3", "TPU v5 lite", "cpu").

    An abstract device set with ``jax.sharding.use_abstract_mesh`` (compiling for a described device) comes before the real one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is not None:
        return abstract.device_kind
    return jax.devices()[0].device_kind


__all__ = ["HAS_TRITON", "device_kind", "masked_load", "masked_store", "pl", "triton_params"]
