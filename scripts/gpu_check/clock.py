"""Time boxes and timing."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


class Box:
    """A section's share of wall-clock time; work that has not started when it is over is reported as left out."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the section has to stop; never negative."""
        return max(0.0, self.end - time.monotonic())


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What differs between a real run and ``--smoke``.

    Attributes:
        smoke: interpret mode on CPU, tiny shapes.
        repeats: timed calls; the median counts.
        flush_bytes: KV bytes that one call of a timed program touches at least, so that caches do not answer.
        max_pool_bytes: largest pool to allocate.
    """

    smoke: bool
    repeats: int
    flush_bytes: int
    max_pool_bytes: int

    @property
    def interpret(self) -> bool:
        """How to run the kernels."""
        return self.smoke


def median_seconds(fn: Callable[..., Any], args: tuple, repeats: int) -> float:
    """Median wall-clock time of ``fn(*args)`` until its result is ready, after one warm-up call.

    Args:
        fn: jitted, so that one call is one dispatch.
        args: its arguments.
        repeats: timed calls, >= 1.
    """
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def reason(error: BaseException) -> str:
    """An error as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
