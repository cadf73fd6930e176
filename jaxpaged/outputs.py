"""What callers get back. Names follow vLLM's ``RequestOutput`` and ``CompletionOutput``."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability.

    Attributes:
        logprob: natural-log probability under the raw logits.
        rank: 1 for the most likely token; None where it was not among those asked for.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: sample index within the request.
        text: the generated text (stop tokens and special tokens left out).
        token_ids: the generated tokens, a stop token included.
        cumulative_logprob: sum of the tokens' log-probabilities; None where logprobs were not asked for.
        logprobs: per token, token id -> ``Logprob``; None where not asked for.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"``, ``"error"``; None while running.
        stop_reason: the stop token id that ended it, if one did and it was not EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """The state of one request.

    Attributes:
        request_id: the caller's id.
        prompt: the prompt's text where it was given as text.
        prompt_token_ids: the prompt's tokens.
        outputs: one per returned sample.
        finished: whether all of them have ended.
        num_cached_tokens: prompt tokens found in the prefix cache.
        error: the message, where the request failed after it was accepted.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine between two steps.

    Attributes:
        num_running_seqs, num_waiting_seqs, num_swapped_seqs: sequences by state.
        num_pages: pages a sequence may own (the scratch page left out).
        num_used_pages: pages named by at least one block table.
        num_cached_pages: pages no table names but the prefix index can still find.
        num_logical_pages: block-table entries over all sequences; above ``num_used_pages`` where pages are shared.
        num_wasted_slots: token slots of used pages that hold no token.
        num_prompt_tokens, num_cached_tokens, num_generated_tokens: totals since start.
        num_preemptions, num_page_copies: totals since start.
        num_swapped_out_pages, num_swapped_in_pages: totals since start.
        num_steps: steps run since start.
    """

    num_running_seqs: int = 0
    num_waiting_seqs: int = 0
    num_swapped_seqs: int = 0
    num_pages: int = 0
    num_used_pages: int = 0
    num_cached_pages: int = 0
    num_logical_pages: int = 0
    num_wasted_slots: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_page_copies: int = 0
    num_swapped_out_pages: int = 0
    num_swapped_in_pages: int = 0
    num_steps: int = 0
