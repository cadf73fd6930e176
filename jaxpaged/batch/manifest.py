"""The manifest beside an output file: what the job was, so that a resumed one can prove to be the same."""

import contextlib
import dataclasses
import json
import os
import platform
import tempfile
from importlib import metadata
from typing import Any

from jaxpaged.batch.config import canonical_json
from jaxpaged.batch.errors import JobError

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a job is made of.

    Attributes:
        config: every option that may change the output, by dotted name, as JSON values.
        config_sha256: of ``config`` in canonical JSON.
        input_sha256: of the input file's bytes.
        input_format: "jsonl", "text" or "openai", as decided at the start.
        weights: the engine's fingerprint of the weights.
        versions: of jaxpaged, jax and Python, at the start.
        created: Unix seconds that OpenAI records carry: the input file's modification time at the start.
        format_version: of this file.
    """

    config: dict[str, Any]
    config_sha256: str
    input_sha256: str
    input_format: str
    weights: str
    versions: dict[str, str]
    created: int
    format_version: int = FORMAT_VERSION


def manifest_path(output_path: str) -> str:
    """Where the manifest of an output file lies."""
    return f"{output_path}.manifest.json"


def read_manifest(output_path: str) -> Manifest | None:
    """The manifest beside ``output_path``; None where there is none.

    Raises:
        JobError: it cannot be read or is no manifest of this version.
    """
    path = manifest_path(output_path)
    try:
        with open(path, encoding="utf-8") as file:
            fields = json.load(file)
        manifest = Manifest(**fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise JobError(f"{path}: no readable manifest ({error}); use --overwrite to start over") from error
    if manifest.format_version != FORMAT_VERSION:
        raise JobError(
            f"{path}: manifest version {manifest.format_version}, this jaxpaged reads {FORMAT_VERSION}; use --overwrite"
        )
    return manifest


def write_manifest(output_path: str, manifest: Manifest) -> None:
    """Puts the manifest in place at one stroke: a reader sees the old one, the new one, or none, never a part.

    Raises:
        JobError: it cannot be written.
    """
    path = manifest_path(output_path)
    folder = os.path.dirname(os.path.abspath(path))
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=".manifest-", dir=folder)
        os.fchmod(handle, 0o644)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(manifest), file, indent=2, sort_keys=True, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(folder)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise JobError(f"cannot write {path!r}: {error.strerror}; nothing was generated yet") from error


def remove_manifest(output_path: str) -> None:
    """Removes the manifest, if any, and makes that durable.

    Raises:
        JobError: it cannot be removed.
    """
    path = manifest_path(output_path)
    try:
        os.unlink(path)
        sync_folder(os.path.dirname(os.path.abspath(path)))
    except FileNotFoundError:
        return
    except OSError as error:
        raise JobError(f"cannot remove {path!r}: {error.strerror}") from error


def sync_folder(folder: str) -> None:
    """Makes creations, renames and removals in a folder durable (where the file system can)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def config_changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The options that differ, as ``name: old -> new``."""
    changes = []
    for key in sorted(then.keys() | now.keys()):
        old, new = (canonical_json(side[key]) if key in side else "not set" for side in (then, now))
        if old != new:
            changes.append(f"{key}: {old} -> {new}")
    return changes


def refuse_changed(then: Manifest, now: Manifest) -> None:
    """Compares everything known before the model is loaded.

    Raises:
        JobError: names the config option or the input that changed.
    """
    changes = config_changes(then.config, now.config)
    if changes:
        raise JobError(f"--resume: the config changed ({'; '.join(changes)}); restore it, or start over with --overwrite")
    if then.input_sha256 != now.input_sha256:
        raise JobError(
            f"--resume: the input file changed (sha256 was {then.input_sha256[:12]}..., is {now.input_sha256[:12]}...); "
            "restore it, or start over with --overwrite"
        )
    if then.input_format != now.input_format:
        raise JobError(
            f"--resume: input.format changed ({then.input_format} -> {now.input_format}); set input.format, or --overwrite"
        )


def refuse_changed_weights(then: str, now: str) -> None:
    """Compares the weights' fingerprints.

    Raises:
        JobError: they differ.
    """
    if then != now:
        raise JobError(
            f"--resume: the weights changed (fingerprint was {then[:16]}, is {now[:16]}); "
            "use the same model, or start over with --overwrite"
        )


def versions() -> dict[str, str]:
    """Versions of what computes the results, by name."""
    found = {"python": platform.python_version()}
    for name in ("jaxpaged", "jax", "jaxlib"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def show_versions(found: dict[str, str]) -> str:
    """Versions on one line."""
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
