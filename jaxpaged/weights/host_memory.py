"""Host memory for parameters, and memory maps of files."""

import math
import mmap
from pathlib import Path

import numpy as np

from jaxpaged.errors import CheckpointError


def empty_pages(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array in pages of its own.

    It starts on a page, so the CPU backend takes it over without a copy (it asks for 64 bytes); and it leaves the heap
    alone, so that what is read meanwhile cannot leave holes between parameters.

    Args:
        shape: of the array.
        dtype: of the array.

    Returns:
        A writable C-contiguous array; its pages go back to the system with it.
    """
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype, count).reshape(shape)


def map_file(file: Path, dtype: np.dtype, offset_bytes: int, shape: tuple[int, ...]) -> np.memmap:
    """A read-only memory map of one tensor.

    Raises:
        CheckpointError: the file went away or shrank since its header was read.
    """
    try:
        return np.memmap(file, dtype, "r", offset_bytes, shape)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read any more; did it change since it was opened? ({error})") from error
