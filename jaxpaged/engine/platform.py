"""What the machine under the engine is, and the choices that follow from it: dtypes, kernels, sizes."""

import dataclasses
from pathlib import Path
from typing import cast

import jax

from jaxpaged.config import EngineConfig
from jaxpaged.errors import CapacityError, ConfigError
from jaxpaged.model.attention import AttentionBackend, Implementation
from jaxpaged.model_config import ModelConfig

TARGETS = {"xla": "cpu", "reference": "cpu", "triton": "gpu", "mosaic_tpu": "tpu"}
DEFAULT_IMPLEMENTATION = {"cpu": "xla", "gpu": "triton", "cuda": "triton", "rocm": "triton", "tpu": "mosaic_tpu"}
_RESERVED_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Platform:
    """The resolved choices.

    Attributes:
        name: JAX's platform ("cpu", "gpu", "tpu").
        dtype: of weights and activations.
        kv_dtype: of the pool, as an ``EngineConfig.kv_cache_dtype`` other than "auto".
        page_size: tokens of a page.
        backend: the kernels.
        target: which plan arrays the kernels want.
        query_tile: query tokens of a kernel tile.
        scan_layers: scan over stacked layers (accelerators) instead of unrolling them (CPU).
        min_tokens: smallest decode bucket.
    """

    name: str
    dtype: str
    kv_dtype: str
    page_size: int
    backend: AttentionBackend
    target: str
    query_tile: int
    scan_layers: bool
    min_tokens: int


def cpu_has_fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively (AMX or AVX512-BF16), by its flags; False where they are unknown."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return False
    flags = next((line.split() for line in info.read_text().splitlines() if line.startswith("flags")), [])
    return "amx_bf16" in flags or "avx512_bf16" in flags


def _tpu_page_size(config: ModelConfig, itemsize: int) -> int:
    """Smallest power of two from 16 to 128 that makes a page of one layer at least 32 KiB; 128 for 8-bit pools."""
    if itemsize == 1:
        return 128
    row_bytes = 2 * config.num_kv_heads * config.head_dim * itemsize
    size = 16
    while size < 128 and size * row_bytes < 32 << 10:
        size *= 2
    return size


def resolve(config: EngineConfig, model: ModelConfig) -> Platform:
    """Settles everything that is "auto".

    Raises:
        ConfigError: an explicit choice cannot run here.
    """
    name = jax.default_backend()
    name = "gpu" if name in ("cuda", "rocm") else name
    dtype = config.dtype
    if dtype == "auto":
        dtype = model.dtype
        if name == "cpu":
            dtype = "bfloat16" if dtype != "float32" and cpu_has_fast_bfloat16() else "float32"
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    implementation = config.implementation
    if implementation == "auto":
        implementation = DEFAULT_IMPLEMENTATION.get(name, "xla")
    native = {"triton": "gpu", "mosaic_tpu": "tpu"}.get(implementation)
    if native is not None and name not in (native, "cpu"):
        raise ConfigError(f"implementation: got {implementation!r} on {name}; it runs on {native} (and, interpreted, on CPU)")
    interpret = native is not None and name == "cpu"
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}.get(kv_dtype, 1)
    page_size = config.page_size or (_tpu_page_size(model, itemsize) if name == "tpu" else 16)
    return Platform(
        name=name,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        backend=AttentionBackend(cast(Implementation, implementation), interpret),
        target=TARGETS[implementation],
        query_tile=128 if name == "tpu" and "v4" not in jax.local_devices()[0].device_kind else 64,
        scan_layers=name != "cpu",
        min_tokens=2 if name == "cpu" and dtype == "bfloat16" else 1,
    )


def available_bytes(platform: str) -> tuple[int, int]:
    """Memory of the first device: ``(limit, in use)`` in bytes. On CPU: what the system says is available, and 0.

    Raises:
        CapacityError: the device does not tell.
    """
    if platform == "cpu":
        for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, 0
        return 4 << 30, 0
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise CapacityError(f"the {platform} device does not tell its memory; give num_pages")
    return stats["bytes_limit"], stats["bytes_in_use"]


def activation_bytes(model: ModelConfig, dtype_bytes: int, num_tokens: int, num_samples: int) -> int:
    """An upper estimate of a step's temporaries: hidden states, the widest projection, float32 logits, and a reserve."""
    widest = max(3 * model.intermediate_size, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    per_token = (4 * model.hidden_size + widest) * max(dtype_bytes, 4)
    return num_tokens * per_token + 4 * num_samples * model.vocab_size * 4 + _RESERVED_BYTES


def pool_pages(config: EngineConfig, model: ModelConfig, platform: Platform, bytes_per_page: int) -> int:
    """Pages (scratch page left out) the pool gets.

    Never more than ``max_num_seqs`` sequences of full length could own. The pool's size is part of every compiled program, and
    free memory differs from run to run: rounded down to an eighth of a power of two on CPU, to a 64th elsewhere, it is mostly
    the same, and the compilation cache hits.

    Raises:
        CapacityError: not even one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    max_len = config.max_model_len or model.max_position_embeddings
    most = config.max_num_seqs * -(-max_len // platform.page_size)
    limit, used = available_bytes(platform.name)
    if platform.name == "cpu":
        room = int(limit * (config.memory_fraction or 0.3))
        parts = 8
    else:
        size = 2 if platform.dtype != "float32" else 4
        room = int(limit * (config.memory_fraction or 0.9)) - used
        room -= activation_bytes(model, size, config.max_num_batched_tokens, config.max_num_seqs)
        parts = 64
    fitting = room // bytes_per_page - 1
    step = max(1, (1 << max(fitting, 1).bit_length() - 1) // parts)
    pages = min(most, fitting // step * step)
    if pages < 1:
        raise CapacityError(
            f"memory_fraction: {max(room, 0) >> 20} MiB are left for the page pool, one page takes {bytes_per_page >> 10} KiB; "
            "raise memory_fraction, lower max_num_batched_tokens, or use a smaller model or dtype"
        )
    return pages
