"""A device made of dictionaries, for scheduler tests: it executes plans on page contents and samples by a fixed rule.

A slot holds a chain value that stands for "the KV of this position after this very prefix", so a wrong page, a missing copy
or a stale restore shows at once. The next token depends on the chain value read from the pages, never on host lists.
"""

import dataclasses
import math

from jaxpaged.config import SchedulerConfig
from jaxpaged.request import Request
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.scheduler.scheduler import Scheduler
from jaxpaged.scheduler.scheduler_output import SchedulerOutput, StepResult

VOCAB = 12
EOS = 0
MASK = (1 << 61) - 1


def chain(previous: int, token: int) -> int:
    """The value of a position: a mix of the value before and the token."""
    x = (previous * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & MASK
    return x ^ (x >> 29)


def chains(token_ids) -> list[int]:
    """Values of all positions of a sequence."""
    values, value = [], 1
    for token in token_ids:
        value = chain(value, token)
        values.append(value)
    return values


def logits(value: int) -> list[float]:
    """A row of ``VOCAB`` fixed pseudo-random log-probabilities for what follows ``value``."""
    raw = [(chain(value, 1000 + token) % 100_003) / 20_000 for token in range(VOCAB)]
    total = math.log(sum(math.exp(x) for x in raw))
    return [x - total for x in raw]


def draw(value: int, seed: int, index: int) -> int:
    """The token sample ``index`` of a request with ``seed`` gets after ``value``."""
    return chain(chain(value, 7 + seed), 11 + index) % VOCAB


def lone_run(prompt, *, limit: int, seed: int, index: int = 0, stop_ids=frozenset({EOS})) -> list[int]:
    """What a sample generates alone with unlimited memory: the truth every schedule must reproduce."""
    tokens = list(prompt)
    value = chains(tokens)[-1]
    while True:
        token = draw(value, seed, index)
        tokens.append(token)
        value = chain(value, token)
        if token in stop_ids or len(tokens) >= limit:
            return tokens[len(prompt) :]


def config(**changes) -> SchedulerConfig:
    """A small scheduler: pages of 4 tokens, 10 usable pages, budget 16."""
    fields = {
        "page_size": 4, "num_pages": 11, "max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 64,
    }  # fmt: skip
    return SchedulerConfig(**(fields | changes))


_arrivals = iter(range(10**9))


def request(request_id: str, prompt, params=None, *, eos=frozenset(), **fields) -> Request:
    """A request over ``prompt`` (a length, or token ids); greedy, 8 tokens, never ending early unless said otherwise."""
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    params = params or SamplingParams(max_tokens=8)
    fields.setdefault("arrival", next(_arrivals))
    fields.setdefault("seed", 0)
    fields.setdefault("max_tokens", params.max_tokens or 10**6)
    return Request(request_id=request_id, prompt_token_ids=tokens, params=params, eos_token_ids=frozenset(eos), **fields)


@dataclasses.dataclass
class _Row:
    values: list[int]
    pages: list[int]


class FakeDevice:
    """Executes plans in the documented order and checks what every query would see."""

    def __init__(self, cfg: SchedulerConfig) -> None:
        self.cfg = cfg
        self.pages: list[list[int | None]] = [[None] * cfg.page_size for _ in range(cfg.num_pages)]
        self.host: list[list[int | None]] = [[None] * cfg.page_size for _ in range(cfg.num_host_pages)]
        self.rows: dict[int, _Row] = {}
        self.last: dict[int, int] = {}
        self.broken: set[str] = set()
        self.sampled: set[int] = set()
        self.num_written = 0

    def execute(self, output: SchedulerOutput, sequences: dict[int, object], forced=None) -> StepResult:
        """Runs one step; ``sequences`` maps ids to public sequences as they are at dispatch."""
        cfg, size = self.cfg, self.cfg.page_size
        for page in output.freed_pages:
            self.pages[page] = [None] * size
        assert len({host for _, host in output.saves}) == len(output.saves)
        assert len({device for _, device in output.restores}) == len(output.restores)
        for device, host in output.saves:
            self.host[host] = self.pages[device][:]
        for host, device in output.restores:
            self.pages[device] = self.host[host][:]
        sources, targets = {s for s, _ in output.copies}, [t for _, t in output.copies]
        assert not sources & set(targets)
        assert len(set(targets)) == len(targets)
        for source, target in output.copies:
            self.pages[target] = self.pages[source][:]
        assert sum(row.num_tokens for row in output.scheduled) <= cfg.max_num_batched_tokens
        assert len(output.scheduled) <= cfg.max_num_seqs
        assert len(output.samples) <= cfg.max_num_seqs
        assert len({row.seq_id for row in output.scheduled}) == len(output.scheduled)
        written: set[tuple[int, int]] = set()
        for row in output.scheduled:
            self._write(row, sequences[row.seq_id], written)
        for row in output.scheduled:
            self._read(row)
        if output.scheduled:
            self.sampled = {seq_id for seq_id, _ in output.samples}
        return self._sample(output, sequences, forced or {})

    def _write(self, row, seq, written) -> None:
        assert row.num_tokens >= 1
        start, end, size = row.num_computed_tokens, row.num_computed_tokens + row.num_tokens, self.cfg.page_size
        if row.from_device:
            assert row.num_tokens == 1 and len(seq.token_ids) == start
            assert row.seq_id in self.sampled, "the token was not sampled by the step before"
            tokens = [*seq.token_ids, self.last[row.seq_id]]
        else:
            assert end <= len(seq.token_ids), "a query token the host does not know"
            tokens = seq.token_ids[:end]
        old = self.rows.get(row.seq_id)
        if row.table_start == 0 and row.page_ids:
            pages = list(row.page_ids)
        else:
            assert old is not None, "a new sequence without a whole table"
            pages = [*old.pages[: row.table_start], *row.page_ids]
            assert row.page_ids or row.table_start == len(old.pages)
        assert len(pages) == -(-end // size), "pages are held exactly on need"
        assert all(0 <= page < self.cfg.num_pages for page in pages)
        values = chains(tokens)
        self.rows[row.seq_id] = _Row(values, pages)
        for position in range(start, end):
            slot = (pages[position // size], position % size)
            assert slot[0] != 0, "a write to the scratch page"
            assert slot not in written, "two writes to one slot in a step"
            written.add(slot)
            self.pages[slot[0]][slot[1]] = values[position]
        self.num_written += end - start

    def _read(self, row) -> None:
        size, window = self.cfg.page_size, self.cfg.sliding_window
        mine = self.rows[row.seq_id]
        first = 0 if window is None else max(0, row.num_computed_tokens - window + 1)
        for position in range(first, row.num_computed_tokens + row.num_tokens):
            seen = self.pages[mine.pages[position // size]][position % size]
            assert seen == mine.values[position], f"sequence {row.seq_id} sees a foreign slot at position {position}"

    def _sample(self, output, sequences, forced) -> StepResult:
        result = StepResult([], [], [], [], [])
        size = self.cfg.page_size
        for seq_id, index in output.samples:
            row = output.scheduled[index]
            mine = self.rows[row.seq_id]
            last = row.num_computed_tokens + row.num_tokens - 1
            value = self.pages[mine.pages[last // size]][last % size]
            assert value is not None
            seq = sequences[seq_id]
            token = forced.get(seq_id, draw(value, seq.request.seed, seq.index))
            scores = logits(value)
            order = sorted(range(VOCAB), key=lambda t: -scores[t])
            self.last[seq_id] = token
            result.token_ids.append(token)
            result.logprobs.append(scores[token])
            result.top_ids.append(order)
            result.top_logprobs.append([scores[t] for t in order])
            result.finite.append(seq.request.request_id not in self.broken)
        return result


class Harness:
    """A scheduler with its device, run synchronously or with one step in flight."""

    def __init__(self, cfg: SchedulerConfig | None = None, *, pipelined: bool = False, events=None, **changes) -> None:
        self.cfg = cfg or config(**changes)
        self.scheduler = Scheduler(self.cfg, events)
        self.device = FakeDevice(self.cfg)
        self.pipelined = pipelined
        self.in_flight: list[tuple[SchedulerOutput, StepResult]] = []
        self.requests: dict[str, Request] = {}
        self.outputs: list[SchedulerOutput] = []

    def add(self, req: Request) -> Request:
        self.scheduler.add(req)
        self.requests[req.request_id] = req
        return req

    def dispatch(self, forced=None) -> SchedulerOutput:
        """Schedules and starts one step."""
        output = self.scheduler.schedule()
        sequences = {seq.seq_id: seq for req in self.requests.values() for seq in req.sequences}
        self.in_flight.append((output, self.device.execute(output, sequences, forced)))
        self.outputs.append(output)
        return output

    def collect(self) -> list[Request]:
        """Takes in the oldest step in flight."""
        return self.scheduler.update_from_output(*self.in_flight.pop(0))

    def step(self, check: bool = True, forced=None) -> SchedulerOutput:
        output = self.dispatch(forced)
        while len(self.in_flight) > (1 if self.pipelined else 0):
            self.collect()
        if check:
            self.scheduler.check_integrity()
        return output

    def run(self, max_steps: int = 2000, check: bool = True) -> int:
        """Runs until nothing is left. Returns the steps taken."""
        steps = 0
        while self.scheduler.has_unfinished():
            self.step(check)
            steps += 1
            assert steps < max_steps, "no progress"
        while self.in_flight:
            self.collect()
        self.rest_check()
        return steps

    def rest_check(self) -> None:
        """At rest nothing is held: every page is free or cached."""
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.num_used_pages == 0 and stats.num_logical_pages == 0
        assert stats.num_running_seqs == stats.num_waiting_seqs == stats.num_swapped_seqs == 0

    def table(self, req: Request, index: int = 0) -> list[int]:
        return list(self.scheduler.block_table(req.sequences[index].seq_id))


def expect_lone(req: Request, max_model_len: int = 64) -> None:
    """Every sample of a finished request is what it would have been alone."""
    limit = min(len(req.prompt_token_ids) + req.max_tokens, max_model_len)
    stop = (frozenset() if req.params.ignore_eos else req.eos_token_ids) | frozenset(req.params.stop_token_ids)
    for seq in req.sequences:
        want = lone_run(req.prompt_token_ids, limit=limit, seed=req.seed, index=seq.index, stop_ids=stop)
        assert seq.generated_token_ids == want, f"{req.request_id}[{seq.index}]"


def beam_params(width: int, max_tokens: int = 6, **fields) -> BeamSearchParams:
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **fields)
