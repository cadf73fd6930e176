"""One request and its sequences, as the scheduler sees them. Plain host data; no JAX.

A ``Request`` is what a caller submits; a ``Sequence`` is one stream of tokens. A request with ``n`` samples or beams has
several sequences. Each sequence owns one append-only token list plus the number ``num_computed_tokens``: preempting
resets only that number, so no token can be lost or doubled.
"""

import dataclasses
import enum

from jaxpaged.sampling_params import BeamSearchParams, SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are what OpenAI and vLLM print."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens.

    Attributes:
        seq_id: unique in the engine, never reused.
        request: the request it belongs to.
        index: sample index within the request (0 for the first); keys the sampling noise.
        token_ids: prompt then generated tokens; append-only.
        num_prompt_tokens: length of the prompt.
        num_computed_tokens: tokens whose KV is, or is about to be by a dispatched step, in pages.
        num_inflight_tokens: tokens being sampled by a dispatched step whose output has not arrived (0 or 1).
        num_cached_tokens: prompt tokens taken from the prefix index at first admission (for usage figures).
        logprobs: per generated token, ``(logprob, ((token_id, logprob), ...))``: the sampled one's and the top-k asked for.
        cumulative_logprob: sum of the generated tokens' log-probabilities.
        finish_reason: None while running.
        stop_reason: the token id that ended it, where a stop token did.
    """

    seq_id: int
    request: "Request"
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt included."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Known generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def generated_token_ids(self) -> list[int]:
        """The generated tokens (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One submitted prompt with its parameters, already validated.

    Attributes:
        request_id: the caller's id; unique among live requests.
        prompt_token_ids: the prompt, at least one token.
        params: sampling or beam-search parameters.
        eos_token_ids: ids that end a sequence unless ``ignore_eos``.
        max_tokens: most tokens to generate, already capped by the model's length limit.
        seed: the noise seed, already drawn where the caller gave none.
        arrival: arrival number, increasing; first-come-first-served order and the order of preemption.
        priority: lower runs first under the ``priority`` policy.
        cache_salt: part of the prefix key: requests with different salts never share pages.
        sequences: the live and finished sequences, by sample index.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    eos_token_ids: frozenset[int]
    max_tokens: int
    seed: int
    arrival: int
    priority: int = 0
    cache_salt: str = ""
    sequences: list[Sequence] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(seq.finished for seq in self.sequences)
