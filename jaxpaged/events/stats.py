"""Totals of one run: lengths, concurrency, peaks, waste by the paper's accounting, copies, frees and memory saved.

**Source** of the accounting: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023), figures 2 and 15, and its artefact: per step, as a share of the whole pool, *token states* are slots
that hold a token of a running sequence; *reserved* are slots its pages will fill later; *internal* are slots of its pages
that are never filled; *external and other* is the rest, here free and cached pages. The memory saving compares the pages
the block tables name (logical) with the pages that exist (physical).
"""

import collections
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Waste:
    """Mean share of the pool over all steps, each in [0, 1]; the five add up to 1."""

    token_states: float
    reserved: float
    internal: float
    cached: float
    free: float

    @property
    def external_and_other(self) -> float:
        """Cached and free pages together."""
        return self.cached + self.free


class RunStats:
    """Counts one run while it is replayed.

    Attributes:
        kinds: events by kind.
        shares, copies, preempts, finishes: those events by their ``why``.
        steps: ``step`` events.
        lengths: tokens of each sequence that was written or ended.
        concurrency: sequences holding device pages, per step.
        peak_pages: most pages owned at once.
        peak_host_pages: most host pages in use at once.
        torn: line at which the log was cut short, or 0.
        num_owned: pages owned after the last event.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.kinds: collections.Counter[str] = collections.Counter()
        self.shares: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()
        self.preempts: collections.Counter[str] = collections.Counter()
        self.finishes: collections.Counter[str] = collections.Counter()
        self.requests: set[str] = set()
        self.steps = 0
        self.lengths: dict[int, int] = {}
        self.concurrency: list[int] = []
        self.tokens = 0
        self.duration_us = 0
        self.peak_pages = self.peak_host_pages = self.torn = 0
        self.num_owned = 0
        self._saving_sum = self._ratio_sum = 0.0
        self._shared_steps = 0  # steps with at least one page
        self._filled_sum = self._unfilled_sum = self._internal_sum = self._cached_sum = self._free_sum = 0
        self._since: dict[int, int] = {}  # page -> steps planned when it got its first owner

    def count(self, kind: str, event: dict[str, Any]) -> None:
        """Counts an event."""
        self.kinds[kind] += 1
        self.duration_us = event["t_us"]
        by_reason = {"share": self.shares, "copy": self.copies, "preempt": self.preempts, "finish": self.finishes}.get(kind)
        if by_reason is not None:
            by_reason[event["why"]] += 1

    def admitted(self, request: str) -> None:
        """A request entered the running set."""
        self.requests.add(request)

    def page_taken(self, page: int, num_owned: int) -> None:
        """A page got its first owner."""
        self._since[page] = self.steps
        self.num_owned = num_owned
        self.peak_pages = max(self.peak_pages, num_owned)

    def page_released(self, page: int, filled: int) -> None:
        """A page lost its last owner, with ``filled`` slots: the others were never used."""
        self.num_owned -= 1
        self._internal_sum += (self.page_size - filled) * (self.steps - self._since.pop(page))

    def host_used(self, pages: int) -> None:
        """Host pages in use."""
        self.peak_host_pages = max(self.peak_host_pages, pages)

    def written(self, seq: int, position: int, tokens: int) -> None:
        """A sequence was appended to."""
        self.lengths[seq] = max(self.lengths.get(seq, 0), position + tokens)

    def ended(self, seq: int, tokens: int | None) -> None:
        """A sequence ended with a total of ``tokens``, where known."""
        if tokens is not None:
            self.lengths[seq] = tokens

    def planned(self, event: dict[str, Any], used: int, entries: int, sequences: int, filled: int) -> None:
        """A step was planned with ``used`` pages, ``entries`` table entries and ``filled`` slots of used pages."""
        self.steps += 1
        self.tokens += event["tokens"]
        self.concurrency.append(sequences)
        if used:
            self._saving_sum += 1 - used / entries
            self._ratio_sum += entries / used
            self._shared_steps += 1
        self._filled_sum += filled
        self._unfilled_sum += used * self.page_size - filled
        self._cached_sum += event["cached"] * self.page_size
        self._free_sum += event["free"] * self.page_size

    def close(self, filled: dict[int, int]) -> None:
        """Ends the run; pages still owned count as if released now."""
        owned = self.num_owned
        for page in list(self._since):
            self.page_released(page, filled.get(page, 0))
        self.num_owned = owned

    @property
    def saving(self) -> float:
        """Mean over steps of 1 - physical / logical pages, in [0, 1)."""
        return self._saving_sum / self._shared_steps if self._shared_steps else 0.0

    @property
    def saving_of_mean(self) -> float:
        """1 - 1 / (mean over steps of logical / physical pages), the artefact's rule, in [0, 1)."""
        return 1 - self._shared_steps / self._ratio_sum if self._shared_steps else 0.0

    @property
    def waste(self) -> Waste:
        """Where the pool's slots went, on average over all steps. Valid after ``close``."""
        slots = self.steps * self.num_pages * self.page_size
        if not slots:
            return Waste(0.0, 0.0, 0.0, 0.0, 1.0)
        reserved = self._unfilled_sum - self._internal_sum
        parts = (self._filled_sum, reserved, self._internal_sum, self._cached_sum, self._free_sum)
        return Waste(*(part / slots for part in parts))


def describe(stats: RunStats, *, writes: bool) -> str:
    """The summary of a run as text, one fact a line.

    Args:
        stats: a closed run.
        writes: whether the log lists writes; without them waste and lengths are left out.
    """
    kinds = stats.kinds
    seconds = stats.duration_us / 1e6
    lines = [
        f"requests {len(stats.requests)}, sequences {len(stats.lengths)}, steps {stats.steps}, tokens {stats.tokens}, "
        f"events {sum(kinds.values())}, {seconds:.3f} s",
        f"pages: {stats.num_pages} of {stats.page_size} tokens, peak {stats.peak_pages} owned, "
        f"peak {stats.peak_host_pages} on the host, {stats.num_owned} owned at the end",
    ]
    if stats.concurrency:
        mean = sum(stats.concurrency) / len(stats.concurrency)
        lines.append(f"concurrency: mean {mean:.2f}, peak {max(stats.concurrency)} sequences  {sparkline(stats.concurrency)}")
    if writes and stats.lengths:
        lengths = sorted(stats.lengths.values())
        lines.append(
            f"lengths: min {lengths[0]}, median {lengths[len(lengths) // 2]}, mean {sum(lengths) / len(lengths):.1f}, "
            f"max {lengths[-1]} tokens"
        )
    if writes and stats.steps and stats.num_pages:
        waste = stats.waste
        lines.append(
            f"pool, mean over steps: token states {waste.token_states:.1%}, reserved {waste.reserved:.1%}, "
            f"internal {waste.internal:.1%}, external and other {waste.external_and_other:.1%} "
            f"(cached {waste.cached:.1%}, free {waste.free:.1%})"
        )
    lines.append(
        f"memory saved by sharing: {stats.saving:.2%} mean of 1 - physical/logical; {stats.saving_of_mean:.2%} by mean ratio"
    )
    lines.append(f"allocations {kinds['alloc']}, frees {kinds['free']}, evictions {kinds['evict']}")
    for name, plural, by_reason in (
        ("share", "shares", stats.shares),
        ("copy", "copies", stats.copies),
        ("preempt", "preemptions", stats.preempts),
        ("finish", "finished", stats.finishes),
    ):
        if kinds[name]:
            reasons = ", ".join(f"{why} {count}" for why, count in sorted(by_reason.items()))
            lines.append(f"{plural} {kinds[name]} ({reasons})")
    moved = [f"{label} {kinds[kind]}" for kind, label in _MOVES if kinds[kind]]
    if moved:
        lines.append(", ".join(moved))
    return "\n".join(lines)


_MOVES = (
    ("swap_out", "swapped out"),
    ("swap_in", "swapped in"),
    ("offload", "offloaded"),
    ("restore", "restored"),
    ("abort", "aborted"),
)


def sparkline(values: list[int], width: int = 48) -> str:
    """Draws values over time as one line of block characters, each the maximum of its share of ``values``."""
    marks, peak = "▁▂▃▄▅▆▇█", max(values) or 1
    width = min(width, len(values))
    chunks = (values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width))
    return "".join(marks[max(chunk) * (len(marks) - 1) // peak] for chunk in chunks)
