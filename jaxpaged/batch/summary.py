"""What a job reports at its end."""

import collections
import dataclasses

from jaxpaged.outputs import EngineStats


@dataclasses.dataclass
class JobSummary:
    """The outcome of one run of a job.

    Attributes:
        total: records the whole job has (lines that are not blank).
        resumed: records an earlier run had written.
        written: records this run wrote.
        errors: error records on disk, by kind, earlier runs' included.
        seconds: of generating, loading left out.
        stats: the engine's counters at the end; None where no engine was needed.
        peak_used_pages: most pages in use at once.
        compiles: what the compile ledger counted; None where no engine was needed.
        lost: results that were finished but not yet their turn when the job was interrupted; they are computed again.
        interrupted: the signal that ended the run, or None.
        torn_bytes: bytes of a half-written record that were cut off before going on.
        plot: path of the picture, where one was drawn.
        output: path of the output file.
        notes: what else the user should know.
    """

    total: int
    output: str
    resumed: int = 0
    written: int = 0
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0
    stats: EngineStats | None = None
    peak_used_pages: int = 0
    compiles: int | None = None
    lost: int = 0
    interrupted: int | None = None
    torn_bytes: int = 0
    plot: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> int:
        """Records on disk."""
        return self.resumed + self.written

    @property
    def complete(self) -> bool:
        """Whether every line has its record."""
        return self.done == self.total

    def text(self) -> str:
        """The summary, several lines."""
        rows = [("requests", self._requests()), ("errors", self._errors())]
        if self.stats is not None:
            stats, rate = self.stats, self.stats.num_generated_tokens / self.seconds if self.seconds > 0 else 0.0
            share = 100 * stats.num_cached_tokens / stats.num_prompt_tokens if stats.num_prompt_tokens else 0.0
            used = f" ({100 * self.peak_used_pages / stats.num_pages:.0f}%)" if stats.num_pages else ""
            prompt = f"{stats.num_prompt_tokens} prompt ({stats.num_cached_tokens} cached, {share:.0f}%)"
            rows += [
                ("tokens", f"{prompt}, {stats.num_generated_tokens} generated"),
                ("speed", f"{rate:.1f} tokens/s generated over {self.seconds:.1f} s, {stats.num_steps} steps"),
                ("pool", f"peak {self.peak_used_pages} of {stats.num_pages} pages{used}, {stats.num_page_copies} page copies"),
                ("preemptions", f"{stats.num_preemptions}{_swaps(stats)}"),
            ]
        if self.compiles is not None:
            rows.append(("compilations", str(self.compiles)))
        rows.append(("output", self.output))
        if self.plot is not None:
            rows.append(("pool plot", self.plot))
        rows += [("note", note) for note in self.notes]
        return "\n".join(f"{name + ':':<14}{value}" for name, value in rows)

    def _requests(self) -> str:
        parts = [f"{self.done} of {self.total} done"]
        if self.resumed:
            parts.append(f"{self.resumed} by an earlier run")
        if self.torn_bytes:
            parts.append(f"a torn record of {self.torn_bytes} bytes was removed")
        if self.lost:
            parts.append(f"{self.lost} finished out of turn, to be computed again")
        return ", ".join(parts)

    def _errors(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.errors.items()))
        return f"{self.errors.total()}{f' ({kinds})' if kinds else ''}"


def _swaps(stats: EngineStats) -> str:
    if not (stats.num_swapped_out_pages or stats.num_swapped_in_pages):
        return ""
    return f" ({stats.num_swapped_out_pages} pages swapped out, {stats.num_swapped_in_pages} in)"
