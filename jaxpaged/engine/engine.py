"""The engine: the only mutable shell. It joins the scheduler (host) and the model runner (device)."""

import os
from collections import deque
from pathlib import Path
from typing import Any

import jax

from jaxpaged.config import EngineConfig, SchedulerConfig
from jaxpaged.engine import platform as platforms
from jaxpaged.engine.buckets import BucketConfig, Buckets
from jaxpaged.engine.compile_ledger import CompileLedger
from jaxpaged.engine.input_builder import InputBuilder
from jaxpaged.engine.load import load_model
from jaxpaged.engine.model_runner import ModelRunner, PendingStep
from jaxpaged.engine.output_builder import OutputBuilder
from jaxpaged.engine.request_builder import RequestBuilder
from jaxpaged.errors import ConfigError, InvalidRequestError, InvariantError
from jaxpaged.model.kv_pages import addressable_pages, pool_spec
from jaxpaged.outputs import EngineStats, RequestOutput
from jaxpaged.request import Request, Sequence
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.scheduler.events import EventLog
from jaxpaged.scheduler.scheduler import Scheduler
from jaxpaged.scheduler.scheduler_output import SchedulerOutput
from jaxpaged.weights.checkpoint import open_checkpoint
from jaxpaged.weights.tokenizer import Tokenizer

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Engine:
    """Serves requests step by step.

    Args:
        config: options.
        progress: show progress bars while loading and compiling (standard error).

    Attributes:
        config: as given.
        checkpoint: the opened model.
        model_config: its hyper-parameters.
        runner: the device side.
        tokenizer: the model's, or None.
        platform: the resolved dtypes, kernels and page size.
        max_model_len: most tokens of one sequence.
        ledger: every compilation.

    Raises:
        ConfigError: an option does not fit the model or the machine.
        CheckpointError: the model cannot be loaded.
        CapacityError: the machine's memory does not hold the pool.
    """

    def __init__(self, config: EngineConfig, *, progress: bool = False):
        self.config = config
        _set_compilation_cache(config)
        self.ledger = CompileLedger()
        self.checkpoint = open_checkpoint(config.model, tokenizer=config.tokenizer, revision=config.revision)
        self.model_config = self.checkpoint.config
        self.tokenizer: Tokenizer | None = self.checkpoint.tokenizer()
        self.platform = platforms.resolve(config, self.model_config)
        self.max_model_len = self._max_model_len()
        model = load_model(self.checkpoint, self.platform.dtype, scan_layers=self.platform.scan_layers, progress=progress)

        spec_of_one = self._spec(2)
        pages = platforms.pool_pages(config, self.model_config, self.platform, spec_of_one.bytes_per_page)
        if config.num_pages is None:
            pages = addressable_pages(self._spec(pages + 1), self.platform.backend.implementation) - 1
        self._spec_used = self._spec(pages + 1)
        host_pages = int(config.swap_space * 2**30 // self._spec_used.bytes_per_page)
        if config.swap_space and host_pages < 1:
            raise ConfigError(f"swap_space: got {config.swap_space} GiB, one page takes {self._spec_used.bytes_per_page} bytes")
        self._events = None
        scheduler_config = self._scheduler_config(pages + 1, host_pages)
        if config.event_log is not None:
            self._events = EventLog(config.event_log, config=scheduler_config)
        self._scheduler = Scheduler(scheduler_config, self._events)
        buckets = Buckets(
            BucketConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_pages=-(-self.max_model_len // self.platform.page_size),
                min_tokens=self.platform.min_tokens,
            )
        )
        self._builder = InputBuilder(
            buckets,
            self._spec_used,
            self.platform.target,
            sliding_window=self.model_config.sliding_window,
            dynamic_rope=self.model_config.rope.rope_type == "dynamic",
            query_tile=self.platform.query_tile,
        )
        self.runner = ModelRunner(
            model,
            self._spec_used,
            self.platform.backend,
            buckets,
            self._builder,
            self.ledger,
            num_host_pages=host_pages,
            valid_vocab=None if self.tokenizer is None else self.tokenizer.vocab_size,
            debug=config.debug,
        )
        self.runner.warm_up(progress=progress)
        self._door = RequestBuilder(self.model_config, self.tokenizer, max_model_len=self.max_model_len, seed=config.seed)
        self._outputs = OutputBuilder(self.tokenizer)
        self._prompts: dict[str, str | None] = {}
        self._final_only: set[str] = set()
        self._pending: deque[PendingStep] = deque()
        self._broken = ""  # why no further step can be trusted
        self._arrival = 0
        asked = config.async_scheduling
        self._async = self.platform.name != "cpu" if asked is None else asked

    def _max_model_len(self) -> int:
        own = self.model_config.max_position_embeddings
        rope = self.model_config.rope
        if rope.rope_type in ("dynamic", "linear") and rope.factor > 1:
            own = int(own * rope.factor)
        asked = self.config.max_model_len
        if asked is not None and asked > own:
            raise ConfigError(f"max_model_len: got {asked}, the model was made for {own} tokens")
        return asked or own

    def _spec(self, num_pages: int):
        return pool_spec(
            self.model_config, num_pages=num_pages, page_size=self.platform.page_size, dtype=self.platform.kv_dtype
        )

    def _scheduler_config(self, num_pages: int, host_pages: int) -> SchedulerConfig:
        config = self.config
        return SchedulerConfig(
            page_size=self.platform.page_size,
            num_pages=num_pages,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_host_pages=host_pages,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,  # type: ignore[arg-type]
            preemption_mode=config.preemption_mode,  # type: ignore[arg-type]
            offload_cached_pages=config.offload_cached_pages,
            sliding_window=self.model_config.sliding_window,
            kv_dtype=f"{self.checkpoint.config.architecture}/{self.platform.kv_dtype}",
        )

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        final_only: bool = False,
    ) -> None:
        """Queues a request.

        Args:
            request_id: unique among live requests.
            prompt: text, token ids, or a mapping with one of "prompt", "prompt_token_ids", "messages".
            params: what to generate.
            priority: lower runs first under ``scheduling_policy="priority"``.
            cache_salt: prefix pages are shared only between equal salts.
            final_only: ``step`` reports the request only when it has finished.

        Raises:
            InvalidRequestError: naming the field; nothing was queued.
            CapacityError: it could never fit into the pool; both numbers are in the message.
        """
        self._check_usable()
        request, text = self._door.build(
            request_id, prompt, params, arrival=self._arrival, priority=priority, cache_salt=cache_salt
        )
        self._scheduler.add(request)
        self._register(request, text, final_only)

    def _register(self, request: Request, text: str | None, final_only: bool) -> None:
        self._arrival += 1
        self._prompts[request.request_id] = text
        if final_only:
            self._final_only.add(request.request_id)

    def fork(self, request_id: str, new_request_id: str, *, index: int = 0, params: SamplingParams | None = None) -> None:
        """Continues a live sequence a second way; the fork shares its pages until it writes (see ``Scheduler.fork``)."""
        self._check_usable()
        self._door.check_id(new_request_id)
        if params is not None:
            if not isinstance(params, SamplingParams):
                raise InvalidRequestError(f"params: got {type(params).__name__}, wants SamplingParams or None")
            self._door.check_params(params)
        seed = params.seed if params is not None else None
        request = self._scheduler.fork(request_id, new_request_id, index=index, params=params, seed=seed, arrival=self._arrival)
        self._register(request, self._prompts.get(request_id), request_id in self._final_only)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once and frees its pages.

        Returns:
            Its last state, or None where no live request has the id.
        """
        request = self._scheduler.abort(request_id)
        self._flush_events()
        return None if request is None else self._finish(request)

    def pin_prefix(self, prompt: Any, *, cache_salt: str = "") -> int:
        """Registers a prompt beginning whose full pages, once computed, are never evicted; returns their number."""
        request, _ = self._door.build("pin", prompt, SamplingParams(), arrival=0, priority=0, cache_salt=cache_salt)
        return self._scheduler.pin_prefix(request.prompt_token_ids, cache_salt)

    def unpin_prefix(self, prompt: Any, *, cache_salt: str = "") -> None:
        """Undoes ``pin_prefix``."""
        request, _ = self._door.build("pin", prompt, SamplingParams(), arrival=0, priority=0, cache_salt=cache_salt)
        self._scheduler.unpin_prefix(request.prompt_token_ids, cache_salt)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self._scheduler.has_unfinished() or bool(self._pending)

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Advances every running sequence by one step of the device.

        With ``async_scheduling`` on, the next step is planned and dispatched before the results of the current one are awaited.

        Returns:
            Requests that got a token or ended, in arrival order.
        """
        self._check_usable()
        if not self._pending:
            self._dispatch()
        if self._async:
            self._dispatch()
        if not self._pending:
            return []
        pending = self._pending[0]
        result = self.runner.resolve(pending)  # interrupted here, the step can be awaited again
        self._pending.popleft()
        progressed = self._scheduler.update_from_output(pending.output, result)
        if self.config.debug:
            self._scheduler.check_integrity()
        self._flush_events()
        return self._report(progressed)

    def _flush_events(self) -> None:
        if self._events is not None and not self.has_unfinished_requests():
            self._events.flush()  # the ends of the last requests, which no further step would write

    def _dispatch(self) -> None:
        output: SchedulerOutput = self._scheduler.schedule()
        try:
            if output.scheduled:
                self._pending.append(self.runner.dispatch(output, self._find))
            else:  # nobody may run, but pages of a preempted group may have to leave
                self.runner.move_pages(output)
        except BaseException as error:  # the books now say that pages hold what was never written
            self._broken = f"step {output.step} was planned but not run ({type(error).__name__}: {error})"
            raise

    def _check_usable(self) -> None:
        if self._broken:
            raise InvariantError(f"the engine cannot go on: {self._broken}; make a new one")

    def _find(self, seq_id: int) -> Sequence:
        seq = self._scheduler.sequence(seq_id)
        assert seq is not None
        return seq

    def _report(self, progressed: list[Request]) -> list[RequestOutput]:
        reports = []
        for request in progressed:
            ended = [seq.seq_id for seq in request.sequences if seq.finish_reason is not None]
            if len(ended) == len(request.sequences):
                reports.append(self._finish(request))
                continue
            if ended:
                self.runner.release(ended)
            self._forget_dropped_beams(request)
            if request.request_id not in self._final_only:
                reports.append(self._outputs.build(request, self._prompts[request.request_id]))
        return reports

    def _finish(self, request: Request) -> RequestOutput:
        self.runner.release(seq.seq_id for seq in request.sequences)
        self._forget_dropped_beams(request)
        self._final_only.discard(request.request_id)
        return self._outputs.build(request, self._prompts.pop(request.request_id, None))

    def _forget_dropped_beams(self, request: Request) -> None:
        if isinstance(request.params, BeamSearchParams):  # dropped beams are not among its sequences any more
            self.runner.release([i for i in self._builder.seq_ids if self._scheduler.sequence(i) is None])
            self._outputs.forget([i for i in self._outputs.seq_ids if self._scheduler.sequence(i) is None])

    # --- looking in --------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of queues and pool, and totals since start."""
        return self._scheduler.stats()

    def fingerprint(self) -> str:
        """Identity of the weights, for a job's manifest."""
        return self.checkpoint.fingerprint()

    def check_integrity(self) -> None:
        """Compares all of the scheduler's books.

        Raises:
            InvariantError: they disagree.
        """
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Ends the event log. The engine must not be used afterwards."""
        if self._events is not None:
            self._events.close()
            self._events = None


def _set_compilation_cache(config: EngineConfig) -> None:
    directory = config.compilation_cache_dir
    if directory == "":
        jax.config.update("jax_compilation_cache_dir", None)
        return
    if directory is None:
        if jax.config.values.get("jax_compilation_cache_dir") or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            return
        directory = str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxpaged" / "xla")
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"compilation_cache_dir: cannot make {directory}: {error.strerror}") from None
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
