"""SIGINT and SIGTERM during a job: the first ends it cleanly, the second at once."""

import contextlib
import signal
import threading
from types import FrameType
from typing import Any, Self

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal arrived while nothing can be finished cleanly (the model is still loading).

    Attributes:
        signum: the signal's number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class SignalWatch:
    """Context manager that turns the first signal into a flag and lets the second kill.

    Outside ``graceful()`` the first signal raises ``Interrupted`` where it strikes. Does nothing off the main thread, where
    Python allows no handlers.

    Attributes:
        signum: the signal that arrived, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._graceful = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {signum: signal.signal(signum, self._handle) for signum in WATCHED}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    @contextlib.contextmanager
    def graceful(self) -> Any:
        """While inside, the first signal only sets ``signum``."""
        self._graceful = True
        try:
            yield self
        finally:
            self._graceful = False

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum
        for watched in WATCHED:  # the second one needs no Python to take effect, so it also ends a long compilation
            signal.signal(watched, signal.SIG_DFL)
        if not self._graceful:
            raise Interrupted(signum)
