"""What the page-event log costs: processor time of a scheduling step with and without it, side by side in one process.

Two schedulers with equal requests take turns, so that whatever else the machine does meets both alike. All sequences
decode, pipelined as in the engine; a third of the requests have two samples, and prompts share a beginning, so that the
log holds allocations, shares, copies and frees. Usage: ``python scripts/bench_events.py [--steps 400] [--sequences 1 64 256]``
"""

import argparse
import gc
import os
import statistics
import tempfile
import time

from jaxpaged.config import SchedulerConfig
from jaxpaged.request import Request
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler.events import EventLog
from jaxpaged.scheduler.scheduler import Scheduler
from jaxpaged.scheduler.scheduler_output import SchedulerOutput, StepResult


class Driver:
    """A scheduler with a device that always answers 7, one step in flight."""

    def __init__(self, config: SchedulerConfig, num_seqs: int, steps: int, log: EventLog | None) -> None:
        self.scheduler = Scheduler(config, log)
        number = seqs = 0
        while seqs < num_seqs:
            samples = 2 if number % 3 == 2 and seqs + 2 <= num_seqs else 1
            params = SamplingParams(max_tokens=steps + 64, n=samples)
            prompt = (*range(32), *range(100 + number, 110 + number))
            self.scheduler.add(Request(f"r{number}", prompt, params, frozenset({1 << 30}), steps + 64, number, number))
            number += 1
            seqs += samples
        self.in_flight: list[tuple[SchedulerOutput, StepResult]] = []

    def step(self) -> float:
        """Plans a step and takes in the one before. Returns: seconds."""
        start = time.thread_time()
        output = self.scheduler.schedule()
        spent = time.thread_time() - start
        rows = len(output.samples)
        self.in_flight.append((output, StepResult([7] * rows, [-1.0] * rows, [[]] * rows, [[]] * rows, [True] * rows)))
        if len(self.in_flight) > 1:
            pair = self.in_flight.pop(0)
            start = time.thread_time()
            self.scheduler.update_from_output(*pair)
            spent += time.thread_time() - start
        return spent


def measure(num_seqs: int, steps: int, folder: str) -> tuple[float, float, float, float]:
    """Mean microseconds of a step without and with the log (over its middle 80 %), events and bytes a step."""
    config = SchedulerConfig(
        page_size=16,
        num_pages=num_seqs * (steps // 16 + 10) + 2,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=64 * num_seqs,
        max_model_len=steps + 128,
    )
    path = os.path.join(folder, f"{num_seqs}.jsonl")
    log = EventLog(path, config=config)
    plain, logged = Driver(config, num_seqs, steps, None), Driver(config, num_seqs, steps, log)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(steps):
        for which in (0, 1) if i % 2 else (1, 0):
            times[which].append((plain, logged)[which].step() * 1e6)
    log.close()
    middle = slice(steps // 10, steps - steps // 10)
    return (
        statistics.fmean(sorted(times[0])[middle]),
        statistics.fmean(sorted(times[1])[middle]),
        log.num_events / steps,
        os.path.getsize(path) / steps,
    )


def measure_emit(folder: str, count: int = 100_000) -> float:
    """Microseconds of one ``alloc`` event, writing included."""
    log = EventLog(os.path.join(folder, "emit.jsonl"))
    start = time.thread_time()
    for i in range(count):
        if i % 100 == 0:
            log.begin_step(i // 100)
        log.emit("alloc", request="request-17", seq=3, logical=4, page=i, before=0, after=1)
    log.close()
    return (time.thread_time() - start) / count * 1e6


def main() -> None:
    """Prints one line per number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    args = parser.parse_args()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        print(f"one event: {measure_emit(folder):.2f} us")
        print("sequences  without_us  with_us  ratio  added_us_per_sequence  events_per_step  bytes_per_step")
        for num_seqs in args.sequences:
            without, logged, events, size = measure(num_seqs, args.steps, folder)
            each = (logged - without) / num_seqs
            times = f"{without:10.1f}  {logged:7.1f}  {logged / without:5.2f}  {each:21.2f}"
            print(f"{num_seqs:9d}  {times}  {events:15.2f}  {size:14.0f}")


if __name__ == "__main__":
    main()
