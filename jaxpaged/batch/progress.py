"""What a job tells while it runs: a bar on a terminal, otherwise a line every ten seconds. On stderr."""

import time
from typing import TextIO

from tqdm import tqdm

from jaxpaged.outputs import EngineStats

LINE_INTERVAL_S = 10.0
BAR_INTERVAL_S = 0.5


class Progress:
    """Shows requests done, tokens per second, running and waiting sequences, and pool use.

    Args:
        total: records of the whole job.
        done: records already on disk.
        stream: where to write.
        quiet: show nothing.
    """

    def __init__(self, total: int, done: int, stream: TextIO, *, quiet: bool = False) -> None:
        self._total, self._done, self._stream, self._quiet = total, done, stream, quiet
        terminal = not quiet and stream.isatty()
        self._bar = tqdm(total=total, initial=done, unit="req", file=stream, dynamic_ncols=True) if terminal else None
        self._interval_s = BAR_INTERVAL_S if terminal else LINE_INTERVAL_S
        self._last_time = time.monotonic()
        self._last_tokens = 0

    def update(self, done: int, stats: EngineStats) -> None:
        """Reports the state after a step.

        Args:
            done: requests finished, those waiting for their turn to be written included.
            stats: the engine's.
        """
        if self._bar is not None and done > self._done:
            self._bar.update(done - self._done)
        self._done = done
        elapsed_s = time.monotonic() - self._last_time
        if elapsed_s < self._interval_s:
            return
        text = describe(stats, (stats.num_generated_tokens - self._last_tokens) / elapsed_s)
        self._last_time, self._last_tokens = time.monotonic(), stats.num_generated_tokens
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        elif not self._quiet:
            print(f"{done}/{self._total} done, {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()


def describe(stats: EngineStats, tokens_per_s: float) -> str:
    """One line about the engine: ``52 tokens/s, 8 running, 3 waiting, pool 41%``."""
    share = 100 * stats.num_used_pages / stats.num_pages if stats.num_pages else 0.0
    swapped = f", {stats.num_swapped_seqs} swapped" if stats.num_swapped_seqs else ""
    queues = f"{stats.num_running_seqs} running, {stats.num_waiting_seqs} waiting{swapped}"
    return f"{tokens_per_s:.0f} tokens/s, {queues}, pool {share:.0f}%"
