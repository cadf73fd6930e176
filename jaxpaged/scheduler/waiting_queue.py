"""The queue of sequences without pages, best rank first."""

import heapq

from jaxpaged.scheduler.sequence_state import SeqState, Status


class WaitingQueue:
    """A heap by rank. Sequences that ended while queued, or wait for a decision of the host, are dropped when they come up."""

    __slots__ = ("_heap", "_pushes", "num_swapped", "num_waiting")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int, int], int, SeqState]] = []
        self._pushes = 0
        self.num_waiting = 0
        self.num_swapped = 0

    def push(self, state: SeqState, status: Status) -> None:
        """Queues a sequence as WAITING (no pages) or SWAPPED (pages on the host)."""
        state.status = status
        self._count(status, 1)
        self.requeue(state)

    def requeue(self, state: SeqState) -> None:
        """Puts a queued sequence that waited for a decision of the host back in line."""
        self._pushes += 1
        heapq.heappush(self._heap, (state.rank, self._pushes, state))

    def leave(self, state: SeqState, status: Status) -> None:
        """A queued sequence becomes something else; its entry is dropped when it comes up."""
        self._count(state.status, -1)
        state.status = status

    def _count(self, status: Status, by: int) -> None:
        if status is Status.SWAPPED:
            self.num_swapped += by
        else:
            self.num_waiting += by

    def head(self) -> SeqState | None:
        """The next sequence, left in the queue; None where there is none."""
        heap = self._heap
        while heap:
            state = heap[0][2]
            if _is_ready(state):
                return state
            heapq.heappop(heap)
        return None

    def __len__(self) -> int:
        return self.num_waiting + self.num_swapped

    def queued(self) -> set[int]:
        """Ids of the sequences a future ``head`` will return."""
        return {state.seq.seq_id for _, _, state in self._heap if _is_ready(state)}


def _is_ready(state: SeqState) -> bool:
    """Whether the sequence is queued and could use pages: one without pages that waits for the host could not."""
    return state.status is Status.SWAPPED or (state.status is Status.WAITING and not state.hold)
