"""One step's plan: who runs, with how many tokens, and who must make room.

There are no phases. Every running sequence gets the tokens it lacks, in rank order, under one budget; then the queue is
admitted in rank order. A long prompt takes at most half of the budget that is left while others want some, and what
nobody wanted is handed out at the end. Room is made by preempting the lowest-ranked request, never one that outranks the
taker and never one that already has a row in this step, so the plan needs no undoing and the first-ranked request always
gets on. A sequence that finds no room waits with its pages for the next step.

Source: iteration-level scheduling: Yu et al. 2022 (Orca); preemption of the latest arrival, all-or-nothing swap of groups:
Kwon et al. 2023 (PagedAttention), section 4.5.
"""

from jaxpaged.config import SchedulerConfig
from jaxpaged.scheduler.audit import measure
from jaxpaged.scheduler.events import EventLog
from jaxpaged.scheduler.kv_manager import KVManager
from jaxpaged.scheduler.running_set import RunningSet
from jaxpaged.scheduler.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxpaged.scheduler.sequence_state import SeqState, Status
from jaxpaged.scheduler.waiting_queue import WaitingQueue


class _Chunk:
    """A row whose number of tokens may still grow in this plan."""

    __slots__ = ("end", "row", "state", "total")

    def __init__(self, row: int, state: SeqState, end: int, total: int) -> None:
        self.row, self.state, self.end, self.total = row, state, end, total


class StepPlanner:
    """Plans the steps of the running sequences and admits queued ones.

    Args:
        config: budgets, policy and preemption mode.
        kv: pages and tables.
        waiting: the queue.
        running: who runs.
        events: where changes are told.

    Attributes:
        num_steps, num_cached_tokens: totals since start.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVManager, waiting: WaitingQueue, running: RunningSet, events: EventLog | None
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._events = events
        self.num_steps = self.num_cached_tokens = 0
        self._budget = 0
        self._promised = 0
        self._stalled = False
        self._rows: list[ScheduledSequence | None] = []
        self._samples: list[tuple[int, int]] = []
        self._chunks: list[_Chunk] = []
        self._behind: list[SeqState] = []

    # --- the plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> SchedulerOutput:
        """Plans the next step and advances every scheduled sequence's counters."""
        step = self.num_steps
        self.num_steps += 1
        if self._events is not None:
            self._events.begin_step(step)
        kv = self._kv
        kv.begin_step()
        self._budget = self._config.max_num_batched_tokens
        self._promised, self._stalled = 0, False
        self._rows, self._samples, self._chunks, self._behind = [], [], [], []
        self._running.preempted = []
        self._plan_running()
        newcomers: list[SeqState] = []
        if self._budget > 0 and not self._stalled and not self._running.preempted and len(self._waiting):
            newcomers = self._admit()
        elif self._stuck():
            self._running.preempt_last()
            newcomers = self._admit()
        forks = self._finish_chunks() if self._chunks else []
        if self._events is not None:
            self._tell_step(newcomers)
        for state in self._behind:
            kv.free_behind_window(state)
        for state in forks:
            newcomers += self._fork_samples(state)
        if newcomers:
            self._running.join(newcomers)
        freed = kv.end_step()
        return SchedulerOutput(
            step=step,
            scheduled=tuple(self._rows),  # type: ignore[arg-type]
            samples=tuple(self._samples),
            saves=tuple(kv.saves),
            restores=tuple(kv.restores),
            copies=tuple(kv.copies),
            freed_pages=freed,
            preempted=tuple(self._running.preempted),
        )

    def _plan_running(self) -> None:
        running, kv, page_size = self._running.states, self._kv, self._config.page_size
        ref_cnt, rows, samples = kv.pool.ref_cnt, self._rows, self._samples
        new = tuple.__new__
        window = self._config.sliding_window
        edge = 0 if window is None else window - 1 + page_size
        budget = self._budget
        index = 0
        while index < len(running) and budget > 0:
            state = running[index]
            index += 1
            seq = state.seq
            computed = seq.num_computed_tokens
            inflight = seq.num_inflight_tokens
            total = len(seq.token_ids) + inflight
            if total - computed != 1 or not state.plain:
                self._budget = budget
                self._plan_chunk(state, index)
                budget = self._budget
                continue
            if inflight > 1 or total >= state.limit:
                continue
            table = state.table
            size = len(table)
            if computed >= size * page_size or ref_cnt[table[-1]] > 1:
                if not self._running.make_room(state, total, index):
                    self._stalled = True
                    continue
                kv.grow(state, total)
                size = len(table)
            seq.num_computed_tokens = total
            seq.num_inflight_tokens = inflight + 1
            dirty = state.dirty
            pages: tuple[int, ...] = ()
            if dirty < size:
                pages = tuple(table[dirty:])
                state.dirty = size
            samples.append((seq.seq_id, len(rows)))
            rows.append(new(ScheduledSequence, (seq.seq_id, computed, 1, inflight == 1, dirty, pages)))
            budget -= 1
            if total >= state.index_at and not inflight:
                kv.written(state)
            if edge and total >= state.num_behind * page_size + edge:
                self._behind.append(state)
        self._budget = budget

    def _plan_chunk(self, state: SeqState, index: int) -> None:
        """Plans a row of any kind for ``running[index - 1]``."""
        seq = state.seq
        computed = seq.num_computed_tokens
        total = len(seq.token_ids) + seq.num_inflight_tokens
        if state.hold or total <= computed or seq.num_inflight_tokens > 1:
            return
        if seq.num_inflight_tokens and total >= state.limit:
            return
        kv = self._kv
        end = total
        if total - computed > 1:
            waiting = self._running.states[index:]
            others = len(self._waiting) > 0 or any(_lacks(other) > 1 for other in waiting)
            end = computed + self._share(total - computed, len(waiting), others)
        if not self._running.make_room(state, end, index):
            end = min(end, kv.tokens_that_fit(state, kv.pool.num_available))
            if end <= computed:
                self._stalled = True
                return
        self._add_chunk(state, end, total)

    def _share(self, wanted: int, behind: int, others: bool) -> int:
        """Tokens a row gets of the budget: one is left for each running sequence behind, half of it while others want some."""
        most = max(1, self._budget - behind)
        if others:
            most = min(most, (self._budget + 1) // 2)
        return min(wanted, most)

    def _add_chunk(self, state: SeqState, end: int, total: int) -> None:
        self._kv.grow(state, end)
        self._budget -= end - state.seq.num_computed_tokens
        self._chunks.append(_Chunk(len(self._rows), state, end, total))
        self._rows.append(None)
        if end < total:
            self._promised += max(0, self._kv.peak_pages(total) - len(state.table) + state.num_behind)

    def _finish_chunks(self) -> list[SeqState]:
        """Hands out what is left of the budget, then writes the rows. Returns sequences whose samples are to be forked."""
        kv, forks = self._kv, []
        for chunk in self._chunks:
            if chunk.end < chunk.total and self._budget > 0:
                end = min(chunk.total, chunk.end + self._budget, kv.tokens_that_fit(chunk.state, kv.pool.num_available))
                if end > chunk.end:
                    kv.grow(chunk.state, end)
                    self._budget -= end - chunk.end
                    chunk.end = end
            state, seq = chunk.state, chunk.state.seq
            computed, inflight = seq.num_computed_tokens, seq.num_inflight_tokens
            table, dirty = state.table, state.dirty
            self._rows[chunk.row] = ScheduledSequence(
                seq.seq_id, computed, chunk.end - computed, inflight == 1, dirty, tuple(table[dirty:])
            )
            state.dirty = len(table)
            seq.num_computed_tokens = chunk.end
            if self._config.sliding_window is not None:
                self._behind.append(state)
            if min(chunk.end, len(seq.token_ids)) >= state.index_at:
                kv.written(state)
            if chunk.end == chunk.total:
                self._samples.append((seq.seq_id, chunk.row))
                seq.num_inflight_tokens = inflight + 1
                if state.owner.beam is not None:
                    state.hold = True
                elif state.pending:
                    self._samples.extend((sample.seq.seq_id, chunk.row) for sample in state.pending)
                    forks.append(state)
        return forks

    def _fork_samples(self, state: SeqState) -> list[SeqState]:
        """The common prompt is computed: every sample names its pages and awaits its own first token."""
        samples, state.pending = state.pending, []
        state.seats = 1
        state.plain = True
        for sample in samples:
            self._kv.fork(state, sample, state.seq.num_computed_tokens, "fork")
            sample.seq.num_inflight_tokens = 1
            sample.status = Status.RUNNING
            sample.admitted = True
        return samples

    def _stuck(self) -> bool:
        """Whether nothing runs or is in flight while a sequence of higher rank than the last running one is queued.

        That is a beam whose request lost a seat to a lower-ranked one: its siblings wait for it and it waits for the seat.
        """
        if self._rows or not self._running.states or (head := self._waiting.head()) is None:
            return False
        idle = not any(state.seq.num_inflight_tokens for state in [head, *self._running.states])
        return idle and head.rank < self._running.states[-1].rank and self._running.states[-1].owner is not head.owner

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> list[SeqState]:
        """Admits from the head of the queue while seats, pages and budget last. Returns the admitted, each with its row."""
        kv, waiting, newcomers = self._kv, self._waiting, []
        while self._budget > 0 and (state := waiting.head()) is not None:
            owner = state.owner
            group = [state]
            if len(owner.states) > 1:
                group = [member for member in owner.states if member.status is Status.SWAPPED] or group
            if any(member.seq.num_inflight_tokens for member in group):
                break
            seats = sum(member.seats for member in group)
            if self._running.seats_used + seats > self._config.max_num_seqs:
                break
            if group[0].status is Status.SWAPPED:
                if kv.swap_in_need(group) + self._promised > kv.pool.num_available:
                    break
                self._running.enter(group)
                kv.swap_in(group)
            elif not self._admit_fresh(state):
                break
            newcomers += group
            for member in group:
                seq = member.seq
                total = len(seq.token_ids)
                lacks = total - seq.num_computed_tokens
                if self._budget > 0 and lacks > 0 and not member.hold:
                    end = seq.num_computed_tokens + self._share(lacks, 0, len(waiting) > 0)
                    end = min(end, kv.tokens_that_fit(member, kv.pool.num_available))
                    if end > seq.num_computed_tokens:
                        self._add_chunk(member, end, total)
        return newcomers

    def _admit_fresh(self, state: SeqState) -> bool:
        """Admits a sequence without pages if its known tokens and the next one fit now. Counts hits anew each time."""
        kv, pool, seq = self._kv, self._kv.pool, state.seq
        window, page_size = self._config.sliding_window, self._config.page_size
        donor, shared = None, 0
        if window is None and len(state.owner.states) > 1:
            running = [member for member in state.owner.states if member.status is Status.RUNNING]
            full = seq.num_prompt_tokens // page_size
            donor = next((member for member in running if member.seq.num_computed_tokens >= full * page_size), None)
            if running and donor is None:
                return False  # a sibling computes the common prompt
            shared = min(full, (len(seq.token_ids) - 1) // page_size)
        found = kv.cache.find(state)
        if donor is not None and donor.table[:shared] != [entry.page for entry, on_device in found[:shared] if on_device]:
            found = []
        else:
            donor = None
        behind = 0 if window is None else max(0, (len(found) * page_size - window + 1) // page_size)
        kept = [entry.page for entry, on_device in found[behind:] if on_device]
        revived = sum(1 for page in kept if not pool.ref_cnt[page] and page not in pool.pins)
        need = kv.peak_pages(min(len(seq.token_ids) + 1, state.limit - 1)) - (shared if donor is not None else len(kept))
        if need + self._promised > pool.num_available - revived:
            return False
        self._running.enter([state], cached=len(found) * page_size)
        if donor is not None:
            kv.fork(donor, state, shared * page_size, "fork")
        else:
            kv.adopt(state, found)
        if not state.admitted:
            state.admitted = True
            seq.num_cached_tokens = len(found) * page_size
            self.num_cached_tokens += len(found) * page_size
        return True

    # --- events ------------------------------------------------------------------------------------------------------

    def _tell_step(self, newcomers: list[SeqState]) -> None:
        assert self._events is not None
        usage = measure(self._kv, [*self._running.states, *newcomers])
        self._events.emit(
            "step",
            tokens=sum(row.num_tokens for row in self._rows if row is not None),
            used=usage.used, shared=usage.shared, cached=usage.cached, free=usage.free, wasted=usage.wasted,
            running=len(self._running.states) + len(newcomers), waiting=len(self._waiting),
            writes=[[row.seq_id, row.num_computed_tokens, row.num_tokens] for row in self._rows if row is not None],
        )  # fmt: skip


def _lacks(state: SeqState) -> int:
    return len(state.seq.token_ids) + state.seq.num_inflight_tokens - state.seq.num_computed_tokens
