"""The running sequences: who has pages and a seat, who must give them up.

Source: preemption of the latest arrival, recompute for single sequences, all-or-nothing swap of groups: Kwon et al. 2023
(PagedAttention), section 4.5.
"""

from jaxpaged.config import SchedulerConfig
from jaxpaged.scheduler.events import EventLog
from jaxpaged.scheduler.kv_manager import KVManager
from jaxpaged.scheduler.sequence_state import SeqState, Status
from jaxpaged.scheduler.waiting_queue import WaitingQueue


class RunningSet:
    """Running sequences in rank order, and their seats.

    Args:
        config: preemption mode.
        kv: pages and tables.
        waiting: where preempted sequences go.
        events: where changes are told.

    Attributes:
        states: sequences with pages and a seat, in rank order.
        seats_used: rows they may need in a step.
        preempted: ids of the sequences preempted by the current plan.
        num_preemptions: since start.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager, waiting: WaitingQueue, events: EventLog | None) -> None:
        self._mode = config.preemption_mode
        self._kv = kv
        self._waiting = waiting
        self._events = events
        self.states: list[SeqState] = []
        self.seats_used = 0
        self.preempted: list[int] = []
        self.num_preemptions = 0
        self._stale = False

    def lose(self, state: SeqState) -> None:
        """A running sequence ended: its seat is free at once, its place in the list at the next ``prune``."""
        self.seats_used -= state.seats
        self._stale = True

    def gain(self, state: SeqState) -> None:
        """A fork with pages starts to run."""
        state.status = Status.RUNNING
        self.seats_used += state.seats
        self.states.append(state)
        self.states.sort(key=_rank)

    def split_seats(self, state: SeqState) -> None:
        """The first beam gives back the seats it kept for the others."""
        if state.status is Status.RUNNING:
            self.seats_used -= state.seats - 1
        state.seats = 1

    def prune(self) -> None:
        """Takes ended sequences out of the running list."""
        if self._stale:
            self.states = [state for state in self.states if state.status is Status.RUNNING]
            self._stale = False

    def join(self, newcomers: list[SeqState]) -> None:
        """Lists sequences that ``enter``ed or were forked by the plan."""
        self.states += newcomers
        self.states.sort(key=_rank)

    def enter(self, group: list[SeqState], cached: int = 0) -> None:
        """Gives queued sequences their seats; ``cached`` tokens of them were found."""
        for state in group:
            self._waiting.leave(state, Status.RUNNING)
            self.seats_used += state.seats
            if self._events is not None:
                self._events.emit(
                    "admit", request=state.owner.request.request_id, seq=state.seq.seq_id,
                    prompt=state.seq.num_prompt_tokens, cached=cached,
                )  # fmt: skip

    def make_room(self, state: SeqState, end: int, index: int) -> bool:
        """Preempts from the end of ``states[index:]`` until ``state`` can be written up to ``end``; False where it cannot.

        What is needed is asked again each time: where the victim shared the last page, no copy of it is needed any more.
        """
        kv, running = self._kv, self.states
        while kv.pool.num_available < kv.pages_needed(state, end):
            if len(running) <= index or running[-1].owner is state.owner:
                return False
            self.preempt_last()
        return True

    def preempt_last(self) -> None:
        """Takes the pages of the lowest-ranked sequence, or moves its whole group to the host; it is queued again."""
        victim = self.states[-1]
        mode = self._mode
        live = [state for state in victim.owner.states if state.status is not Status.FINISHED]
        group = [state for state in live if state.status is Status.RUNNING]
        wants_swap = mode == "swap" or (mode == "auto" and len(live) > 1)
        if wants_swap and self._kv.can_swap_out(group):
            if self._events is not None:
                self._tell(group, "swap")
            self._kv.swap_out(group)
            for state in group:
                self._leave_running(state, Status.SWAPPED)
            del self.states[-len(group) :]
            return
        if self._events is not None:
            self._tell([victim], "recompute")
        self._kv.release(victim, "preempt")
        victim.seq.num_computed_tokens = 0
        self._leave_running(victim, Status.WAITING)
        self.states.pop()

    def _leave_running(self, state: SeqState, status: Status) -> None:
        self.seats_used -= state.seats
        self.num_preemptions += 1
        self.preempted.append(state.seq.seq_id)
        self._waiting.push(state, status)

    def _tell(self, group: list[SeqState], why: str) -> None:
        assert self._events is not None
        for state in group:
            self._events.emit("preempt", request=state.owner.request.request_id, seq=state.seq.seq_id, why=why)


def _rank(state: SeqState) -> tuple[int, int, int, int]:
    return state.rank
