"""Open a checkpoint of any kind and stream its parameters: Hugging Face directory or hub id, GGUF file, Orbax directory."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np
from tqdm import tqdm

from jaxpaged.errors import CheckpointError
from jaxpaged.hf_fields import token_ids
from jaxpaged.model_config import ModelConfig
from jaxpaged.param_names import model_params
from jaxpaged.weights import gguf_config, gguf_io, gguf_tokenizer, hub, names, orbax_io, safetensors_io
from jaxpaged.weights.host_memory import empty_pages
from jaxpaged.weights.tokenizer import Tokenizer, has_tokenizer, read_tokenizer

_FLOATS = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
_SAMPLE_BYTES = 1 << 20


class ParamSource(Protocol):
    """Where parameters come from: a kind of checkpoint."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        ...

    def read(self, path: str, shape: tuple[int, ...], dtype: np.dtype, *, owned: bool) -> np.ndarray:
        """The parameter at a canonical path as ``dtype``; ``owned``: in memory of its own, not a view of the file."""
        ...


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its tensors are checked against its config, none of them is read yet.

    Attributes:
        path: the file or directory.
        config: the model's hyper-parameters.
        generation_config: the recommended sampling settings (``temperature``, ``top_p``, ...), empty where none are given.
        source: reads the parameters.
        load_tokenizer: builds the tokenizer.
    """

    path: Path
    config: ModelConfig
    generation_config: dict[str, Any]
    source: ParamSource
    load_tokenizer: Callable[[], Tokenizer | None]

    def iter_params(self, dtype: Any, *, owned: bool = False) -> Iterator[tuple[str, np.ndarray]]:
        """All parameters in model order, one in memory at a time.

        Args:
            dtype: float32, bfloat16 or float16 (anything ``numpy.dtype`` takes).
            owned: never yield memory-mapped views of the file.

        Yields:
            Canonical path and array ``dtype``, C-contiguous; read-only where it is a view of the file.

        Raises:
            CheckpointError: an unsupported ``dtype``, or values too large for float16.
        """
        wanted = float_dtype(dtype)
        for path, shape in model_params(self.config).items():
            with np.errstate(over="ignore"):  # float16 is checked below
                array = self.source.read(path, shape, wanted, owned=owned)
            if wanted == np.float16 and np.isinf(array).any():
                raise CheckpointError(f"{self.path}: {path} has values beyond float16's range; use bfloat16 or float32")
            yield path, array

    def load_params(
        self, dtype: Any, *, shardings: Mapping[str, jax.sharding.Sharding] | None = None, progress: bool = False
    ) -> dict[str, jax.Array]:
        """All parameters on the device, one at a time, so that the host holds one parameter beside what is loaded.

        Args:
            dtype: float32, bfloat16 or float16.
            shardings: canonical path -> where it goes; the default device where absent.
            progress: show a progress bar on standard error.

        Returns:
            Canonical path -> device array.

        Raises:
            CheckpointError: see :meth:`iter_params`.
        """
        places = shardings or {}
        if isinstance(self.source, orbax_io.OrbaxParams):
            return self.source.load(float_dtype(dtype), places)
        # The CPU backend may keep using the host array itself, which then must not be a map of the file.
        owned = jax.default_backend() == "cpu"
        params: dict[str, jax.Array] = {}
        total = len(model_params(self.config))
        for path, array in tqdm(self.iter_params(dtype, owned=owned), "loading", total, disable=not progress, leave=False):
            params[path] = jax.block_until_ready(jax.device_put(array, places.get(path)))
        return params

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return self.load_tokenizer()

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, built at the first call; None if the checkpoint has none."""
        return self._tokenizer

    def fingerprint(self) -> str:
        """Identity of the weights: 64 hex digits, the same wherever the files lie.

        SHA-256 over each weight file's name, size, first and last MiB, and one MiB in the middle; so files up to 3 MiB are
        hashed whole, and in larger ones an edit that keeps the size and those parts goes unseen.
        """
        digest = hashlib.sha256()
        for file in self.source.files:
            size = file.stat().st_size
            digest.update(json.dumps([file.name, size]).encode())
            with file.open("rb") as data:
                for start in (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES):
                    data.seek(max(start, 0))
                    digest.update(data.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def open_checkpoint(model: str | Path, *, tokenizer: str | None = None, revision: str | None = None) -> Checkpoint:
    """Open a model.

    Args:
        model: a Hugging Face directory, a ``.gguf`` file, an Orbax directory written by ``jaxpaged convert``, or a hub id
            such as ``owner/name`` (fetched into the hub's cache; offline mode is respected).
        tokenizer: directory or hub id to take the tokenizer from instead.
        revision: branch, tag or commit of a hub id.

    Returns:
        The checkpoint, with every tensor accounted for.

    Raises:
        CheckpointError: nothing there, or it is damaged, of an unsupported kind, or does not match its config.
    """
    path = Path(model).expanduser()
    if not path.exists():
        if path.suffix == ".gguf" or not hub.is_hub_id(str(model)):
            raise CheckpointError(f"model {str(model)!r}: no such file or directory, and it is not a hub id (owner/name)")
        path = hub.fetch(str(model), revision)
    try:
        checkpoint = _open_gguf(path) if path.is_file() else _open_directory(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if tokenizer is None:
        return checkpoint
    other = Path(tokenizer).expanduser()
    if not other.exists():
        other = hub.fetch(tokenizer, None, weights=False)
    ends = checkpoint.config.eos_token_ids
    if other.is_file():
        if other.suffix == ".gguf":
            load = functools.partial(gguf_tokenizer.gguf_tokenizer, gguf_io.read_gguf(other).metadata, str(other), ends)
            return dataclasses.replace(checkpoint, load_tokenizer=load)
        other = other.parent
    return dataclasses.replace(checkpoint, load_tokenizer=functools.partial(read_tokenizer, other, ends))


def float_dtype(dtype: Any) -> np.dtype:
    """``dtype`` as numpy dtype if parameters can be loaded as such.

    Raises:
        CheckpointError: any other.
    """
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        wanted = np.dtype(object)
    if wanted not in _FLOATS:
        raise CheckpointError(f"dtype {dtype!r} is not supported for parameters; supported: float32, bfloat16, float16")
    return wanted


@dataclasses.dataclass(frozen=True)
class _Assembled:
    """Parameters put together from the tensors of GGUF or safetensors files."""

    tensors: gguf_io.GgufFile | safetensors_io.SafetensorsFiles
    parts: dict[str, tuple[names.Part, ...]]

    @property
    def files(self) -> tuple[Path, ...]:
        return self.tensors.files

    def read(self, path: str, shape: tuple[int, ...], dtype: np.dtype, *, owned: bool) -> np.ndarray:
        parts = self.parts[path]
        if len(parts) == 1 and not owned and (view := self.tensors.view(parts[0], dtype)) is not None:
            return view
        out, row = empty_pages(shape, dtype), 0
        for part in parts:
            self.tensors.read_into(part, out[row : row + part.shape[0]])
            row += part.shape[0]
        return out


def _open_gguf(path: Path) -> Checkpoint:
    file = gguf_io.read_gguf(path)
    config = gguf_config.gguf_config(file)
    parts = names.gguf_parts(config)
    names.check_tensors(parts, {name: info.shape for name, info in file.tensors.items()}, str(path))
    load = functools.partial(gguf_tokenizer.gguf_tokenizer, file.metadata, str(path), config.eos_token_ids)
    return Checkpoint(path, config, {}, _Assembled(file, parts), load)


def _open_directory(path: Path) -> Checkpoint:
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file():
        if len(ggufs) == 1:
            return _open_gguf(ggufs[0])
        hint = f"; it holds {len(ggufs)} GGUF files, give one of them" if ggufs else ""
        raise CheckpointError(f"{path}: no config.json: not a Hugging Face or converted model directory{hint}")
    fields = _read_object(path / "config.json")
    generation = _read_object(path / "generation_config.json")
    config = ModelConfig.from_hf_dict(fields)
    ends = token_ids(generation.get("eos_token_id"), f"{path / 'generation_config.json'}: eos_token_id")
    config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))
    load = functools.partial(read_tokenizer, path, config.eos_token_ids) if has_tokenizer(path) else lambda: None
    if orbax_io.is_orbax(path):
        return Checkpoint(path, config, generation, orbax_io.OrbaxParams(path, config), load)
    tensors = safetensors_io.open_safetensors(path)
    shapes = {name: info.shape for name, info in tensors.tensors.items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)  # a copy of the embedding that some writers keep
    parts = names.hf_parts(config)
    names.check_tensors(parts, shapes, str(path))
    if not (fields.get("dtype") or fields.get("torch_dtype")):
        stored = {"F32": "float32", "F16": "float16"}.get(tensors.tensors[parts["embed_tokens"][0].name].dtype, "bfloat16")
        config = dataclasses.replace(config, dtype=stored)
    return Checkpoint(path, config, generation, _Assembled(tensors, parts), load)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value
