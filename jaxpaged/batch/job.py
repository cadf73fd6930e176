"""The job: lines in, records out, in input order, through one engine; killable at any moment and resumable.

The engine is fed lazily and finishes requests in any order; a finished one waits in memory until every line before it has its
record. A kill loses the requests that were running and those that waited for their turn: a resumed job computes them
again, with the same noise; nothing about a request depends on the others but the rounding of its products. At most
``ADMIT_FACTOR * max_num_seqs`` requests are in the engine and ``WINDOW_FACTOR * max_num_seqs`` lines are without their
record, whatever the file's length.
"""

import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

from jaxpaged.batch.config import JobConfig, canonical_json
from jaxpaged.batch.errors import JobError
from jaxpaged.batch.formats import JsonlFormat, LineFormat
from jaxpaged.batch.items import BadLine, Item
from jaxpaged.batch.manifest import (
    Manifest,
    read_manifest,
    refuse_changed,
    refuse_changed_weights,
    remove_manifest,
    show_versions,
    versions,
    write_manifest,
)
from jaxpaged.batch.openai_lines import OpenAIFormat
from jaxpaged.batch.order import InOrder
from jaxpaged.batch.plot import PoolTrace, draw_pool
from jaxpaged.batch.progress import Progress
from jaxpaged.batch.reader import detect_format, read_items, survey
from jaxpaged.batch.resume import scan_output
from jaxpaged.batch.signals import Interrupted, SignalWatch
from jaxpaged.batch.summary import JobSummary
from jaxpaged.batch.writer import RecordWriter
from jaxpaged.errors import CapacityError, InvalidRequestError
from jaxpaged.outputs import EngineStats, RequestOutput

ADMIT_FACTOR = 4
WINDOW_FACTOR = 64


class JobEngine(Protocol):
    """What a job needs of an engine."""

    def add_request(
        self, request_id: str, prompt: Any, params: Any, *, priority: int = 0, cache_salt: str = "", final_only: bool = False
    ) -> None:
        """Queues a request; with ``final_only`` it is reported once, when it has finished."""

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that progressed."""
        ...

    def abort_request(self, request_id: str) -> object:
        """Ends a request early."""

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        ...

    def fingerprint(self) -> str:
        """Identity of the weights."""
        ...


def run_job(
    job: JobConfig,
    engine_factory: Callable[[], JobEngine],
    *,
    resume: bool = False,
    overwrite: bool = False,
    stream: TextIO | None = None,
    quiet: bool = False,
) -> JobSummary:
    """Runs a job to its end or to the first signal.

    Args:
        job: what to do.
        engine_factory: makes the engine; called only if there is something to generate.
        resume: go on where an earlier run of the same job stopped (or start, where there was none).
        overwrite: throw an existing output away.
        stream: where progress is shown; stderr by default.
        quiet: show no progress.

    Returns:
        What was done. ``interrupted`` tells whether a signal ended it.

    Raises:
        ConfigError: the input cannot be read, or the engine's options do not fit the model.
        JobError: the output cannot be written, exists already, or belongs to another job.
    """
    if resume and overwrite:
        raise JobError("--resume and --overwrite: give one of them")
    _refuse_same_file(job)
    with SignalWatch() as watch, _Run(job, stream or sys.stderr, quiet, watch) as run:
        try:
            run.prepare(resume=resume, overwrite=overwrite)
            if not run.summary.complete:
                run.generate(engine_factory)
        except Interrupted as stop:
            run.summary.interrupted = stop.signum
        return run.summary


class _Run:
    """One run's mutable state: the writer, what is on disk, what is in flight."""

    def __init__(self, job: JobConfig, stream: TextIO, quiet: bool, watch: SignalWatch) -> None:
        self.job, self.stream, self.quiet, self.watch = job, stream, quiet, watch
        self.summary = JobSummary(total=0, output=job.output.path)
        self.flow = InOrder()
        self.writer: RecordWriter | None = None

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Looks at input and output; afterwards ``entries`` stands at the first line to generate."""
        path = self.job.input.path
        self.summary.total, input_sha256 = survey(path)
        input_format = detect_format(path) if self.job.input.format == "auto" else self.job.input.format
        self.input_stamp = _stamp(path)
        tracked = self.job.tracked()
        self.now = Manifest(
            config=tracked,
            config_sha256=hashlib.sha256(canonical_json(tracked).encode()).hexdigest(),
            input_sha256=input_sha256,
            input_format=input_format,
            weights="",
            versions=versions(),
            created=int(os.stat(path).st_mtime),
        )
        self.writer = RecordWriter(self.job.output.path)
        if self.writer.size_bytes and not resume and not overwrite:
            raise JobError(f"output.path: {self.job.output.path!r} exists; --resume goes on with it, --overwrite starts over")
        self.then = read_manifest(self.job.output.path) if resume else None
        if self.writer.size_bytes and resume and self.then is None:
            raise JobError(
                f"--resume: {self.job.output.path!r} has no manifest beside it to tell what it belongs to; use --overwrite"
            )
        if self.then is not None:
            refuse_changed(self.then, self.now)
            self.now = dataclasses.replace(self.now, created=self.then.created)
            if self.then.versions != self.now.versions:
                self.summary.notes.append(
                    f"started with {show_versions(self.then.versions)}, resumed with {show_versions(self.now.versions)}"
                )
        self.line_format = _line_format(self.job, self.now)
        self.entries = read_items(path, self.line_format)
        self.summary.errors.clear()
        if self.then is not None:
            done = scan_output(self.job.output.path, self.entries, self.line_format)
            self.writer.truncate(done.size_bytes)
            self.summary.resumed, self.summary.torn_bytes, self.summary.errors = done.num_records, done.torn_bytes, done.errors

        elif self.summary.total == 0:
            remove_manifest(self.job.output.path)
            self.writer.truncate(0)

    def generate(self, engine_factory: Callable[[], JobEngine]) -> None:
        """Loads the engine and serves what is left."""
        engine = engine_factory()
        assert self.writer is not None
        weights = engine.fingerprint()
        if self.then is not None:
            refuse_changed_weights(self.then.weights, weights)
        else:
            remove_manifest(self.job.output.path)  # before the records go: a manifest never vouches for records of another job
            self.writer.truncate(0)
            write_manifest(self.job.output.path, dataclasses.replace(self.now, weights=weights))
        trace, start_s = PoolTrace(), time.monotonic()
        progress = Progress(self.summary.total, self.summary.resumed, self.stream, quiet=self.quiet)
        try:
            with self.watch.graceful():
                for stats in self._steps(engine):
                    trace.add(time.monotonic() - start_s, stats)
                    progress.update(self.summary.done + len(self.flow.ready), stats)
        finally:
            progress.close()
        self.summary.interrupted = self.watch.signum if not self.summary.complete else None
        self.summary.seconds = time.monotonic() - start_s
        self.summary.stats = engine.stats()
        self.summary.peak_used_pages = trace.peak_used
        self.summary.compiles = getattr(getattr(engine, "ledger", None), "num_compilations", None)
        if _stamp(self.job.input.path) != self.input_stamp:
            self.summary.notes.append(
                "the input file was changed while the job ran: records may not match it; run again with --overwrite"
            )
        if self.job.output.plot and trace.samples:
            self.summary.plot = f"{self.job.output.path}.pool.png"
            draw_pool(trace, self.summary.plot)

    def _steps(self, engine: JobEngine) -> Iterator[EngineStats]:
        flow, max_num_seqs = self.flow, self.job.engine.max_num_seqs
        exhausted = False
        while True:
            while not exhausted and self.watch.signum is None:
                if len(flow.running) >= ADMIT_FACTOR * max_num_seqs or flow.num_open >= WINDOW_FACTOR * max_num_seqs:
                    break
                entry = next(self.entries, None)
                exhausted = entry is None
                if entry is not None:
                    self._admit(engine, entry)
            self._flush()
            if self.watch.signum is not None:
                for request_id in flow.running:
                    engine.abort_request(request_id)
                self.summary.lost = len(flow.ready)
                return
            if not flow.running:
                if exhausted:
                    return
                continue
            for output in engine.step():
                if output.finished and output.request_id in flow.running:
                    self._finish(output)
            self._flush()
            yield engine.stats()

    def _admit(self, engine: JobEngine, entry: Item | BadLine) -> None:
        if isinstance(entry, BadLine):
            self.flow.put_error(entry)
            return
        request_id = f"line-{entry.line}"
        try:
            engine.add_request(
                request_id,
                entry.prompt,
                entry.params,
                priority=entry.priority,
                cache_salt=entry.cache_salt,
                final_only=True,
            )
        except InvalidRequestError as error:
            self.flow.put_error(BadLine(entry.line, entry.id, "invalid_request", str(error), is_body=True))
        except CapacityError as error:
            self.flow.put_error(BadLine(entry.line, entry.id, "capacity", str(error), is_body=True))
        else:
            self.flow.start(request_id, entry)

    def _finish(self, output: RequestOutput) -> None:
        item = self.flow.running[output.request_id]
        if output.error is not None:
            self.flow.finish(output.request_id, BadLine(item.line, item.id, "engine_error", output.error, is_body=True))
        else:
            self.flow.finish(output.request_id, self.line_format.result(item, output))

    def _flush(self) -> None:
        assert self.writer is not None
        records, kinds = [], []
        for result in self.flow.pop_ready():
            records.append(self.line_format.error(result) if isinstance(result, BadLine) else result)
            kinds += [result.kind] if isinstance(result, BadLine) else []
        self.writer.append(records)
        self.summary.written += len(records)
        self.summary.errors.update(kinds)


def _line_format(job: JobConfig, manifest: Manifest) -> LineFormat:
    if manifest.input_format == "openai":
        return OpenAIFormat(job, manifest.created)
    return JsonlFormat(job, wants_json=manifest.input_format == "jsonl")


def _refuse_same_file(job: JobConfig) -> None:
    paths = {"input.path": job.input.path, "output.path": job.output.path, "engine.event_log": job.engine.event_log}
    taken: dict[str, str] = {}
    for field, path in paths.items():
        other = taken.setdefault(os.path.realpath(path), field) if path else field
        if other != field:
            raise JobError(f"{field}: {path!r} is the {other.split('.')[0]} file; choose another path")


def _stamp(path: str) -> tuple[int, int] | None:
    """What changes when a file is changed or goes away."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
