"""``supports``: whether an operation runs on a target, and why not."""

import importlib.util

from pallas_kernels import triton_call
from pallas_kernels.dispatch import BY_PLATFORM, NO_KERNEL, OPS
from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.paged_attention import mosaic_common
from pallas_kernels.pool import PoolSpec
from pallas_kernels.targets import TARGETS


def supports(op: str, spec: PoolSpec, target: str) -> tuple[bool, str]:
    """Whether ``op`` runs on ``target``'s own implementation for pools of ``spec``.

    Args:
        op: "paged_attention", "kv_write" or "page_copy".
        spec: the pool's format.
        target: "cpu", "gpu" or "tpu", or a device of ``targets.TARGETS`` such as "h100" or "v5e". "gpu" and "tpu" stand for
            any supported one.

    Returns:
        ``(True, "")``, or ``(False, reason)`` where the reason says what would work instead.

    Raises:
        ValueError: no such operation or target.
    """
    if op not in OPS:
        raise ValueError(f"op: got {op!r}, wants one of {', '.join(OPS)}")
    if target not in ("cpu", "gpu", "tpu", *TARGETS):
        raise ValueError(f"target: got {target!r}, wants cpu, gpu, tpu or one of {', '.join(TARGETS)}")
    device = TARGETS.get(target)
    platform = device.platform if device else target
    name = BY_PLATFORM[platform]
    name = NO_KERNEL.get((op, name), name)
    if importlib.util.find_spec(f"pallas_kernels.{op}.{name}") is None:
        return False, f'{op}: no "{name}" implementation; implementation="xla" runs on every platform'
    try:
        if name == "triton":
            triton_call.check_pool(spec)
            triton_call.check_device(spec, triton_call.compute_capability(device.device_kind) if device else None)
        elif name == "mosaic_tpu":
            mosaic_common.check_pool(op, spec)
    except KernelUnsupportedError as error:
        return False, str(error)
    return True, ""
