"""Beam search as arithmetic on host numbers: which beams go on, which hypotheses are finished, when to stop.

No pages and no device here: the scheduler feeds each step's candidates and carries out the table operations.

Source: ``transformers`` 5 ``GenerationMixin._beam_search``: the best ``beam_width`` candidates over all beams may finish, the
best ``beam_width`` that do not stop go on; a hypothesis scores ``sum_logprobs / generated_length ** length_penalty`` with the
stop token counted.
"""

import dataclasses
from collections.abc import Sequence

from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import BeamSearchParams


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """One beam after a step: beam ``parent`` of the step before, with one more token.

    Attributes:
        parent: index of the parent in the list of beams given to ``advance``.
        token_id: the token.
        logprob: its log-probability.
        sum_logprobs: of all generated tokens.
    """

    parent: int
    token_id: int
    logprob: float
    sum_logprobs: float


@dataclasses.dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence.

    Attributes:
        token_ids: the generated tokens, a stop token included.
        logprobs: log-probability of each.
        sum_logprobs: their sum.
        score: ``sum_logprobs / len(token_ids) ** length_penalty``.
        finish_reason: STOP where it ended on EOS, LENGTH where it reached the limit.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sum_logprobs: float
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """The state of one search.

    Args:
        params: width, length penalty, early stopping.
        stop_ids: tokens that end a hypothesis.
        max_tokens: most generated tokens.

    Attributes:
        finished: finished hypotheses, best first, at most ``beam_width``.
        done: whether the search has ended; ``finished`` is then the answer.
    """

    __slots__ = ("_max_tokens", "_params", "_stop_ids", "done", "finished")

    def __init__(self, params: BeamSearchParams, stop_ids: frozenset[int], max_tokens: int) -> None:
        self._params = params
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self.finished: list[Hypothesis] = []
        self.done = False

    @property
    def num_candidates(self) -> int:
        """Candidates a beam must offer at each step so that ``beam_width`` of them do not stop."""
        return num_candidates(self._params.beam_width, len(self._stop_ids))

    def advance(
        self,
        beams: Sequence[tuple[Sequence[int], Sequence[float], float]],
        candidates: Sequence[tuple[Sequence[int], Sequence[float]]],
    ) -> list[Continuation]:
        """Takes one step.

        Args:
            beams: per live beam, best first: generated tokens, their log-probabilities, their sum.
            candidates: per beam, its most likely next tokens and their log-probabilities, best first.

        Returns:
            The beams that go on, best first; empty once ``done``.
        """
        width, limit = self._params.beam_width, self._max_tokens
        pool = [
            (total + logprob, -index, -rank, token, logprob)
            for index, (_, _, total) in enumerate(beams)
            for rank, (token, logprob) in enumerate(zip(*candidates[index], strict=True))
        ]
        pool.sort(reverse=True)
        length = len(beams[0][0]) + 1
        at_limit = length >= limit
        alive: list[Continuation] = []
        ended: list[Hypothesis] = []
        for position, (total, minus_index, _, token, logprob) in enumerate(pool):
            stops = token in self._stop_ids
            if not stops and not at_limit:
                alive.append(Continuation(-minus_index, token, logprob, total))
                if len(alive) == width:
                    break
            elif position < width:
                tokens, logprobs, _ = beams[-minus_index]
                ended.append(
                    Hypothesis(
                        (*tokens, token),
                        (*logprobs, logprob),
                        total,
                        total / length**self._params.length_penalty,
                        FinishReason.STOP if stops else FinishReason.LENGTH,
                    )
                )
            elif at_limit:
                break
        if ended:
            self.finished = sorted([*self.finished, *ended], key=lambda h: -h.score)[:width]
        self.done = not alive or self._must_stop(alive[0].sum_logprobs, length)
        return [] if self.done else alive

    def _must_stop(self, best_sum: float, length: int) -> bool:
        """Whether no running beam can or may still improve the answer (``early_stopping``)."""
        if len(self.finished) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        penalty = self._params.length_penalty
        if self._params.early_stopping == "never" and penalty > 0:
            length = self._max_tokens
        return not best_sum / length**penalty > self.finished[-1].score


def num_candidates(beam_width: int, num_stop_ids: int) -> int:
    """Candidates each beam must offer: enough to fill the width with tokens that do not stop, and twice the width at least."""
    return max(2 * beam_width, beam_width + num_stop_ids)
