"""The message one scheduling step sends to the device side: plain data, JSON-able, replayable.

Order of execution on the device: ``saves``, ``restores``, ``copies``, then the model step (its KV writes, then its reads).
"""

import dataclasses
from typing import NamedTuple


class ScheduledSequence(NamedTuple):
    """The share of one sequence in a step.

    Attributes:
        seq_id: the sequence.
        num_computed_tokens: tokens already in pages, so the position of the first query token.
        num_tokens: query tokens of this step, >= 1.
        from_device: the one query token is the last sampled token, still on the device (its host value has not arrived).
        table_start: first logical page of ``page_ids``. 0 replaces the whole block table (a newly admitted, resumed or
            forked sequence); otherwise entries from there on are set (a copied last page and newly allocated pages).
        page_ids: physical pages from ``table_start`` on; empty where the table did not change (``table_start`` is then the
            table's length). 0 stands where a page wholly behind the sliding window was given back.
    """

    seq_id: int
    num_computed_tokens: int
    num_tokens: int
    from_device: bool
    table_start: int
    page_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's plan.

    Attributes:
        step: step number, from 0.
        scheduled: sequences that run, in the order of their rows.
        samples: ``(seq_id, row)``: sequence ``seq_id`` gets a token from the last query position of ``scheduled[row]``.
            Several samples of one request may name the row that finished their common prompt.
        saves: ``(device_page, host_page)``: device to host.
        restores: ``(host_page, device_page)``: host to device.
        copies: ``(src_page, dst_page)`` on the device; sources and destinations are disjoint.
        freed_pages: pages that became free since the last step (debug mode poisons them).
        preempted: sequences that lost their pages in this step.
    """

    step: int
    scheduled: tuple[ScheduledSequence, ...] = ()
    samples: tuple[tuple[int, int], ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    restores: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    freed_pages: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(seq.num_tokens for seq in self.scheduled)


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What the device sampled in one step; row ``i`` belongs to ``SchedulerOutput.samples[i]``. Host data.

    Attributes:
        token_ids: sampled tokens (R of them).
        logprobs: natural-log probability of each sampled token under the raw logits.
        top_ids, top_logprobs: the most likely tokens of each row, best first (k of them); empty where no row asked.
        finite: False where a row's logits were not finite: that request fails, no other.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    finite: list[bool]
