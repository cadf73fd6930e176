"""Which implementation runs, and the checks every public operation shares."""

import importlib
from types import ModuleType
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelUnsupportedError
from pallas_kernels.plan import AttentionPlan
from pallas_kernels.pool import KVPool

Implementation = Literal["auto", "triton", "mosaic_tpu", "xla", "reference"]
IMPLEMENTATIONS = ("triton", "mosaic_tpu", "xla", "reference")
OPS = ("paged_attention", "kv_write", "page_copy")
BY_PLATFORM = {"cpu": "xla", "gpu": "triton", "cuda": "triton", "rocm": "triton", "tpu": "mosaic_tpu"}
# Page copies on GPU are an XLA gather and scatter by ids: one fusion, in place. No kernel of ours would be faster.
NO_KERNEL = {("page_copy", "triton"): "xla"}


def platform_of(x: Any) -> str:
    """The platform an operation on ``x`` will run on.

    A concrete array answers for itself; a traced one by the described device of the mesh being lowered for, else by JAX's
    default device.
    """
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return next(iter(x.devices())).platform
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None and getattr(described, "platform", None):
        return described.platform
    default: Any = getattr(jax.config, "jax_default_device", None)
    if default is not None:
        return default if isinstance(default, str) else default.platform
    return jax.default_backend()


def resolve(op: str, implementation: str, x: Any, interpret: Any = False) -> str:
    """The implementation to run: ``implementation`` itself, or the platform's own for "auto".

    Args:
        op: one of ``OPS``.
        implementation: "auto" or one of ``IMPLEMENTATIONS``.
        x: the operation's main argument (asked for its platform).
        interpret: whether a Pallas kernel is interpreted, which every platform can.

    Raises:
        ValueError: no such implementation.
        KernelUnsupportedError: an explicit implementation that this operation does not have, or that cannot run where ``x``
            lies (known outside of ``jit`` only; inside, JAX refuses to lower the kernel), or a platform without one.
    """
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(
            f'implementation: got {implementation!r}, wants "auto", ' + ", ".join(f'"{n}"' for n in IMPLEMENTATIONS)
        )
    if implementation != "auto":
        if (op, implementation) in NO_KERNEL:
            instead = NO_KERNEL[op, implementation]
            raise KernelUnsupportedError(
                f'{op}: there is no "{implementation}" kernel; implementation="{instead}" does it in place'
            )
        if implementation in ("triton", "mosaic_tpu") and not interpret and is_concrete(x):
            platform = platform_of(x)
            if BY_PLATFORM.get(platform) != implementation:
                device = "a GPU" if implementation == "triton" else "a TPU"
                raise KernelUnsupportedError(
                    f'{op}: implementation="{implementation}" runs on {device}, the pool is on "{platform}"; pass '
                    'interpret=True to interpret the kernel, or implementation="auto"'
                )
        return implementation
    platform = platform_of(x)
    if platform not in BY_PLATFORM:
        raise KernelUnsupportedError(f'{op}: no kernel for platform "{platform}"; implementation="xla" runs on every platform')
    name = BY_PLATFORM[platform]
    return NO_KERNEL.get((op, name), name)


def check_interpret(op: str, implementation: str, interpret: Any) -> None:
    """Refuses ``interpret`` for implementations that are not Pallas kernels.

    Raises:
        KernelUnsupportedError: there is nothing to interpret.
    """
    if interpret and implementation in ("xla", "reference"):
        raise KernelUnsupportedError(
            f'{op}: implementation="{implementation}" has nothing to interpret; pass interpret=False, or '
            'implementation="triton" or "mosaic_tpu"'
        )


def load(op: str, implementation: str) -> ModuleType:
    """The module ``pallas_kernels.<op>.<implementation>``; kernels are imported when they are first asked for."""
    return importlib.import_module(f"pallas_kernels.{op}.{implementation}")


def no_gradient(op: str, x: jax.Array) -> jax.Array:
    """``x`` itself; differentiating through it raises ``NotImplementedError`` naming ``op``."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x

    @jax.custom_jvp
    def identity(y):
        return y

    @identity.defjvp
    def _refuse(primals, tangents):
        raise NotImplementedError(
            f"{op} has no gradient: it reads or writes a page pool for inference. For training use dense attention, "
            "or jax.lax.stop_gradient the arguments."
        )

    return identity(x)


def is_concrete(*arrays: Any) -> bool:
    """Whether every array (or pytree leaf) has a value now, outside of any trace."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays))


def on_host(fn, result, *args: Any) -> Any:
    """Runs the numpy function ``fn`` on ``args``: at once if they are concrete, else as a callback of the traced program.

    Args:
        fn: takes ``args`` with every array a numpy array; returns numpy arrays shaped like ``result``.
        result: pytree of ``jax.ShapeDtypeStruct``.
        args: pytrees of arrays.

    Returns:
        ``fn``'s result as JAX arrays.
    """

    def call(*values):
        return fn(*jax.tree.map(np.asarray, values))

    if is_concrete(*args):
        return jax.tree.map(jnp.asarray, call(*args))
    return jax.pure_callback(call, result, *args)


def check_layer(layer: Any, pool: KVPool) -> jax.Array:
    """``layer`` as an int32 scalar.

    Raises:
        ValueError: not an integer scalar, or (where its value is known) outside ``0 <= layer < num_layers``.
    """
    if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool):
        if not 0 <= layer < pool.spec.num_layers:
            raise ValueError(f"layer: got {layer}, wants 0 <= layer < {pool.spec.num_layers}")
        return jnp.int32(layer)
    if (
        not hasattr(layer, "dtype")
        or jnp.shape(layer) != ()
        or isinstance(layer, (bool, float))
        or not jnp.issubdtype(layer.dtype, jnp.integer)
    ):
        raise ValueError(f"layer: got {layer!r}, wants an integer or an int32 scalar")
    if is_concrete(layer) and not 0 <= int(layer) < pool.spec.num_layers:
        raise ValueError(f"layer: got {int(layer)}, wants 0 <= layer < {pool.spec.num_layers}")
    return jnp.asarray(layer, jnp.int32)


def check_plan(pool: KVPool, plan: AttentionPlan) -> None:
    """Checks that ``plan`` was made for ``pool``'s page size.

    Raises:
        ValueError: it was not.
    """
    if plan.page_size != pool.spec.page_size:
        raise ValueError(
            f"plan: made for page_size {plan.page_size}, the pool has {pool.spec.page_size}; pass spec=pool.spec to plan"
        )


def check_pool(pool: KVPool) -> None:
    """Checks the arrays of ``pool`` against its spec.

    Raises:
        ValueError: a shape or dtype differs.
    """
    spec = pool.spec
    if tuple(pool.data.shape) != spec.data_shape:
        raise ValueError(f"pool.data: got shape {list(pool.data.shape)}, wants {list(spec.data_shape)} as its spec says")
    unsigned = {4: "uint32", 2: "uint16", 1: "uint8"}[spec.itemsize]
    if pool.data.dtype.name not in (spec.dtype, unsigned):
        raise ValueError(f"pool.data: got dtype {pool.data.dtype.name}, wants {spec.dtype} (or its bits as {unsigned})")
    shape = None if pool.scales is None else tuple(pool.scales.shape)
    if shape != spec.scales_shape:
        raise ValueError(f"pool.scales: got shape {shape}, wants {spec.scales_shape} as its spec says")


def check_tensor_scales(pool: KVPool, k_scale: Any, v_scale: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """The two scalars of a "tensor"-quantised pool as float32, or a pair of None for every other pool.

    Raises:
        ValueError: a scale is missing, is no scalar, or is given for a pool that would not use it.
    """
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    if pool.spec.quant != "tensor":
        for name, value in scales.items():
            if value is not None:
                kind = "computes its own scales" if pool.spec.quant else "stores floats as they are"
                raise ValueError(
                    f'{name}: got {value!r} for a {pool.spec.dtype} pool that {kind}; wants None (or PoolSpec(quant="tensor"))'
                )
        return None, None
    for name, value in scales.items():
        if value is None:
            raise ValueError(
                f'{name}: got None, wants a float32 scalar for a pool with quant="tensor" (1.0 stores values as they are)'
            )
        if jnp.shape(value) != ():
            raise ValueError(f"{name}: got shape {jnp.shape(value)}, wants a scalar")
        if is_concrete(value) and not 0 < float(value) < float("inf"):
            raise ValueError(f"{name}: got {float(value)}, wants a finite number > 0")
    return jnp.asarray(k_scale, jnp.float32), jnp.asarray(v_scale, jnp.float32)
