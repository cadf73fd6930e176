"""The compile ledger: every program compiled while an engine lives, with its shape, the reason and the time it took."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """One compiled program.

    Attributes:
        program: what it does.
        shape: its bucket.
        why: "warm-up", "first use", or "outside the engine's programs".
        seconds: wall time of tracing and compiling (or loading from the cache); programs compile side by side.
        num_compilations: XLA compilations it took, loads from the persistent cache included.
    """

    program: str
    shape: str
    why: str
    seconds: float
    num_compilations: int


class CompileLedger:
    """Counts every XLA compilation in the process since it was made and files those of the engine under a name.

    Attributes:
        entries: named programs in order.
        num_compilations: all compilations seen, named or not.
    """

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []
        self.num_compilations = 0
        self._lock = threading.Lock()
        self._here = threading.local()  # compilations of the present thread
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            self._here.count = getattr(self._here, "count", 0) + 1
            with self._lock:
                self.num_compilations += 1

    @contextmanager
    def watch(self, program: str, shape: str, why: str) -> Iterator[None]:
        """Files what this thread compiles inside under ``program``; adds nothing where nothing was."""
        before, start = getattr(self._here, "count", 0), time.perf_counter()
        yield
        count = getattr(self._here, "count", 0) - before
        if count:
            self.entries.append(LedgerEntry(program, shape, why, time.perf_counter() - start, count))

    @property
    def seconds(self) -> float:
        """Total seconds of the named programs."""
        return sum(entry.seconds for entry in self.entries)

    def table(self) -> str:
        """The ledger as text, one line a program."""
        lines = [f"{'program':<14} {'shape':<36} {'why':<10} {'compiled':>8} {'seconds':>8}"]
        for e in self.entries:
            lines.append(f"{e.program:<14} {e.shape:<36} {e.why:<10} {e.num_compilations:>8} {e.seconds:>8.2f}")
        lines.append(f"{len(self.entries)} programs, {self.num_compilations} compilations in the process, {self.seconds:.1f} s")
        return "\n".join(lines)
