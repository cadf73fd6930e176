"""Launch settings of the GPU kernels."""

import dataclasses
import functools
import json
import pathlib
import re

from pallas_kernels.pool import PoolSpec
from pallas_kernels.triton_call import compute_capability, next_power_of_2

TUNING_DIR = pathlib.Path(__file__).parent / "tuning"


@dataclasses.dataclass(frozen=True)
class TritonTiles:
    """Tile sizes and launch settings. They may depend on device and format, never on the batch: results would too.

    Attributes:
        decode_rows: least rows of a decode tile (query heads of one KV head, padded to a power of two).
        max_decode_rows: most rows of a decode tile; larger groups are cut.
        decode_tokens: kv tokens of a decode tile, a power of two.
        decode_warps, decode_stages: launch of the decode kernel.
        combine_splits: splits merged at once, a power of two.
        ragged_rows: rows (query tokens x query heads of one KV head) of a prefill tile, a power of two.
        ragged_tokens: kv tokens of a prefill tile, a power of two.
        ragged_warps, ragged_stages: launch of the prefill kernel.
    """

    decode_rows: int = 16
    max_decode_rows: int = 64
    decode_tokens: int = 64
    decode_warps: int = 4
    decode_stages: int = 3
    combine_splits: int = 8
    ragged_rows: int = 128
    ragged_tokens: int = 64
    ragged_warps: int = 8
    ragged_stages: int = 3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"{field.name}: got {value}, wants >= 1")
            if not field.name.endswith("_stages") and value & (value - 1):
                raise ValueError(f"{field.name}: got {value}, wants a power of two")


def default_tiles(spec: PoolSpec, capability: tuple[int, int] | None = None) -> TritonTiles:
    """Settings that compile without register spills for a pool of this format.

    A tile's K and V take ``2 * tokens * H * itemsize`` bytes of shared memory in each of its stages, and as much again in
    registers while they are multiplied; so wider rows get fewer tokens. float32 has no tensor cores at full precision and
    runs in small tiles. Before compute capability 9.0 a prefill tile's scores take more registers, so tiles are halved.

    Args:
        spec: the pool's format.
        capability: compute capability of the GPU; None for 9.0 and later.
    """
    dim = next_power_of_2(spec.head_dim)
    if spec.itemsize == 4:
        tokens = 32 if dim <= 128 else 16
        return TritonTiles(decode_tokens=tokens, ragged_rows=64 if dim <= 128 else 32, ragged_tokens=16, ragged_stages=2)
    tokens = 64 if dim <= 128 else 32 if dim <= 256 else 16
    decode_warps = 8 if spec.itemsize == 1 and dim <= 128 else 4
    if capability is not None and capability < (9, 0):
        return TritonTiles(
            decode_tokens=tokens, decode_warps=decode_warps, ragged_rows=64, ragged_tokens=min(tokens, 32), ragged_warps=8
        )
    ragged_tokens = tokens if spec.itemsize == 2 or dim <= 128 else 16
    return TritonTiles(decode_tokens=tokens, decode_warps=decode_warps, ragged_tokens=ragged_tokens)


def tuning_key(spec: PoolSpec) -> str:
    """Name of a pool format in a tuning file: number format, head dim and page size ("bfloat16/h128/p16")."""
    return f"{spec.dtype}/h{spec.head_dim}/p{spec.page_size}"


def device_slug(device_kind: str) -> str:
    """File name of a device's tuning table: "NVIDIA H100 80GB HBM3" -> "nvidia_h100_80gb_hbm3"."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")


@functools.cache
def load_table(path: pathlib.Path) -> dict[str, dict[str, int]]:
    """A tuning file: ``{"tiles": {tuning_key: {field of TritonTiles: value}}}``; empty if it does not exist.

    Raises:
        ValueError: a field that ``TritonTiles`` does not have, or a bad value.
    """
    if not path.exists():
        return {}
    table = json.loads(path.read_text())["tiles"]
    known = {field.name for field in dataclasses.fields(TritonTiles)}
    for key, values in table.items():
        unknown = set(values) - known
        if unknown:
            raise ValueError(f"{path.name}: {key}: got {sorted(unknown)}, wants fields of TritonTiles: {sorted(known)}")
    return table


def tiles_for(spec: PoolSpec, device_kind: str) -> TritonTiles:
    """Tuned settings for a device and pool format where its table has them, else the defaults.

    Args:
        spec: the pool's format.
        device_kind: as JAX names the device.
    """
    table = load_table(TUNING_DIR / f"{device_slug(device_kind)}.json")
    return dataclasses.replace(default_tiles(spec, compute_capability(device_kind)), **table.get(tuning_key(spec), {}))
