"""Safetensors files and sharded directories, read through memory maps.

Source: the safetensors format: 8 bytes header length (little-endian), a JSON header, then the tensors' bytes.
"""

import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.weights.host_memory import map_file
from jaxpaged.weights.names import Part

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CHUNK_BYTES = 32 << 20
"""Bytes of a tensor converted at a time."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: shape, stored dtype (as the file names it), file and byte offset."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset_bytes: int


@dataclasses.dataclass(frozen=True)
class SafetensorsFiles:
    """The tensor directory of one or several safetensors files."""

    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]

    def read_into(self, part: Part, out: np.ndarray) -> None:
        """Copy one tensor into ``out`` (its shape), converting to ``out``'s dtype a chunk of rows at a time.

        Args:
            part: the tensor wanted.
            out: writable array of ``part.shape``.
        """
        source = self._map(part.name)
        if not source.shape:
            out[...] = source
            return
        step = max(1, CHUNK_BYTES * source.shape[0] // max(source.nbytes, 1))
        for start in range(0, source.shape[0], step):
            out[start : start + step] = source[start : start + step]

    def view(self, part: Part, dtype: np.dtype) -> np.ndarray | None:
        """A memory-mapped view of a tensor stored as ``dtype`` already, else None."""
        return self._map(part.name) if _DTYPES.get(self.tensors[part.name].dtype) == dtype else None

    def _map(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        if info.dtype not in _DTYPES:
            supported = ", ".join(_DTYPES)
            raise CheckpointError(
                f"{info.file}: tensor {name} is stored as {info.dtype}, which is not supported; supported: {supported}"
            )
        if 0 in info.shape:
            return np.empty(info.shape, _DTYPES[info.dtype])
        return map_file(info.file, _DTYPES[info.dtype], info.offset_bytes, info.shape)


def open_safetensors(directory: Path) -> SafetensorsFiles:
    """Read the headers of a directory's safetensors: the index's shards, or ``model.safetensors``, or the only file there.

    Args:
        directory: a Hugging Face model directory.

    Returns:
        All tensors' places; no tensor data is read.

    Raises:
        CheckpointError: no weights, weights in another format, a missing shard, a damaged or truncated file (sizes named),
            or an index that does not agree with its shards.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index: {error!r}") from error
        files = [directory / name for name in sorted(set(weight_map.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(f"{directory}: {len(missing)} of {len(files)} weight files are missing: {', '.join(missing)}")
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            tensors |= read_header(file)
        for name, shard in weight_map.items():
            if name not in tensors or tensors[name].file.name != shard:
                raise CheckpointError(f"{index}: lists {name} in {shard}, where it is not")
        return SafetensorsFiles(tensors, tuple(files))
    found = sorted(directory.glob("*.safetensors"))
    single = directory / "model.safetensors"
    if single in found or len(found) == 1:
        file = single if single in found else found[0]
        return SafetensorsFiles(read_header(file), (file,))
    if found:
        raise CheckpointError(f"{directory}: {len(found)} safetensors files but no model.safetensors.index.json")
    others = [file.name for pattern in ("*.bin", "*.pth", "*.pt") for file in directory.glob(pattern)]
    hint = f"; {others[0]} is a pickle, which is not read: convert it to safetensors first" if others else ""
    raise CheckpointError(f"{directory}: no safetensors weights found{hint}")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensor directory of one safetensors file.

    Raises:
        CheckpointError: damaged or truncated; the message names the file's size and the size it should have.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or 8 + length > size:
            raise CheckpointError(f"{path}: truncated: {size} bytes, but its header alone takes {8 + length or 8}")
        raw = file.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _info(path, name, entry, 8 + length) for name, entry in entries.items()}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error!r}") from error
    if end != size:
        what = "truncated" if size < end else "damaged"
        raise CheckpointError(f"{path}: {what}: {size} bytes, but its header describes {end}")
    return tensors


def _info(path: Path, name: str, entry: Mapping[str, Any], base: int) -> TensorInfo:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] in _DTYPES:
        needed = int(np.prod(shape, dtype=np.int64)) * _DTYPES[entry["dtype"]].itemsize
        if end - begin != needed:
            raise ValueError(f"{name} {list(shape)} {entry['dtype']} takes {needed} bytes, the header gives it {end - begin}")
    return TensorInfo(name, shape, entry["dtype"], path, base + begin)
