"""The size of a pool that nobody gave a size."""

import types
from typing import Any

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine import platform as platforms
from jaxpaged.errors import CapacityError

MODEL: Any = types.SimpleNamespace(
    max_position_embeddings=8192, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576,
    vocab_size=49152,
)  # fmt: skip


def pages(monkeypatch, name: str, limit: int, used: int = 0, **options: Any) -> int:
    """Pages of 1 MiB on a device with ``limit`` bytes."""
    monkeypatch.setattr(platforms, "available_bytes", lambda _: (limit, used))
    platform: Any = types.SimpleNamespace(name=name, dtype="bfloat16", page_size=16)
    return platforms.pool_pages(EngineConfig(model="m", **options), MODEL, platform, 1 << 20)


@pytest.mark.parametrize(("name", "share", "lost", "drift"), [("cpu", 0.3, 0.12, 0.03), ("gpu", 0.9, 0.02, 0.005)])
def test_a_little_more_or_less_free_memory_gives_the_same_pool(monkeypatch, name: str, share: float, lost: float, drift: float):
    """Its size is part of every program: another size would compile all of them again."""
    found = [pages(monkeypatch, name, int((21 << 30) * (1 + drift * i / 10))) for i in range(-10, 11)]
    assert len(set(found)) <= 2
    whole = [pages(monkeypatch, name, limit << 30) for limit in range(8, 30)]
    assert whole == sorted(whole)
    if name == "cpu":
        for limit, got in zip(range(8, 30), whole, strict=True):
            assert (1 - lost) * share * limit * 1024 - 2 <= got <= share * limit * 1024


def test_a_pool_is_never_larger_than_all_sequences_at_full_length(monkeypatch):
    assert pages(monkeypatch, "cpu", 1 << 40, max_num_seqs=3, max_model_len=100) == 3 * 7
    assert pages(monkeypatch, "cpu", 1 << 40, num_pages=123) == 123
    with pytest.raises(CapacityError, match="memory_fraction: 1 MiB are left"):
        pages(monkeypatch, "cpu", 5 << 20)
