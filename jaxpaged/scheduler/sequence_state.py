"""What the scheduler remembers of one sequence and of one request, beside the public ``Sequence`` and ``Request``."""

import dataclasses
import enum

from jaxpaged.request import Request, Sequence
from jaxpaged.scheduler.beam import BeamSearch


class Status(enum.Enum):
    """Where a sequence is.

    PENDING: a sample that waits for the common prompt. WAITING: queued without pages. SWAPPED: queued, its pages on the host.
    RUNNING: has pages and a seat. FINISHED: ended, aborted or dropped; it holds nothing.
    """

    PENDING = 0
    WAITING = 1
    SWAPPED = 2
    RUNNING = 3
    FINISHED = 4


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """One live request.

    Attributes:
        request: the request.
        states: its live and finished sequences; for beam search the live beams, best first.
        number: of the request, in the order added.
        limit: most tokens of a sequence, prompt included.
        stop_ids: token ids that end a sequence.
        extras: extra keys of its prefix keys, encoded.
        worst_pages: pages it holds at worst.
        beam: the beam search, where it is one.
    """

    request: Request
    states: list["SeqState"]
    number: int
    limit: int
    stop_ids: frozenset[int]
    extras: bytes
    worst_pages: int
    beam: BeamSearch | None = None


@dataclasses.dataclass(slots=True, eq=False)
class SeqState:
    """One live sequence.

    Attributes:
        seq: the public sequence.
        owner: its request.
        rank: (priority, arrival, number of the request, seq_id): who runs first; the highest is preempted first.
        limit: most tokens, prompt included.
        stop_ids: tokens that end it.
        plain: whether a step of one token needs no more than a slot: no beam, no samples to fork.
        status: where it is.
        table: page ids in logical order; 0 where a page behind the sliding window was given back.
        dirty: first logical index the device does not know of; ``len(table)`` where it knows all.
        keys: prefix keys of its full pages, as far as computed.
        index_at: the page that ends at this token is the next to become findable.
        num_behind: leading pages given back behind the sliding window.
        host_table: host pages in logical order while swapped out; -1 where ``table`` had 0.
        seats: rows it may need in a step: all samples of a request until they are forked.
        pending: samples that get their first token from this sequence's prompt; emptied by the fork.
        hold: waits for a decision of the host (beam search) and is not scheduled.
        candidates: beam search: ``(token ids, log-probabilities)`` of its next tokens, until all beams have theirs.
        admitted: whether it ever ran.
    """

    seq: Sequence
    owner: RequestState
    rank: tuple[int, int, int, int]
    limit: int
    stop_ids: frozenset[int]
    plain: bool
    status: Status = Status.WAITING
    table: list[int] = dataclasses.field(default_factory=list)
    dirty: int = 0
    keys: list[bytes] = dataclasses.field(default_factory=list)
    index_at: int = 0
    num_behind: int = 0
    host_table: list[int] = dataclasses.field(default_factory=list)
    seats: int = 1
    pending: list["SeqState"] = dataclasses.field(default_factory=list)
    hold: bool = False
    candidates: tuple[list[int], list[float]] | None = None
    admitted: bool = False
