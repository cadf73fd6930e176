"""The scheduler: requests in, one plan per step out, results back in. Pure host code without clock or randomness.

``schedule`` may be called for the next step before ``update_from_output`` of the current one: it advances all counters at
once, and tokens still being sampled count as ``num_inflight_tokens``.
"""

import dataclasses
import hashlib
from collections.abc import Iterable

from jaxpaged.config import SchedulerConfig
from jaxpaged.errors import CapacityError, InvalidRequestError, InvariantError
from jaxpaged.outputs import EngineStats
from jaxpaged.request import FinishReason, Request, Sequence
from jaxpaged.sampling_params import MAX_SEED, BeamSearchParams, SamplingParams
from jaxpaged.scheduler import audit
from jaxpaged.scheduler.beam import BeamSearch
from jaxpaged.scheduler.events import EventLog
from jaxpaged.scheduler.kv_manager import KVManager
from jaxpaged.scheduler.pins import PinnedPrefixes
from jaxpaged.scheduler.planner import StepPlanner
from jaxpaged.scheduler.prefix_index import extra_keys
from jaxpaged.scheduler.results import ResultApplier
from jaxpaged.scheduler.running_set import RunningSet
from jaxpaged.scheduler.scheduler_output import SchedulerOutput, StepResult
from jaxpaged.scheduler.sequence_state import RequestState, Status
from jaxpaged.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    """Continuous batching over a page pool.

    Args:
        config: sizes, budgets and modes.
        events: page-event log; None writes none.
    """

    def __init__(self, config: SchedulerConfig, events: EventLog | None = None) -> None:
        self._config = config
        self._events = events
        self._kv = KVManager(config, events)
        self._waiting = WaitingQueue()
        self._running = RunningSet(config, self._kv, self._waiting, events)
        self._planner = StepPlanner(config, self._kv, self._waiting, self._running, events)
        self._results = ResultApplier(config, self._kv, self._waiting, self._running, events)
        self._pins = PinnedPrefixes(config, self._kv)
        self._requests: dict[str, RequestState] = self._results.requests
        self._num_added = 0
        self._num_prompt_tokens = 0
        self._last_arrival = -1

    # --- requests ----------------------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Says whether the request can ever be served.

        A request never runs in waves: all its samples or beams must fit in one step and, at full length, in the pool. (With a
        sliding window a sequence never holds more pages than the window spans.)

        Raises:
            InvalidRequestError: the prompt is empty or leaves no room for a token under ``max_model_len``, or there are more
                samples or beams than ``max_num_seqs``.
            CapacityError: it may need more pages than the pool can give; both numbers are in the message.
        """
        config = self._config
        prompt = len(request.prompt_token_ids)
        if prompt == 0:
            raise InvalidRequestError("prompt: got no tokens, wants at least one")
        if prompt >= config.max_model_len:
            raise InvalidRequestError(
                f"prompt: got {prompt} tokens, wants at most {config.max_model_len - 1}: prompt and output together may have "
                f"max_model_len = {config.max_model_len}"
            )
        if request.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens: got {request.max_tokens}, wants at least 1")
        width = _num_sequences(request)
        if width > config.max_num_seqs:
            field = "beam_width" if isinstance(request.params, BeamSearchParams) else "n or best_of"
            raise InvalidRequestError(
                f"{field}: got {width}, wants at most max_num_seqs = {config.max_num_seqs}: "
                "all sequences of a request run in one step"
            )
        self._check_capacity(request, width)

    def _check_capacity(self, request: Request, width: int) -> None:
        need, limit = self._worst_pages(request, width), self._limit(request)
        usable = self._config.num_pages - 1
        pinned = self._pins.num_pages
        if need + pinned <= usable:
            return
        if need + pinned - self._pins.shared_with(request.prompt_token_ids, request.cache_salt) > usable:
            sharing = " sharing the prompt's full pages" if width > 1 else ""
            held = f", {pinned} of them pinned" if pinned else ""
            raise CapacityError(
                f"request {request.request_id!r} may need {need} pages of {self._config.page_size} tokens "
                f"({width} x {limit - 1} tokens{sharing}) but the pool has {usable}{held}; "
                "lower max_tokens or n, or give the pool more pages"
            )

    def _worst_pages(self, request: Request, width: int) -> int:
        """Most pages the request ever holds. All its sequences name the same pages for the full pages of the prompt."""
        each = self._kv.peak_pages(self._limit(request) - 1)
        shared = 0
        if width > 1 and self._config.sliding_window is None:
            shared = len(request.prompt_token_ids) // self._config.page_size
        return shared + width * (each - shared)

    def _limit(self, request: Request) -> int:
        return min(len(request.prompt_token_ids) + request.max_tokens, self._config.max_model_len)

    def add(self, request: Request) -> None:
        """Validates a request, creates its sequences and queues it.

        Raises:
            InvalidRequestError: as ``validate``, or a live request has the same id.
            CapacityError: as ``validate``.
        """
        self._check_id(request.request_id)
        self.validate(request)
        owner = self._register(request, request.prompt_token_ids, width=_num_sequences(request))
        self._num_prompt_tokens += len(request.prompt_token_ids)
        self._waiting.push(owner.states[0], Status.WAITING)

    def _check_id(self, request_id: str) -> None:
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id: got {request_id!r}, which a live request has; wants a new one")

    def _register(self, request: Request, token_ids: Iterable[int], width: int) -> RequestState:
        params = request.params
        stop_ids = frozenset() if params.ignore_eos else request.eos_token_ids
        beam = None
        if isinstance(params, BeamSearchParams):
            beam = BeamSearch(params, stop_ids, self._limit(request) - len(request.prompt_token_ids))
        else:
            stop_ids |= frozenset(params.stop_token_ids)
        owner = RequestState(
            request=request,
            states=[],
            number=self._num_added,
            limit=self._limit(request),
            stop_ids=stop_ids,
            extras=extra_keys(cache_salt=request.cache_salt, kv_dtype=self._config.kv_dtype),
            worst_pages=self._worst_pages(request, width),
            beam=beam,
        )
        self._num_added += 1
        self._last_arrival = max(self._last_arrival, request.arrival)
        tokens = list(token_ids)
        states = [
            self._results.new_state(owner, index, tokens if index == 0 else tokens[:]) for index in range(1 if beam else width)
        ]
        first = states[0]
        first.seats = width
        first.pending = states[1:]
        first.plain = first.plain and not first.pending
        for state in first.pending:
            state.status = Status.PENDING
        owner.states = states
        request.sequences = [state.seq for state in states]
        self._requests[request.request_id] = owner
        return owner

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at once and frees all it holds; a step of it in flight is ignored when its results arrive.

        Returns:
            The request, its unfinished sequences marked ABORT; None where no live request has the id.
        """
        owner = self._requests.get(request_id)
        if owner is None:
            return None
        self._results.end_request(owner, FinishReason.ABORT)
        if self._events is not None:
            self._events.emit("abort", request=request_id)
        return owner.request

    def fork(
        self,
        request_id: str,
        new_request_id: str,
        *,
        index: int = 0,
        params: SamplingParams | None = None,
        seed: int | None = None,
        arrival: int | None = None,
    ) -> Request:
        """Continues one sequence of a live request a second way.

        The new request has the tokens known so far and shares the pages that hold them, the partly filled one too where the
        original has not filled it yet; the last token is run again so that the fork draws its own next token.

        Args:
            request_id: the live request.
            new_request_id: id of the fork.
            index: which sequence of it.
            params: of the fork (``n`` 1); None takes the original's with ``n`` 1.
            seed: noise seed of the fork; None derives one from the original's seed and the new id.
            arrival: arrival number; None takes the next one.

        Returns:
            The new request; ``sequences[0]`` starts with the tokens so far, ``num_prompt_tokens`` being the original's.

        Raises:
            InvalidRequestError: no such live request or sequence, a duplicate id, a beam search, ``n`` > 1, more tokens wanted
                than it may have (``min_tokens``), or log-probabilities that the original was not asked for.
            CapacityError: the fork does not fit in the pool.
        """
        self._check_id(new_request_id)
        owner = self._requests.get(request_id)
        if owner is None:
            raise InvalidRequestError(f"request_id: got {request_id!r}, wants the id of a live request")
        if owner.beam is not None:
            raise InvalidRequestError(f"request_id: {request_id!r} is a beam search, which cannot be forked")
        if not 0 <= index < len(owner.states) or owner.states[index].status is Status.FINISHED:
            raise InvalidRequestError(f"index: got {index}, wants an unfinished sequence of {request_id!r}")
        original = owner.request
        assert isinstance(original.params, SamplingParams)  # a beam search was refused above
        if params is None:
            params = dataclasses.replace(original.params, n=1, best_of=None)
        if params.num_samples != 1:
            raise InvalidRequestError(f"n: got {params.num_samples}, wants 1 for a fork")
        parent = owner.states[index]
        known = (
            original.params.logprobs if original.params.logprobs is not None else 0 if original.params.needs_logprobs else -1
        )
        if params.logprobs is not None and params.logprobs > known and parent.seq.generated_token_ids:
            raise InvalidRequestError(
                f"logprobs: got {params.logprobs}, wants {'None' if known < 0 else f'at most {known}'}: more was not recorded "
                f"of the tokens {request_id!r} has generated; ask for them in the request that is forked"
            )
        if seed is None:
            seed = (
                int.from_bytes(hashlib.sha256(f"{original.seed}\0{new_request_id}".encode()).digest()[:8], "little") & MAX_SEED
            )
        room = self._config.max_model_len - len(original.prompt_token_ids)
        limit = original.max_tokens if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > limit:
            raise InvalidRequestError(
                f"min_tokens: got {params.min_tokens}, wants at most the {limit} tokens the fork may have"
            )
        request = Request(
            request_id=new_request_id,
            prompt_token_ids=original.prompt_token_ids,
            params=params,
            eos_token_ids=original.eos_token_ids,
            max_tokens=limit,
            seed=seed,
            arrival=self._last_arrival + 1 if arrival is None else arrival,
            priority=original.priority,
            cache_salt=original.cache_salt,
        )
        if len(parent.seq.token_ids) >= self._limit(request):
            raise InvalidRequestError(f"max_tokens: got {request.max_tokens}, wants more than the tokens so far")
        self.validate(request)
        child = self._register(request, parent.seq.token_ids, width=1).states[0]
        child.seq.num_prompt_tokens = parent.seq.num_prompt_tokens
        child.seq.logprobs = parent.seq.logprobs[:]
        child.seq.cumulative_logprob = parent.seq.cumulative_logprob
        child.admitted = True
        self._results.place_fork(parent, child)
        return request

    # --- steps -------------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plans the next step; empty where all work is in flight. Deterministic: equal calls give equal plans."""
        return self._planner.plan()

    def update_from_output(self, output: SchedulerOutput, result: StepResult) -> list[Request]:
        """Takes in what a step sampled: appends tokens, ends sequences, moves beams, frees pages.

        Args:
            output: the step's plan.
            result: what the device sampled for it.

        Returns:
            The requests that got a token or ended, in arrival order.
        """
        return self._results.apply(output, result)

    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return bool(self._requests)

    # --- prefixes ----------------------------------------------------------------------------------------------------

    def pin_prefix(self, token_ids: Iterable[int], cache_salt: str = "") -> int:
        """Registers a prompt beginning: its full pages, once computed, are never evicted.

        Pinning computes nothing; the first request that starts with the tokens does.

        Args:
            token_ids: the beginning; tokens after its last full page are not kept.
            cache_salt: the salt of the requests that shall share it.

        Returns:
            Pages that will be held.

        Raises:
            InvalidRequestError: prefix caching is off, the beginning has no full page, or it is pinned already.
            CapacityError: with it pinned, a live request might not fit any more, or no page would be left; both numbers are
                in the message.
        """
        return self._pins.pin(tuple(token_ids), cache_salt, self._requests.values())

    def unpin_prefix(self, token_ids: Iterable[int], cache_salt: str = "") -> None:
        """Undoes ``pin_prefix``: the pages become ordinary cached pages.

        Raises:
            InvalidRequestError: the beginning is not pinned.
        """
        self._pins.unpin(tuple(token_ids), cache_salt)

    # --- looking in --------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of queues and pool, and totals since start."""
        planner, running, kv = self._planner, self._running, self._kv
        usage = audit.measure(kv, running.states)
        return EngineStats(
            num_running_seqs=len(running.states),
            num_waiting_seqs=self._waiting.num_waiting,
            num_swapped_seqs=self._waiting.num_swapped,
            num_pages=kv.pool.usable,
            num_used_pages=usage.used,
            num_cached_pages=usage.cached,
            num_logical_pages=usage.logical,
            num_wasted_slots=usage.wasted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=planner.num_cached_tokens,
            num_generated_tokens=self._results.num_generated_tokens,
            num_preemptions=running.num_preemptions,
            num_page_copies=kv.num_copies,
            num_swapped_out_pages=kv.num_swapped_out,
            num_swapped_in_pages=kv.num_swapped_in,
            num_steps=planner.num_steps,
        )

    def sequence(self, seq_id: int) -> Sequence | None:
        """The live sequence of an id, or None."""
        state = self._results.states.get(seq_id)
        return None if state is None else state.seq

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """Page ids of a live sequence in logical order (0: given back behind the window); empty where it holds none."""
        state = self._results.states.get(seq_id)
        return () if state is None else tuple(state.table)

    def check_integrity(self) -> None:
        """Compares all books with each other: pool, tables, prefix index, host pages, queues.

        Raises:
            InvariantError: they disagree.
        """
        states = list(self._results.states.values())
        audit.check(self._kv, states)
        running = [state for state in states if state.status is Status.RUNNING]
        if sorted(state.rank for state in running) != [state.rank for state in self._running.states]:
            raise InvariantError("the running list is not the running sequences in rank order")
        if sum(state.seats for state in running) != self._running.seats_used:
            raise InvariantError(f"seats used: counted {self._running.seats_used}, are {sum(s.seats for s in running)}")
        if self._running.seats_used > self._config.max_num_seqs:
            raise InvariantError(f"{self._running.seats_used} seats used of {self._config.max_num_seqs}")
        queued = [state for state in states if state.status in (Status.WAITING, Status.SWAPPED)]
        ready = {state.seq.seq_id for state in queued if not (state.hold and state.status is Status.WAITING)}
        if self._waiting.queued() != ready or len(queued) != len(self._waiting):
            raise InvariantError("the queue is not the queued sequences")
        if {id(state.owner) for state in states} != {id(owner) for owner in self._requests.values()}:
            raise InvariantError("live sequences and live requests differ")
        for state in states:
            if state.status is Status.FINISHED or state.seq.finished:
                raise InvariantError(f"sequence {state.seq.seq_id} has ended but is still listed")


def _num_sequences(request: Request) -> int:
    params = request.params
    return params.beam_width if isinstance(params, BeamSearchParams) else params.num_samples
