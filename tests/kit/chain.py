"""CHAIN: a legal Llama checkpoint whose next-token logits depend on the current token alone.

``o_proj`` and ``down_proj`` are zero, embedding rows are one-hot (hidden size > vocabulary), and the untied head's column
``t`` holds the logits wanted after token ``t``. So a test scripts any output through the public API. One limit: a script
cannot pass through the same token twice with different successors.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.tiny import tiny_config, tiny_tensors, write_hf


def successors(*scripts: Sequence[int]) -> dict[int, int]:
    """Successor of each token along the given token scripts; raises if one token would need two successors."""
    table: dict[int, int] = {}
    for script in scripts:
        for token, after in itertools.pairwise(script):
            if table.setdefault(token, after) != after:
                raise ValueError(f"token {token} would need two successors: {table[token]} and {after}")
    return table


def chain_logits(table: Mapping[int, int], vocab_size: int = 64, peak: float = 20.0) -> np.ndarray:
    """Logits ``[V, V]`` (row: current token): ``peak`` at the successor, 0 elsewhere; flat rows where none is given."""
    logits = np.zeros((vocab_size, vocab_size), np.float32)
    for token, after in table.items():
        logits[token, after] = peak
    return logits


def chain_tensors(config: Mapping[str, Any], logits: np.ndarray, nan_tokens: Iterable[int] = ()) -> dict[str, np.ndarray]:
    """The checkpoint's tensors. ``logits[t]`` are the logits after token ``t``; ``nan_tokens`` get a NaN embedding row."""
    v, d = config["vocab_size"], config["hidden_size"]
    if logits.shape != (v, v) or d <= v or config.get("tie_word_embeddings"):
        raise ValueError(f"need logits of shape {(v, v)}, got {logits.shape}; hidden {d} > vocabulary {v}; an untied head")
    tensors = tiny_tensors(config, seed=1)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor[:] = 1.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0.0
    embedding = np.zeros((v, d), np.float32)
    embedding[np.arange(v), np.arange(v)] = 1.0
    embedding[list(nan_tokens)] = np.nan
    head = np.zeros((v, d), np.float32)
    # The final norm turns a one-hot row into 1 / sqrt(1/D + eps); undo exactly that.
    head[:, :v] = logits.T * np.sqrt(1.0 / d + config["rms_norm_eps"])
    return tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}


def write_chain(
    directory: str | Path,
    logits: np.ndarray | Mapping[int, int],
    *,
    nan_tokens: Iterable[int] = (),
    dtype: str = "float32",
    generation_config: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write CHAIN into ``directory``.

    Args:
        logits: float ``[V, V]``, row = current token; or a successor table (see :func:`successors`).
        nan_tokens: tokens whose embedding row is NaN.
        dtype: of the stored tensors.
        generation_config: written as ``generation_config.json`` if given.
        overrides: ``config.json`` fields; ``vocab_size`` defaults to 64, ``hidden_size`` to the next multiple of 32 above it.
    """
    vocab_size = overrides.pop("vocab_size", 64)
    hidden_size = overrides.pop("hidden_size", (vocab_size // 32 + 1) * 32)
    config = tiny_config(vocab_size=vocab_size, hidden_size=hidden_size, **overrides)
    table = logits if isinstance(logits, np.ndarray) else chain_logits(logits, vocab_size)
    tensors = chain_tensors(config, table, nan_tokens)
    return write_hf(directory, config, tensors, dtype=dtype, generation_config=generation_config)
