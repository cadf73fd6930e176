"""The page format: ``PoolSpec``, ``KVPool`` and ``alloc``. It is defined here and nowhere else.

One array holds every layer: ``data [L * num_pages, page_size, 2 * K * H]``. A token is a row; along the row, each KV head
has its K values, then its V values (``k0 v0 k1 v1 ...``). Page ``p`` of layer ``l`` is ``data[l * num_pages + p]``, so one
page of one layer is one contiguous run, a token's K and V of one head are adjacent, and no dimension is ever padded.

8-bit pools hold one float32 scale per token, KV head and K/V in ``scales [L * num_pages, 1, 2 * K * page_size]``, ordered
like ``[2 * K, page_size]`` (``k0`` of every token of the page, then ``v0``, then ``k1`` ...), or two scalars for the whole
pool (``quant="tensor"``).

Page 0 is a scratch page that no sequence owns.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
QUANT_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
Quant = Literal["token_head", "tensor"]


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """Shape and number format of a page pool. Hashable, so it can be a static argument.

    Args:
        num_layers: layers (L) stacked in the pool, >= 1.
        num_pages: pages (of each layer), the scratch page 0 included, >= 2.
        page_size: tokens a page holds, >= 1. TPU kernels want a multiple of 8; powers of two are the best on every target.
        num_kv_heads: KV heads (K), >= 1.
        head_dim: elements of a head (H), >= 1.
        dtype: "float32", "bfloat16", "float16", or 8-bit: "int8", "float8_e4m3fn", "float8_e5m2".
        quant: how 8-bit values are scaled: "token_head" (one scale per token, KV head and K/V, computed at write) or
            "tensor" (two traced scalars given by the caller). None for float dtypes; defaults to "token_head" for 8-bit ones.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    quant: Quant | None = None

    def __post_init__(self) -> None:
        for name, low in (("num_layers", 1), ("num_pages", 2), ("page_size", 1), ("num_kv_heads", 1), ("head_dim", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
                raise ValueError(f"{name}: got {value!r}, wants an integer >= {low}")
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        if self.dtype not in FLOAT_DTYPES + QUANT_DTYPES:
            raise ValueError(f"dtype: got {self.dtype}, wants one of {', '.join(FLOAT_DTYPES + QUANT_DTYPES)}")
        if self.dtype in QUANT_DTYPES:
            object.__setattr__(self, "quant", self.quant or "token_head")
            if self.quant not in ("token_head", "tensor"):
                raise ValueError(f'quant: got {self.quant!r}, wants "token_head" or "tensor"')
        elif self.quant is not None:
            raise ValueError(f"quant: got {self.quant!r} for {self.dtype}; wants None for a float pool")
        rows = self.num_layers * self.num_pages * self.page_size
        if rows > np.iinfo(np.int32).max:
            raise ValueError(f"num_layers * num_pages * page_size: got {rows}, wants at most 2**31 - 1 (slots are int32)")

    @property
    def row_elements(self) -> int:
        """Elements of one token's row in one layer (C): ``2 * K * H``."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def data_shape(self) -> tuple[int, int, int]:
        """``[L * num_pages, page_size, 2 * K * H]``."""
        return (self.num_layers * self.num_pages, self.page_size, self.row_elements)

    @property
    def scales_shape(self) -> tuple[int, int, int] | None:
        """``[L * num_pages, 1, 2 * K * page_size]`` for "token_head" pools, else None."""
        if self.quant != "token_head":
            return None
        return (self.num_layers * self.num_pages, 1, 2 * self.num_kv_heads * self.page_size)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers, scales left out: ``2 * L * K * H * itemsize``.

        Source: Kwon et al. 2023, section 3 (KV cache size of one token).
        """
        return self.num_layers * self.row_elements * self.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, its scales included."""
        scales = 4 * self.num_layers * 2 * self.num_kv_heads * self.page_size if self.quant == "token_head" else 0
        return self.bytes_per_token * self.page_size + scales

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.bytes_per_page


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPool:
    """A page pool: a pytree to be donated to each jitted step and taken back updated.

    Attributes:
        data: ``[L * num_pages, page_size, 2 * K * H]`` in ``spec.dtype``, or the same bits as unsigned integers (see
            ``storage_dtype``).
        scales: float32 ``[L * num_pages, 1, 2 * K * page_size]`` for "token_head" pools, else None.
        spec: the format (static).
    """

    data: jax.Array
    scales: jax.Array | None
    spec: PoolSpec = dataclasses.field(metadata={"static": True})


def storage_dtype(spec: PoolSpec, platform: str) -> jnp.dtype:
    """The dtype ``alloc`` stores a pool in: on CPU, 16- and 8-bit pools as the unsigned integers of the same bits.

    XLA:CPU scatters into a bfloat16 array by converting the whole array to float32 and back; on integers it writes in place.
    """
    if platform == "cpu" and spec.itemsize < 4:
        return jnp.dtype({2: jnp.uint16, 1: jnp.uint8}[spec.itemsize])
    return jnp.dtype(spec.dtype)


def alloc(spec: PoolSpec, *, sharding: jax.sharding.Sharding | None = None, dtype=None) -> KVPool:
    """Allocates a pool of zeros (scales of ones).

    Args:
        spec: its format.
        sharding: where to put it; None for JAX's default device.
        dtype: of the storage; None takes ``storage_dtype`` of the platform.

    Returns:
        The pool; its data is made on the device, not copied from the host.
    """

    platform = jax.default_backend() if sharding is None else next(iter(sharding.device_set)).platform
    store = storage_dtype(spec, platform) if dtype is None else dtype

    def make() -> tuple[jax.Array, jax.Array | None]:
        data = jnp.zeros(spec.data_shape, store)
        return data, None if spec.scales_shape is None else jnp.ones(spec.scales_shape, jnp.float32)

    if sharding is None:
        data, scales = jax.jit(make)()
    else:
        data, scales = jax.jit(make, out_shardings=(sharding, None if spec.scales_shape is None else sharding))()
    return KVPool(data, scales, spec)


def to_storage(values: jax.Array, store) -> jax.Array:
    """``values`` in the dtype a pool is stored in: the same bits where that is an unsigned integer."""
    return values if values.dtype == store else jax.lax.bitcast_convert_type(values, store)


def from_storage(stored: jax.Array, spec: PoolSpec) -> jax.Array:
    """Rows read from ``pool.data`` in the pool's number format (the inverse of ``to_storage``)."""
    return stored if stored.dtype == jnp.dtype(spec.dtype) else jax.lax.bitcast_convert_type(stored, jnp.dtype(spec.dtype))


def from_kv_pages(k_pages: jax.Array, v_pages: jax.Array) -> KVPool:
    """Packs JAX's usual pair of page arrays into a one-layer pool (a copy; do it once, not each step).

    Args:
        k_pages: ``[K, num_pages, page_size, H]``.
        v_pages: the same shape and dtype.

    Returns:
        A one-layer ``KVPool`` in which page ``p`` holds ``k_pages[:, p]`` and ``v_pages[:, p]``.

    Raises:
        ValueError: shapes or dtypes differ, or are not as above.
    """
    if k_pages.ndim != 4:
        raise ValueError(f"k_pages: got shape {k_pages.shape}, wants [K, num_pages, page_size, H]")
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"v_pages: got {v_pages.dtype}{list(v_pages.shape)}, wants {k_pages.dtype}{list(k_pages.shape)} like k_pages"
        )
    heads, pages, size, dim = k_pages.shape
    spec = PoolSpec(1, pages, size, heads, dim, k_pages.dtype.name, quant="tensor" if k_pages.dtype.itemsize == 1 else None)
    both = jnp.stack([k_pages, v_pages], axis=-2)  # [K, N, PS, 2, H]
    return KVPool(both.transpose(1, 2, 0, 3, 4).reshape(spec.data_shape), None, spec)
