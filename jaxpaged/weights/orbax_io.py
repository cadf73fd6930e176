"""Converted models: an Orbax checkpoint of the canonical parameters beside config and tokenizer, complete in itself.

A directory holds ``params/`` (Orbax), ``config.json``, ``generation_config.json``, tokenizer files and, written last,
``jaxpaged.json``. It is built under another name and renamed when whole, so a half-written one never looks complete.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from tqdm import tqdm

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.model_config import ModelConfig
from jaxpaged.param_names import model_params
from jaxpaged.weights.host_memory import empty_pages
from jaxpaged.weights.tokenizer import Tokenizer

MARKER = "jaxpaged.json"
PARAMS = "params"
FORMAT = 1
CHUNK_BYTES = 4 << 20
"""Bytes of a parameter stored as one piece: the buffers that reading needs are of this size."""


class Convertible(Protocol):
    """What is needed of an opened checkpoint to convert it."""

    @property
    def path(self) -> Path:
        """Where it lies."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The hyper-parameters."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """The recommended sampling settings."""
        ...

    def iter_params(self, dtype: Any, *, owned: bool = False) -> Iterator[tuple[str, np.ndarray]]:
        """All parameters in model order."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer."""
        ...


def save_orbax(checkpoint: Convertible, dst: str | Path, dtype: Any = None, progress: bool = False) -> Path:
    """Write a checkpoint of any kind as a converted model.

    Args:
        checkpoint: the source.
        dst: directory to create; must not exist yet, or be empty.
        dtype: of the stored parameters; the checkpoint's own if None.
        progress: show a progress bar on standard error.

    Returns:
        ``dst``.

    Raises:
        ConfigError: ``dst`` exists and is not an empty directory, or cannot be written.
        CheckpointError: the source cannot be read as asked.
    """
    target = Path(dst).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: exists already; give a new directory")
    partial = target.with_name(target.name + ".incomplete")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(checkpoint, partial, checkpoint.config.dtype if dtype is None else dtype, progress)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def is_orbax(path: Path) -> bool:
    """Whether a directory is a converted model.

    Raises:
        CheckpointError: it is one left unfinished, or of a newer format.
    """
    if not (path / MARKER).is_file():
        if (path / PARAMS).is_dir():
            raise CheckpointError(f"{path}: an unfinished conversion (no {MARKER}); convert the model again")
        return False
    try:
        found = json.loads((path / MARKER).read_text(encoding="utf-8"))["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MARKER}: damaged: {error!r}") from error
    if found != FORMAT:
        raise CheckpointError(f"{path}: converted with format {found!r}; this version reads format {FORMAT}")
    return True


@dataclasses.dataclass(frozen=True)
class OrbaxParams:
    """The parameters of a converted model."""

    path: Path
    config: ModelConfig

    def __post_init__(self):
        stored = json.loads((self.path / MARKER).read_text(encoding="utf-8")).get("shapes", {})
        shapes = {name: tuple(shape) for name, shape in stored.items()}
        wanted = model_params(self.config)
        wrong = [name for name in {**wanted, **shapes} if wanted.get(name) != shapes.get(name)]
        if wrong:
            details = "; ".join(f"{name} is {shapes.get(name)}, wanted {wanted.get(name)}" for name in wrong[:12])
            raise CheckpointError(f"{self.path}: {len(wrong)} parameter(s) do not match the config: {details}")

    @property
    def files(self) -> tuple[Path, ...]:
        """The marker (it holds a hash of all parameters) and the parameter files."""
        return (self.path / MARKER, *sorted(file for file in (self.path / PARAMS).rglob("*") if file.is_file()))

    def read(self, path: str, shape: tuple[int, ...], dtype: np.dtype, *, owned: bool) -> np.ndarray:
        """One parameter as a numpy array of ``dtype``; always in memory of its own."""
        import orbax.checkpoint as ocp  # a second to import, and few runs need it

        found = self._restore({path: ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)}, {path: 0})
        out = empty_pages(shape, dtype)
        out[...] = found[path]
        return out

    def load(self, dtype: np.dtype, shardings: Mapping[str, jax.sharding.Sharding]) -> dict[str, jax.Array]:
        """All parameters, one at a time; where split, each device reads only its own part.

        Args:
            dtype: of the result.
            shardings: canonical path -> where it goes; the default device where absent.

        Returns:
            Canonical path -> device array.

        Raises:
            CheckpointError: the parameter files are damaged.
        """
        import orbax.checkpoint as ocp

        shapes = model_params(self.config)
        params: dict[str, jax.Array] = {}
        for path, shape in shapes.items():
            place = shardings.get(path)  # None leaves the array uncommitted, as other checkpoints do: the same programs then
            if place is None or len(place.device_set) == 1:
                params[path] = jax.block_until_ready(jax.device_put(self.read(path, shape, dtype, owned=True), place))
                continue
            args = ocp.ArrayRestoreArgs(dtype=dtype, sharding=place, global_shape=shape)
            wanted = jax.ShapeDtypeStruct(shape, dtype)
            params[path] = jax.block_until_ready(self._restore({path: args}, {path: wanted})[path])
        return params

    def _restore(self, args: Mapping[str, Any], items: Mapping[str, Any]) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        request = ocp.args.PyTreeRestore(item=_nest(items), restore_args=_nest(args), partial_restore=True)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                tree = checkpointer.restore((self.path / PARAMS).absolute(), args=request)
        except (ValueError, OSError, KeyError) as error:
            raise CheckpointError(f"{self.path / PARAMS}: cannot be restored: {error}") from error
        found = dict(_flatten(tree))
        return {path: found[path] for path in items}


def _write(checkpoint: Convertible, directory: Path, dtype: Any, progress: bool) -> None:
    import orbax.checkpoint as ocp

    digest, params = hashlib.sha256(), {}
    stream = checkpoint.iter_params(dtype, owned=True)
    for path, array in tqdm(stream, "converting", len(model_params(checkpoint.config)), disable=not progress, leave=False):
        digest.update(json.dumps([path, array.shape, array.dtype.name]).encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        params[path] = array
    stored = next(iter(params.values())).dtype.name
    shapes = {path: array.shape for path, array in params.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as checkpointer:
        saving = _nest({path: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for path in params})
        checkpointer.save((directory / PARAMS).absolute(), args=ocp.args.PyTreeSave(_nest(params), save_args=saving))
    tokenizer = checkpoint.tokenizer()
    if tokenizer is not None:
        tokenizer.save(directory)
    _dump(directory / "config.json", checkpoint.config.to_hf_dict() | {"dtype": stored})
    if checkpoint.generation_config:
        _dump(directory / "generation_config.json", checkpoint.generation_config)
    _dump(directory / MARKER, {"format": FORMAT, "sha256": digest.hexdigest(), "dtype": stored, "shapes": shapes})


def _dump(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value
