"""Takes in what a step sampled: tokens, ends, beams, frees."""

from jaxpaged.config import SchedulerConfig
from jaxpaged.request import FinishReason, Request, Sequence
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler.beam import Continuation
from jaxpaged.scheduler.events import EventLog
from jaxpaged.scheduler.kv_manager import KVManager
from jaxpaged.scheduler.running_set import RunningSet
from jaxpaged.scheduler.scheduler_output import SchedulerOutput, StepResult
from jaxpaged.scheduler.sequence_state import RequestState, SeqState, Status
from jaxpaged.scheduler.waiting_queue import WaitingQueue

_NO_TOP: tuple[tuple[int, float], ...] = ()


class ResultApplier:
    """Keeps the live sequences and requests and applies results to them.

    Args:
        config: policy and page size.
        kv: pages and tables.
        waiting: the queue.
        running: who runs.
        events: where changes are told.

    Attributes:
        requests: live requests by id.
        states: live sequences by sequence id.
        num_generated_tokens: total since start; of a beam search, the tokens of its answer.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVManager, waiting: WaitingQueue, running: RunningSet, events: EventLog | None
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._events = events
        self.requests: dict[str, RequestState] = {}
        self.states: dict[int, SeqState] = {}
        self.num_generated_tokens = 0
        self._next_seq_id = 0

    def new_state(self, owner: RequestState, index: int, token_ids: list[int]) -> SeqState:
        """Makes a live sequence of ``owner`` with the next sequence id."""
        seq = self._new_sequence(owner.request, index, token_ids)
        request = owner.request
        priority = request.priority if self._config.policy == "priority" else 0
        state = SeqState(
            seq=seq,
            owner=owner,
            rank=(priority, request.arrival, owner.number, seq.seq_id),
            limit=owner.limit,
            stop_ids=owner.stop_ids,
            plain=owner.beam is None,
        )
        self.states[seq.seq_id] = state
        return state

    def _new_sequence(self, request: Request, index: int, token_ids: list[int]) -> Sequence:
        self._next_seq_id += 1
        return Sequence(self._next_seq_id - 1, request, index, token_ids, len(request.prompt_token_ids))

    # --- results -----------------------------------------------------------------------------------------------------

    def apply(self, output: SchedulerOutput, result: StepResult) -> list[Request]:
        """See ``Scheduler.update_from_output``."""
        states, kv = self.states, self._kv
        token_ids, logprobs, finite = result.token_ids, result.logprobs, result.finite
        top_ids, top_logprobs = result.top_ids, result.top_logprobs
        progressed: dict[int, Request] = {}
        for i, (seq_id, _) in enumerate(output.samples):
            state = states.get(seq_id)
            if state is None:
                continue
            seq = state.seq
            seq.num_inflight_tokens -= 1
            owner = state.owner
            progressed[owner.number] = owner.request
            if not finite[i]:
                self.end_request(owner, FinishReason.ERROR)
                continue
            if owner.beam is not None:
                state.candidates = (top_ids[i], top_logprobs[i])
                if all(beam.candidates is not None for beam in owner.states):
                    self._advance_beams(owner)
                continue
            token, logprob = token_ids[i], logprobs[i]
            tokens = seq.token_ids
            tokens.append(token)
            seq.cumulative_logprob += logprob
            self.num_generated_tokens += 1
            wanted = seq.request.params.logprobs  # type: ignore[union-attr]
            seq.logprobs.append(
                (logprob, tuple(zip(top_ids[i][:wanted], top_logprobs[i][:wanted], strict=True)) if wanted else _NO_TOP)
            )
            known = len(tokens)
            if token in state.stop_ids:
                self._end_by_stop(state, token)
            elif known >= state.limit:
                self._end(state, FinishReason.LENGTH)
            elif known >= state.index_at and seq.num_computed_tokens >= state.index_at:
                kv.cache.make_findable(state)
        requests = list(progressed.values())
        if len(requests) > 1:
            requests.sort(key=_arrival)
        self._prune_running()
        return requests

    def _end_by_stop(self, state: SeqState, token: int) -> None:
        request = state.owner.request
        params = request.params
        if isinstance(params, SamplingParams) and (params.ignore_eos or token not in request.eos_token_ids):
            state.seq.stop_reason = token
        self._end(state, FinishReason.STOP)

    def end_request(self, owner: RequestState, reason: FinishReason) -> None:
        """Ends every unfinished sequence of a request and frees what it holds."""
        for state in list(owner.states):
            if state.status is not Status.FINISHED:
                self._end(state, reason)
        self._prune_running()

    def _end(self, state: SeqState, reason: FinishReason) -> None:
        state.seq.finish_reason = reason
        self._drop(state, reason.value, "finish")
        owner = state.owner
        if all(other.status is Status.FINISHED for other in owner.states):
            del self.requests[owner.request.request_id]

    def _drop(self, state: SeqState, why_end: str, why_free: str) -> None:
        """Takes a sequence out of every book but its request's."""
        self._kv.release(state, why_free)
        if state.status is Status.RUNNING:
            self._running.lose(state)
        elif state.status in (Status.WAITING, Status.SWAPPED):
            self._waiting.leave(state, Status.FINISHED)
        state.status = Status.FINISHED
        del self.states[state.seq.seq_id]
        if self._events is not None and why_end != FinishReason.ABORT:
            self._events.emit(
                "finish",
                request=state.owner.request.request_id,
                seq=state.seq.seq_id,
                why=why_end,
                tokens=len(state.seq.token_ids),
            )

    def _prune_running(self) -> None:
        self._running.prune()

    # --- forks -------------------------------------------------------------------------------------------------------

    def place_fork(self, parent: SeqState, child: SeqState) -> None:
        """Lets ``child``, which has the parent's known tokens, share its pages and run, or queue where it cannot.

        The child runs its last token again, so that one is not shared. A page the parent has filled beyond what the child
        shares is not shared either: nobody writes to a page that may become findable.
        """
        page_size = self._config.page_size
        shared = min(parent.seq.num_computed_tokens, len(child.seq.token_ids) - 1)
        if shared % page_size and parent.seq.num_computed_tokens >= (shared // page_size + 1) * page_size:
            shared -= shared % page_size
        room = self._running.seats_used < self._config.max_num_seqs
        if parent.status is not Status.RUNNING or not room or shared == 0 or self._lost_to_window(parent, shared):
            self._waiting.push(child, Status.WAITING)
            return
        self._kv.fork(parent, child, shared, "request_fork")
        self._running.gain(child)

    def _lost_to_window(self, parent: SeqState, shared: int) -> bool:
        """Whether the parent gave back pages that a query at position ``shared`` still sees."""
        window = self._config.sliding_window
        return window is not None and parent.num_behind * self._config.page_size > max(0, shared - window + 1)

    # --- beams -------------------------------------------------------------------------------------------------------

    def _advance_beams(self, owner: RequestState) -> None:
        search, beams, prompt = owner.beam, owner.states, len(owner.request.prompt_token_ids)
        assert search is not None
        count = search.num_candidates
        histories = [
            (beam.seq.token_ids[prompt:], [logprob for logprob, _ in beam.seq.logprobs], beam.seq.cumulative_logprob)
            for beam in beams
        ]
        candidates = [(ids[:count], logprobs[:count]) for ids, logprobs in (beam.candidates or ([], []) for beam in beams)]
        survivors = search.advance(histories, candidates)
        if search.done:
            self._end_beam_search(owner)
            return
        parents = {survivor.parent for survivor in survivors}
        for index, beam in enumerate(beams):
            if index not in parents:
                self._drop(beam, "beam", "beam")
        following: list[tuple[SeqState, Continuation]] = []
        for survivor in survivors:
            parent = beams[survivor.parent]
            if survivor.parent in parents:
                parents.remove(survivor.parent)
                following.append((parent, survivor))
            else:
                following.append((self._fork_beam(parent), survivor))
        owner.states = [state for state, _ in following]
        owner.request.sequences = [state.seq for state in owner.states]
        for index, (state, survivor) in enumerate(following):
            seq = state.seq
            seq.index = index
            seq.token_ids.append(survivor.token_id)
            seq.logprobs.append((survivor.logprob, ()))
            seq.cumulative_logprob = survivor.sum_logprobs
            if state.hold and state.status is Status.WAITING:
                self._waiting.requeue(state)
            state.candidates, state.hold = None, False
            if state.status is Status.RUNNING and min(len(seq.token_ids), seq.num_computed_tokens) >= state.index_at:
                self._kv.cache.make_findable(state)

    def _fork_beam(self, parent: SeqState) -> SeqState:
        """A second child of a beam: its tokens, and its pages where it has any. The parent gets its own token later."""
        owner, running = parent.owner, self._running
        child = self.new_state(owner, 0, parent.seq.token_ids[:])
        child.seq.logprobs = parent.seq.logprobs[:]
        child.seq.num_cached_tokens = parent.seq.num_cached_tokens
        child.admitted = True
        running.split_seats(parent)
        if parent.status is Status.RUNNING and running.seats_used < self._config.max_num_seqs:
            self._kv.fork(parent, child, parent.seq.num_computed_tokens, "beam")
            running.gain(child)
        elif parent.status is Status.SWAPPED:
            self._kv.fork_swapped(parent, child)
            self._waiting.push(child, Status.SWAPPED)
        else:
            self._waiting.push(child, Status.WAITING)
        return child

    def _end_beam_search(self, owner: RequestState) -> None:
        """Replaces the beams by the finished hypotheses, best first."""
        assert owner.beam is not None
        request = owner.request
        cached = owner.states[0].seq.num_cached_tokens
        for beam in owner.states:
            self._drop(beam, "beam", "beam")
        del self.requests[request.request_id]
        request.sequences = []
        for index, found in enumerate(owner.beam.finished):
            seq = self._new_sequence(request, index, [*request.prompt_token_ids, *found.token_ids])
            seq.num_cached_tokens = cached
            seq.logprobs = [(logprob, ()) for logprob in found.logprobs]
            seq.cumulative_logprob = found.sum_logprobs
            seq.finish_reason = found.finish_reason
            self.num_generated_tokens += len(found.token_ids)
            request.sequences.append(seq)


def _arrival(request: Request) -> int:
    return request.arrival
