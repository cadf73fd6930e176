"""Models on the Hugging Face hub, through ``huggingface_hub``."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from jaxpaged.errors import CheckpointError

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json", "merges.txt",
    "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_WEIGHT_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id: ``owner/name`` or ``name``."""
    return re.fullmatch(r"(?:[\w.-]+/)?[\w.-]+", name) is not None and not name.startswith((".", "/")) and ".." not in name


def fetch(repo_id: str, revision: str | None, *, weights: bool = True) -> Path:
    """Put the needed files of a hub repository into the local cache.

    Args:
        repo_id: ``owner/name``.
        revision: branch, tag or commit; the main branch if None.
        weights: with safetensors and configs, else the tokenizer's files alone.

    Returns:
        The snapshot's directory.

    Raises:
        CheckpointError: unknown or not permitted repository; or offline (``HF_HUB_OFFLINE`` or no connection) and not
            cached.
    """
    patterns = [*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else ())]
    label = repo_id if revision is None else f"{repo_id} at {revision}"
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"model {label!r}: no such local path, it is not in the hub's cache, and the hub cannot be reached "
            "(offline, or HF_HUB_OFFLINE is set); give a local directory or .gguf file, or fetch it while online"
        ) from error
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise CheckpointError(f"model {label!r}: no such local path, and the hub does not give it: {error}") from error
