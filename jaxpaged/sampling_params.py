"""What a request may ask of the sampler. Names and defaults follow vLLM's ``SamplingParams``.

Every field is validated here, once, for offline and HTTP use alike; a value that cannot be honoured raises
``InvalidRequestError`` naming the field. Nothing is accepted and then ignored.
"""

import dataclasses
import difflib
import math
from typing import Any

from jaxpaged.errors import InvalidRequestError, shown

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
UNSUPPORTED = frozenset({
    "allowed_token_ids", "bad_words", "frequency_penalty", "guided_decoding", "include_stop_str_in_output", "logit_bias",
    "logits_processors", "presence_penalty", "prompt_logprobs", "repetition_penalty", "stop", "structured_outputs",
    "truncate_prompt_tokens",
})  # fmt: skip
"""Sampling parameters of vLLM that are not there."""
MAX_INT32 = 2**31 - 1  # what a row's integers may be on the device
MAX_TEMPERATURE = 1e6  # beyond it float32 scores underflow
MAX_LENGTH_PENALTY = 32.0  # a length raised to it stays far inside a float


def _fail(field: str, got: object, wants: str) -> None:
    raise InvalidRequestError(f"{field}: got {shown(got)}, wants {wants}")


def _number(field: str, value: object, wants: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _fail(field, value, wants)
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        _fail(field, value, wants)
    return number


def _integer(field: str, value: object, wants: str, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _fail(field, value, wants)
    if value < low or (high is not None and value > high):  # type: ignore[operator]
        _fail(field, value, wants)
    return value  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to turn one request's logits into tokens.

    Args:
        n: completions to return for the prompt, >= 1. All share the prompt's pages.
        best_of: completions to generate; the ``n`` with the highest cumulative log-probability are returned. None means ``n``.
        temperature: in [0, 1e6]. 0 is greedy; values below 1e-5 are treated as greedy too (dividing by them overflows).
        top_k: keep the ``top_k`` most likely tokens; None, 0 and -1 keep all.
        top_p: keep the smallest set of tokens whose probability reaches ``top_p``, in (0, 1]; 1 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the most likely one, in [0, 1]; 0 keeps all.
        seed: the noise of a token depends only on (seed, sample index, position). None: the engine draws a fresh one
            from its own seed and the request's arrival number, so unseeded requests differ from one another.
        max_tokens: most tokens to generate, >= 1. None runs to the model's limit.
        min_tokens: EOS and ``stop_token_ids`` cannot be sampled before this many tokens, >= 0, at most ``max_tokens``.
        stop_token_ids: generation ends when one of these is sampled; the token is kept in ``token_ids``, not in ``text``.
        ignore_eos: go on after EOS (``stop_token_ids`` still end generation).
        logprobs: None returns none; 0 the sampled token's; k > 0 also the k most likely (at most 20). They are the
            log-softmax of the raw logits, before temperature and filters.
        skip_special_tokens: leave special tokens out of ``text``.

    Raises:
        InvalidRequestError: a field has a wrong type or range; the message names it.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int | None = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        set_ = lambda name, value: object.__setattr__(self, name, value)
        _integer("n", self.n, "an integer >= 1", 1)
        if self.best_of is not None:
            _integer("best_of", self.best_of, f"an integer >= n ({self.n}), or None", self.n)
        wants = f"a number in [0, {MAX_TEMPERATURE:g}]"
        if not 0 <= _number("temperature", self.temperature, wants) <= MAX_TEMPERATURE:
            _fail("temperature", self.temperature, wants)
        if self.top_k is None or self.top_k == -1:
            set_("top_k", 0)
        _integer("top_k", self.top_k, f"an integer in [1, {MAX_INT32}], or None, 0 or -1 for all tokens", 0, MAX_INT32)
        if not 0 < _number("top_p", self.top_p, "a number in (0, 1]") <= 1:
            _fail("top_p", self.top_p, "a number in (0, 1]")
        if not 0 <= _number("min_p", self.min_p, "a number in [0, 1]") <= 1:
            _fail("min_p", self.min_p, "a number in [0, 1]")
        if self.seed is not None:
            _integer("seed", self.seed, f"an integer in [0, {MAX_SEED}], or None", 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, "an integer >= 1, or None for the model's limit", 1)
        _integer("min_tokens", self.min_tokens, f"an integer in [0, {MAX_INT32}]", 0, MAX_INT32)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
            _fail("stop_token_ids", ids, "a list of token ids")
        ids = tuple(ids)
        for token in ids:
            _integer("stop_token_ids", token, "token ids >= 0", 0)
        set_("stop_token_ids", ids)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _fail(name, getattr(self, name), "true or false")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, f"an integer in [0, {MAX_LOGPROBS}], or None", 0, MAX_LOGPROBS)

    @property
    def num_samples(self) -> int:
        """Sequences to generate: ``best_of`` where given, else ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def needs_logprobs(self) -> bool:
        """True where the sampled tokens' log-probabilities are returned, or rank ``best_of`` completions."""
        return self.logprobs is not None or self.num_samples > self.n

    @property
    def is_greedy(self) -> bool:
        """True where the most likely token is always taken."""
        return self.temperature < 1e-5

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, where: str = "sampling") -> "SamplingParams":
        """Builds from a mapping (YAML, JSON), rejecting unknown names with the nearest valid one.

        Raises:
            InvalidRequestError: an unknown field, or a value out of range.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for key in fields:
            if key not in known:
                refuse_unsupported(str(key), f"{where}.")
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidRequestError(f"{where}.{key}: unknown sampling parameter{hint} (valid: {', '.join(known)})")
        return cls(**fields)


def refuse_unsupported(name: str, where: str = "") -> None:
    """Refuses parameters that other engines have and this one has not, without guessing at a misspelling.

    Raises:
        InvalidRequestError: ``name`` is one of them.
    """
    if name in UNSUPPORTED:
        instead = "; stop_token_ids ends at a token" if name == "stop" else ""
        raise InvalidRequestError(f"{where}{name}: not supported{instead}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search over one prompt, as in ``transformers`` (``num_beams``, ``length_penalty``, ``early_stopping``).

    Args:
        beam_width: beams kept at each step, >= 1. The ``beam_width`` best hypotheses are returned, best first.
        max_tokens: most tokens to generate, >= 1.
        length_penalty: in [-32, 32]; a hypothesis scores ``sum_logprobs / generated_length ** length_penalty``.
        early_stopping: True stops at ``beam_width`` finished hypotheses; False stops when no running beam can beat the
            worst finished one by the best score attainable now; "never" uses the best score attainable at full length.
        ignore_eos: EOS is an ordinary token.

    Source: transformers ``GenerationConfig`` documentation; beam search in paper section 4.4 (Kwon et al., 2023).
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, "an integer >= 1", 1)
        _integer("max_tokens", self.max_tokens, "an integer >= 1", 1)
        wants = f"a number in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
        if abs(_number("length_penalty", self.length_penalty, wants)) > MAX_LENGTH_PENALTY:
            _fail("length_penalty", self.length_penalty, wants)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            _fail("early_stopping", self.early_stopping, 'true, false or "never"')
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _fail(name, getattr(self, name), "true or false")
