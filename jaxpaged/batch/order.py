"""Results come in any order; records go out in the order of the input."""

from collections.abc import Iterator
from typing import Any

from jaxpaged.batch.items import BadLine, Item


class InOrder:
    """Puts results back into input order.

    Attributes:
        running: engine request id -> its item.
        ready: position -> result, finished but perhaps not yet its turn.
    """

    def __init__(self) -> None:
        self.running: dict[str, Item] = {}
        self.ready: dict[int, dict[str, Any] | BadLine] = {}
        self._position: dict[str, int] = {}
        self._next_in = 0
        self._next_out = 0

    @property
    def num_open(self) -> int:
        """Lines taken from the input that have no record yet."""
        return self._next_in - self._next_out

    def put_error(self, bad: BadLine) -> None:
        """A line that is done at once."""
        self.ready[self._next_in] = bad
        self._next_in += 1

    def start(self, request_id: str, item: Item) -> None:
        """A line the engine now works on."""
        self.running[request_id] = item
        self._position[request_id] = self._next_in
        self._next_in += 1

    def finish(self, request_id: str, result: dict[str, Any] | BadLine) -> None:
        """The engine is done with it."""
        del self.running[request_id]
        self.ready[self._position.pop(request_id)] = result

    def pop_ready(self) -> Iterator[dict[str, Any] | BadLine]:
        """Yields every result whose turn it is, and forgets it."""
        while self._next_out in self.ready:
            yield self.ready.pop(self._next_out)
            self._next_out += 1
