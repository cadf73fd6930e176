"""Turns a scheduler's plan into padded numpy arrays. Keeps each sequence's block table and sampling settings in rows that
are updated by what changed, so that a step costs a few vectorised gathers."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxpaged.engine.buckets import Buckets
from jaxpaged.model.inputs import SamplingInputs, StepInputs, StepShape
from jaxpaged.model.kv_pages import PoolSpec, plan
from jaxpaged.request import Sequence
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.scheduler.scheduler_output import SchedulerOutput

MAX_BANNED = 32


@dataclasses.dataclass
class _Rows:
    """What is kept of each sequence between steps, one row each.

    Attributes:
        tables: int32 block table.
        floats: temperature, top_p, min_p.
        ints: top_k, sample index, prompt length, min_tokens.
        seeds: high and low word of the seed.
        flags: samples; filters by top-k or top-p; wants the most likely tokens; wants log-probabilities.
        banned: stop and EOS ids that ``min_tokens`` bans, -1 behind them.
    """

    tables: np.ndarray
    floats: np.ndarray
    ints: np.ndarray
    seeds: np.ndarray
    flags: np.ndarray
    banned: np.ndarray

    @classmethod
    def empty(cls, rows: int, width: int) -> "_Rows":
        return cls(
            np.zeros((rows, width), np.int32),
            np.zeros((rows, 3), np.float32),
            np.zeros((rows, 4), np.int32),
            np.zeros((rows, 2), np.uint32),
            np.zeros((rows, 4), np.bool_),
            np.zeros((rows, MAX_BANNED), np.int32),
        )

    def grown(self) -> "_Rows":
        more = self.empty(*self.tables.shape)
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(more), strict=True)
        return _Rows(*(np.concatenate(pair) for pair in pairs))


class InputBuilder:
    """Builds ``StepInputs``.

    Args:
        buckets: the static shapes.
        spec: the pool's format.
        target: "cpu", "gpu" or "tpu": which kernels' work lists to make.
        sliding_window: of the model, or None.
        dynamic_rope: whether tokens are rotated for a sequence length (dynamic RoPE scaling).
        query_tile: query tokens of a kernel tile.
    """

    def __init__(
        self,
        buckets: Buckets,
        spec: PoolSpec,
        target: str,
        *,
        sliding_window: int | None = None,
        dynamic_rope: bool = False,
        query_tile: int = 64,
    ):
        self._buckets = buckets
        self._spec = spec
        self._target = target
        self._window = sliding_window
        self._dynamic_rope = dynamic_rope
        self._query_tile = query_tile
        self._row_of: dict[int, int] = {}
        self._width = next(iter(buckets)).plan.max_pages
        self._free = list(range(2 * buckets.mixed[0].plan.num_seqs))
        self._state = _Rows.empty(len(self._free), self._width)
        self._sample_row: dict[int, int] = {}  # seq_id -> sample row of the step dispatched last

    def _new_row(self, seq: Sequence) -> int:
        if not self._free:
            size = len(self._state.tables)
            self._state = self._state.grown()
            self._free = list(range(size, 2 * size))
        row = self._row_of[seq.seq_id] = self._free.pop()
        request = seq.request
        params = request.params
        self._state.seeds[row] = (request.seed >> 32, request.seed & 0xFFFFFFFF)
        if isinstance(params, BeamSearchParams):
            self._state.floats[row], self._state.ints[row], self._state.flags[row] = (
                (0, 1, 0),
                (0, seq.index, 0, 0),
                (False, False, True, True),
            )
            self._state.banned[row] = -1
            return row
        assert isinstance(params, SamplingParams)
        temperature = 0.0 if params.is_greedy else params.temperature
        self._state.floats[row] = (temperature, params.top_p, params.min_p)
        self._state.ints[row] = (params.top_k, seq.index, seq.num_prompt_tokens, params.min_tokens)
        warm = temperature > 0
        self._state.flags[row] = (
            warm,
            warm and (bool(params.top_k) or params.top_p < 1),
            bool(params.logprobs),
            params.needs_logprobs,
        )
        self._state.banned[row] = -1
        if params.min_tokens:
            stops = sorted({*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)})
            self._state.banned[row, : len(stops)] = stops
        return row

    def release(self, seq_id: int) -> None:
        """Forgets a sequence that has ended."""
        row = self._row_of.pop(seq_id, None)
        if row is not None:
            self._free.append(row)

    @property
    def seq_ids(self) -> list[int]:
        """Sequences that have a row."""
        return list(self._row_of)

    def build(self, output: SchedulerOutput, find: Callable[[int], Sequence]) -> tuple[StepInputs, StepShape]:
        """Builds one step's inputs.

        Args:
            output: the scheduler's plan.
            find: a live sequence by id.

        Returns:
            The inputs (numpy) and their bucket.
        """
        scheduled = output.scheduled
        rows, query, computed, device, tokens = [], [], [], [], []
        previous, row_of = self._sample_row, self._row_of
        for seq_id, start, count, from_device, table_start, page_ids in scheduled:
            seq = find(seq_id)
            row = row_of.get(seq_id)
            if row is None:
                row = self._new_row(seq)
            rows.append(row)
            query.append(count)
            computed.append(start)
            if page_ids:
                self._state.tables[row, table_start : table_start + len(page_ids)] = page_ids
            if from_device:
                device.append(previous[seq_id])
                tokens.append(0)
            elif count == 1:
                device.append(-1)
                tokens.append(seq.token_ids[start])
            else:
                device.extend([-1] * count)
                tokens.extend(seq.token_ids[start : start + count])
        shape = self._buckets.choose(len(tokens), len(rows), len(output.samples))
        row_index = np.array(rows, np.intp)
        query_lens = np.array(query, np.int32)
        starts = np.array(computed, np.int32)
        width = shape.plan.num_tokens
        token_ids, device_slot = np.zeros(width, np.int32), np.full(width, -1, np.int32)
        token_ids[: len(tokens)] = tokens
        device_slot[: len(tokens)] = device
        owner = np.repeat(np.arange(len(rows)), query_lens)
        ends = np.cumsum(query_lens)
        positions = np.zeros(width, np.int32)
        positions[: len(tokens)] = np.arange(len(tokens)) - (ends - query_lens)[owner] + starts[owner]
        attention = plan(
            query_lens,
            starts + query_lens,
            self._state.tables[row_index],
            spec=self._spec,
            target=self._target,  # type: ignore[arg-type]
            shape=shape.plan,
            query_tile=self._query_tile,
            sliding_window=self._window,
            validate=False,
        )
        rope_lengths = None
        if self._dynamic_rope:
            rope_lengths = np.ones(width, np.int32)
            prompt = np.array([find(s.seq_id).num_prompt_tokens for s in scheduled], np.int32)[owner]
            rope_lengths[: len(tokens)] = np.maximum(positions[: len(tokens)] + 1, prompt)
        sampling = self._sampling(output, find, shape, ends, starts + query_lens)
        return StepInputs(token_ids, device_slot, positions, rope_lengths, attention, sampling), shape

    def _sampling(self, output: SchedulerOutput, find, shape: StepShape, ends, totals) -> SamplingInputs:
        samples, size = output.samples, shape.num_samples
        self._sample_row = {seq_id: i for i, (seq_id, _) in enumerate(samples)}
        count = len(samples)
        row_of = self._row_of
        rows = np.array([row_of[i] if i in row_of else self._new_row(find(i)) for i, _ in samples], np.intp)
        source = np.array([row for _, row in samples], np.intp)
        floats, ints = np.zeros((size, 3), np.float32), np.zeros((size, 4), np.int32)
        seeds, banned = np.zeros((size, 2), np.uint32), np.full((size, MAX_BANNED), -1, np.int32)
        token_index, position = np.zeros(size, np.int32), np.zeros(size, np.int32)
        floats[:, 1] = 1.0
        flags = np.zeros(4, np.int32)
        if count:
            floats[:count], ints[:count], seeds[:count] = (
                self._state.floats[rows],
                self._state.ints[rows],
                self._state.seeds[rows],
            )
            token_index[:count] = ends[source] - 1
            position[:count] = totals[source]
            early = position[:count] - ints[:count, 2] < ints[:count, 3]
            banned[:count] = np.where(early[:, None], self._state.banned[rows], -1)
            flags[:] = self._state.flags[rows].any(axis=0)
        return SamplingInputs(
            token_index=token_index,
            seed=seeds,
            sample=np.ascontiguousarray(ints[:, 1]),
            position=position,
            temperature=np.ascontiguousarray(floats[:, 0]),
            top_p=np.ascontiguousarray(floats[:, 1]),
            min_p=np.ascontiguousarray(floats[:, 2]),
            top_k=np.ascontiguousarray(ints[:, 0]),
            banned=banned,
            flags=flags,
        )

    def empty(self, shape: StepShape) -> StepInputs:
        """Inputs of a step in which every row is padding, for warm-up."""
        tokens = np.zeros(shape.plan.num_tokens, np.int32)
        attention = plan(
            np.zeros(0, np.int32),
            np.zeros(0, np.int32),
            np.zeros((0, 1), np.int32),
            spec=self._spec,
            target=self._target,  # type: ignore[arg-type]
            shape=shape.plan,
            query_tile=self._query_tile,
            sliding_window=self._window,
        )
        previous = self._sample_row
        sampling = self._sampling(SchedulerOutput(0), None, shape, np.zeros(0, np.int32), np.zeros(0, np.int32))
        self._sample_row = previous
        rope = np.ones_like(tokens) if self._dynamic_rope else None
        return StepInputs(tokens, np.full_like(tokens, -1), tokens, rope, attention, sampling)
