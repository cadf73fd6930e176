"""The device side of the engine: parameters, page pool and compiled steps, and nothing else.

One jitted ``execute_step`` per bucket with the pool donated; page copies, saves and restores as their own small programs that
run before it. Nothing here decides anything.
"""

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxpaged.engine.buckets import Buckets
from jaxpaged.engine.compile_ledger import CompileLedger
from jaxpaged.engine.host_pool import HostPool
from jaxpaged.engine.input_builder import InputBuilder
from jaxpaged.errors import InvariantError
from jaxpaged.model.attention import AttentionBackend
from jaxpaged.model.inputs import StepOutputs, StepShape, pack
from jaxpaged.model.kv_pages import PoolSpec, alloc, copy_pages, poison_pages
from jaxpaged.model.llama import SplitModel
from jaxpaged.model.step import StepProgram, packed_step
from jaxpaged.request import Sequence
from jaxpaged.scheduler.scheduler_output import SchedulerOutput, StepResult

PAGE_CHUNK = 16  # pages one call copies or poisons
COMPILE_THREADS = 2  # programs compiled at the same time at start-up


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A dispatched step whose results are still on the device.

    Attributes:
        output: its plan.
        results: device arrays.
        wants_top: whether any row asked for the most likely tokens.
    """

    output: SchedulerOutput
    results: StepOutputs
    wants_top: bool


class ModelRunner:
    """Owns the parameters, the pool and the compiled programs.

    Args:
        model: the split model, its arrays on the device.
        spec: the pool's format.
        backend: attention kernels.
        buckets: shapes to compile for.
        builder: makes inputs.
        ledger: where compilations are filed.
        num_host_pages: size of the host pool for swapped and offloaded pages.
        valid_vocab: tokens the tokenizer knows, or None.
        debug: poison freed pages.

    Attributes:
        spec: the pool's format.
    """

    def __init__(
        self,
        model: SplitModel,
        spec: PoolSpec,
        backend: AttentionBackend,
        buckets: Buckets,
        builder: InputBuilder,
        ledger: CompileLedger,
        *,
        num_host_pages: int = 0,
        valid_vocab: int | None = None,
        debug: bool = False,
    ):
        self._model = model
        self.spec = spec
        self._backend = backend
        self._buckets = buckets
        self._builder = builder
        self._ledger = ledger
        self._debug = debug
        self._program = StepProgram(model, backend, valid_vocab)
        self._pool = alloc(spec)
        most = max(shape.num_samples for shape in buckets)
        self._last_tokens = jnp.zeros(most, jnp.int32)
        self._steps: dict[StepShape, Callable] = {}
        self._host = HostPool(spec, num_host_pages, backend) if num_host_pages else None
        self._copy = jax.jit(
            lambda pool, src, dst: copy_pages(pool, src, dst, **backend.page_options),
            donate_argnums=0,
        )
        self._poison = jax.jit(poison_pages, donate_argnums=0)

    def lower(self, shape: StepShape) -> jax.stages.Lowered:
        """The lowered step of a bucket (``.compile().memory_analysis()`` tells what it needs)."""
        inputs = self._builder.empty(shape)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
        step = jax.jit(packed_step(self._program, like), donate_argnums=(1, 2))
        return step.lower(self._model.leaves, self._pool, self._last_tokens, pack(inputs))

    def _compile(self, shape: StepShape, why: str) -> Callable:
        with self._ledger.watch("execute_step", str(shape), why):
            return self.lower(shape).compile()

    def warm_up(self, *, progress: bool = False) -> None:
        """Compiles every program, several at a time; afterwards nothing is compiled any more."""
        shapes = list(self._buckets)
        with (
            ThreadPoolExecutor(COMPILE_THREADS) as pool,
            tqdm(total=len(shapes), desc="compiling", disable=not progress) as bar,
        ):
            jobs = {pool.submit(self._compile, shape, "warm-up"): shape for shape in shapes}
            for job in as_completed(jobs):
                self._steps[jobs[job]] = job.result()
                bar.update(1)
        none = np.zeros(PAGE_CHUNK, np.int32)
        with self._ledger.watch("copy_pages", f"[{PAGE_CHUNK}]", "warm-up"):
            self._pool = self._copy(self._pool, none, none)
        if self._debug:
            with self._ledger.watch("poison_pages", f"[{PAGE_CHUNK}]", "warm-up"):
                self._pool = self._poison(self._pool, none)
        if self._host is not None:
            with self._ledger.watch("swap_pages", f"[{self._host.chunk}]", "warm-up"):
                self._pool = self._host.warm_up(self._pool)
        jax.block_until_ready(self._pool.data)

    def _run(self, shape: StepShape, flat: np.ndarray) -> StepOutputs:
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = self._compile(shape, "first use")
        outputs, self._pool, self._last_tokens = step(self._model.leaves, self._pool, self._last_tokens, flat)
        return outputs

    def dispatch(self, output: SchedulerOutput, find: Callable[[int], Sequence]) -> PendingStep:
        """Starts a step: page operations in the plan's order, then the model.

        Args:
            output: the scheduler's plan, with at least one scheduled sequence.
            find: a live sequence by id.

        Returns:
            The step in flight.

        Raises:
            InvariantError: a page id outside the pool.
        """
        inputs, shape = self._builder.build(output, find)
        return self.run(output, shape, pack(inputs), wants_top=bool(inputs.sampling.flags[2]))

    def run(self, output: SchedulerOutput, shape: StepShape, flat: np.ndarray, *, wants_top: bool) -> PendingStep:
        """Starts a step whose inputs are built and packed; see ``dispatch``."""
        self.move_pages(output)
        return PendingStep(output, self._run(shape, flat), wants_top)

    def resolve(self, pending: PendingStep) -> StepResult:
        """Waits for a step and brings what it sampled to the host."""
        count, got = len(pending.output.samples), pending.results
        token_ids, logprobs, finite = jax.device_get((got.token_ids, got.logprobs, got.finite))
        top_ids: list[list[int]] = []
        top_logprobs: list[list[float]] = []
        if pending.wants_top:
            ids, values = jax.device_get((got.top_ids, got.top_logprobs))
            top_ids, top_logprobs = ids[:count].tolist(), values[:count].tolist()
        else:
            top_ids, top_logprobs = [[]] * count, [[]] * count
        return StepResult(token_ids[:count].tolist(), logprobs[:count].tolist(), top_ids, top_logprobs, finite[:count].tolist())

    def _check_ids(self, output: SchedulerOutput) -> None:
        high = self.spec.num_pages
        moved = [p for pair in output.copies for p in pair] + [d for d, _ in output.saves] + [d for _, d in output.restores]
        for pages in (*(s.page_ids for s in output.scheduled), moved):
            if pages and not (min(pages) >= 0 and max(pages) < high):
                raise InvariantError(f"step {output.step}: page ids {min(pages)}..{max(pages)}, the pool has 0..{high - 1}")

    def move_pages(self, output: SchedulerOutput) -> None:
        """Executes the page operations of a plan, in order: save, restore, copy. A plan without rows has only these.

        Raises:
            InvariantError: a page id outside the pool.
        """
        self._check_ids(output)
        if output.saves or output.restores:
            if self._host is None:
                raise InvariantError(f"step {output.step} moves pages to or from the host, but there is no host pool")
            self._host.save(self._pool, output.saves)
            self._pool = self._host.restore(self._pool, output.restores)
        if self._debug and output.freed_pages:
            keep = {d for _, d in output.restores}
            for ids in chunked([p for p in output.freed_pages if p not in keep]):
                self._pool = self._poison(self._pool, ids)
        for start in range(0, len(output.copies), PAGE_CHUNK):
            src, dst = (np.zeros(PAGE_CHUNK, np.int32) for _ in range(2))
            pairs = output.copies[start : start + PAGE_CHUNK]
            src[: len(pairs)] = [a for a, _ in pairs]
            dst[: len(pairs)] = [b for _, b in pairs]
            self._pool = self._copy(self._pool, src, dst)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forgets sequences that have ended."""
        for seq_id in seq_ids:
            self._builder.release(seq_id)


def chunked(pages: list[int]) -> Iterable[np.ndarray]:
    """Cuts page ids into arrays of ``PAGE_CHUNK``, the last one padded with the scratch page 0."""
    for start in range(0, len(pages), PAGE_CHUNK):
        ids = np.zeros(PAGE_CHUNK, np.int32)
        part = pages[start : start + PAGE_CHUNK]
        ids[: len(part)] = part
        yield ids
