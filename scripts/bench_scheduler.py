"""Host time of one scheduling step: microseconds of ``schedule`` and ``update_from_output`` at 1, 64 and 256 sequences.

All sequences decode, pipelined as in the engine (the next step is planned before the results of the current one are in).
Usage: ``python scripts/bench_scheduler.py [--steps 400] [--sequences 1 64 256] [--event-log]``
"""

import argparse
import gc
import os
import statistics
import time

from jaxpaged.config import SchedulerConfig
from jaxpaged.request import Request
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler.events import EventLog
from jaxpaged.scheduler.scheduler import Scheduler
from jaxpaged.scheduler.scheduler_output import SchedulerOutput, StepResult


def measure(num_seqs: int, steps: int, *, event_log: bool = False, **options: object) -> tuple[float, float]:
    """Median microseconds of ``schedule`` and ``update_from_output`` with ``num_seqs`` sequences decoding."""
    config = SchedulerConfig(
        page_size=16,
        num_pages=num_seqs * (steps // 16 + 8) + 2,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=64 * num_seqs,
        max_model_len=steps + 128,
        **options,  # type: ignore[arg-type]
    )
    scheduler = Scheduler(config, EventLog(os.devnull, config=config) if event_log else None)
    params = SamplingParams(max_tokens=steps + 64)
    for number in range(num_seqs):
        prompt = tuple(range(number, number + 20))
        scheduler.add(Request(f"r{number}", prompt, params, frozenset({1 << 30}), steps + 64, number, number))
    in_flight: list[tuple[SchedulerOutput, StepResult]] = []
    schedule_us: list[float] = []
    update_us: list[float] = []
    for _ in range(steps):
        start = time.perf_counter()
        output = scheduler.schedule()
        schedule_us.append((time.perf_counter() - start) * 1e6)
        rows = len(output.samples)
        in_flight.append((output, StepResult([7] * rows, [-1.0] * rows, [[]] * rows, [[]] * rows, [True] * rows)))
        if len(in_flight) > 1:
            pair = in_flight.pop(0)
            start = time.perf_counter()
            scheduler.update_from_output(*pair)
            update_us.append((time.perf_counter() - start) * 1e6)
    assert scheduler.stats().num_running_seqs == num_seqs
    return statistics.median(schedule_us[8:]), statistics.median(update_us[8:])


def main() -> None:
    """Prints one line per number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--event-log", action="store_true", help="write the page-event log (to the null device)")
    parser.add_argument("--sliding-window", type=int, default=None, help="tokens a position sees; none for all")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    args = parser.parse_args()
    gc.freeze()
    print("sequences  schedule_us  update_us  together_us  us_per_sequence")
    for num_seqs in args.sequences:
        schedule, update = measure(num_seqs, args.steps, event_log=args.event_log, sliding_window=args.sliding_window)
        both = schedule + update
        print(f"{num_seqs:9d}  {schedule:11.1f}  {update:9.1f}  {both:11.1f}  {both / num_seqs:15.2f}")


if __name__ == "__main__":
    main()
