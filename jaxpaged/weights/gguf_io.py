"""GGUF files: metadata, the tensor directory, and dequantisation straight into a destination buffer.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md); block formats through ``gguf.quants``.
"""

import dataclasses
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxpaged.errors import CheckpointError
from jaxpaged.weights.host_memory import map_file
from jaxpaged.weights.names import Part

CHUNK_ELEMENTS = 1 << 19
"""Weights dequantised at a time: the intermediate float32 values stay within the processor's cache."""

_T = GGMLQuantizationType
_PLAIN = {_T.F32: np.dtype(np.float32), _T.F16: np.dtype(np.float16), _T.BF16: np.dtype(ml_dtypes.bfloat16)}
QUANTIZED = (_T.Q8_0, _T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q2_K, _T.Q3_K, _T.Q4_K, _T.Q5_K, _T.Q6_K)
"""Block formats that are read, beside float32, float16 and bfloat16."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: its numpy shape ``[rows, cols]`` (or ``[n]``), block format, file and byte range."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    file: Path
    offset_bytes: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A parsed GGUF model: metadata key -> value, tensor name -> where it lies, and the files it is made of."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]

    def read_into(self, part: Part, out: np.ndarray) -> None:
        """Dequantise one tensor into ``out`` (its shape; any float dtype), undoing the q/k row order where asked.

        Rows are read through a memory map, a chunk at a time, which is dropped at the end.

        Args:
            part: the tensor wanted.
            out: writable array of ``part.shape``.
        """
        info = self.tensors[part.name]
        rows = np.asarray(map_file(info.file, np.dtype(np.uint8), info.offset_bytes, (info.size_bytes,)))
        rows = rows.reshape(info.shape[0] if len(info.shape) > 1 else 1, -1)
        heads = part.interleaved_heads
        if len(info.shape) == 1 and heads:
            half = info.shape[0] // heads // 2
            values = _decode(rows, info.kind).reshape(heads, half, 2)
            out.reshape(heads, 2, half)[...] = values.swapaxes(1, 2)
            return
        if len(info.shape) == 1:
            out[...] = _decode(rows, info.kind)[0]
            return
        count, cols = out.shape
        step = max(1, CHUNK_ELEMENTS // cols)
        if not heads:
            for start in range(0, count, step):
                out[start : start + step] = _decode(rows[start : start + step], info.kind)
            return
        half = count // heads // 2
        grouped, target = rows.reshape(heads, 2 * half, -1), out.reshape(heads, 2, half, cols)
        step = max(1, step // (2 * half))
        for start in range(0, heads, step):
            block = grouped[start : start + step]
            values = _decode(block.reshape(-1, block.shape[-1]), info.kind).reshape(-1, half, 2, cols)
            target[start : start + step] = values.swapaxes(1, 2)

    def view(self, part: Part, dtype: np.dtype) -> np.ndarray | None:
        """A memory-mapped view of a tensor stored as ``dtype`` already, else None."""
        info = self.tensors[part.name]
        if part.interleaved_heads or _PLAIN.get(info.kind) != dtype:
            return None
        return map_file(info.file, dtype, info.offset_bytes, info.shape)


def read_gguf(path: Path) -> GgufFile:
    """Parse a GGUF file, or all files of a split model given its first one.

    Args:
        path: the file.

    Returns:
        Metadata and tensor directory; no tensor data is read.

    Raises:
        CheckpointError: not a GGUF file, an unsupported version, byte order or block format, a truncated file (both sizes
            are named), or a missing file of a split model.
    """
    metadata, tensors = _parse(path)
    files = [path]
    count = metadata.get("split.count", 1)
    if count > 1:
        match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
        if not match or int(match[2]) != 1:
            raise CheckpointError(f"{path}: one of {count} files of a split model; give the first one (...-00001-of-*.gguf)")
        for i in range(2, count + 1):
            file = path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf")
            if not file.is_file():
                raise CheckpointError(f"{file}: missing; the model is split over {count} files")
            files.append(file)
            tensors |= _parse(file)[1]
    return GgufFile(metadata, tensors, tuple(files))


def _decode(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind in _PLAIN:
        return rows.view(_PLAIN[kind])
    return dequantize(rows, kind)


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path}: truncated: {size} bytes, a GGUF header alone takes 24")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file: it starts with {data[:4]!r}")
        version = struct.unpack_from("<I", data, 4)[0]
        if version not in (2, 3):
            hint = "; the file is big-endian" if version >> 16 else ""
            raise CheckpointError(f"{path}: GGUF version {version} is not supported; supported: 2, 3{hint}")
        try:
            return _directory(data, path, size)
        except (struct.error, IndexError) as error:
            raise CheckpointError(f"{path}: truncated inside its header: {size} bytes ({error})") from error


def _directory(data: mmap.mmap, path: Path, size: int) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    num_tensors, num_fields = struct.unpack_from("<QQ", data, 8)
    at = 24
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key, at = _string(data, at)
        kind = struct.unpack_from("<I", data, at)[0]
        metadata[key], at = _value(data, at + 4, kind, path, key)
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name, at = _string(data, at)
        dims = struct.unpack_from("<I", data, at)[0]
        shape = struct.unpack_from(f"<{dims}Q", data, at + 4)
        kind, offset = struct.unpack_from("<IQ", data, at + 4 + 8 * dims)
        at += 16 + 8 * dims
        found.append((name, tuple(reversed(shape)), kind, offset))
    align = metadata.get("general.alignment", 32)
    base = (at + align - 1) // align * align
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in found:
        tensors[name] = _tensor(path, name, shape, kind, base + offset)
    end = max((info.offset_bytes + info.size_bytes for info in tensors.values()), default=base)
    if end > size:
        last = max(tensors.values(), key=lambda info: info.offset_bytes)
        raise CheckpointError(f"{path}: truncated: {size} bytes, but its tensors (the last is {last.name}) need {end}")
    return metadata, tensors


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    known = next((t for t in (*_PLAIN, *QUANTIZED) if t.value == kind), None)
    if known is None:
        label = next((t.name for t in GGMLQuantizationType if t.value == kind), f"type {kind}")
        supported = ", ".join(t.name for t in (*_PLAIN, *QUANTIZED))
        raise CheckpointError(f"{path}: tensor {name} is stored as {label}, which is not supported; supported: {supported}")
    block, block_bytes = GGML_QUANT_SIZES[known]
    count = int(np.prod(shape, dtype=np.int64))
    if not shape or shape[-1] % block:
        raise CheckpointError(f"{path}: tensor {name} {list(shape)}: rows are not whole {known.name} blocks of {block}")
    return TensorInfo(name, shape, known, path, offset, count // block * block_bytes)


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    length = struct.unpack_from("<Q", data, at)[0]
    end = at + 8 + length
    if end > len(data):
        raise IndexError(f"a string of {length} bytes at {at} runs past the end")
    return data[at + 8 : end].decode("utf-8", "replace"), end


def _value(data: mmap.mmap, at: int, kind: int, path: Path, key: str) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind in _SCALARS:
        code = "<" + _SCALARS[kind]
        return struct.unpack_from(code, data, at)[0], at + struct.calcsize(code)
    if kind != _ARRAY:
        raise CheckpointError(f"{path}: metadata field {key} has unknown type {kind}")
    item, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if item in _SCALARS:
        code = f"<{count}{_SCALARS[item]}"
        if at + struct.calcsize(code) > len(data):
            raise IndexError(f"{key}: {count} values at {at} run past the end")
        return list(struct.unpack_from(code, data, at)), at + struct.calcsize(code)
    values: list[Any] = []
    for _ in range(count):
        value, at = _value(data, at, item, path, key)
        values.append(value)
    return values, at
