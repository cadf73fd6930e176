"""The door: prompts and parameters in, a validated ``Request`` out, or an error that names the field."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.engine.input_builder import MAX_BANNED
from jaxpaged.errors import ConfigError, InvalidRequestError, shown
from jaxpaged.model.sampling import MAX_TOP
from jaxpaged.model_config import ModelConfig
from jaxpaged.request import Request
from jaxpaged.sampling_params import MAX_SEED, BeamSearchParams, SamplingParams
from jaxpaged.scheduler.beam import num_candidates
from jaxpaged.weights.tokenizer import Tokenizer

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


class RequestBuilder:
    """Validates requests completely.

    Args:
        model: the model's hyper-parameters.
        tokenizer: for text prompts; None accepts token ids only.
        max_model_len: most tokens of one sequence, prompt and output together.
        seed: of the engine; unseeded requests draw theirs from it and their arrival number.
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None, *, max_model_len: int, seed: int):
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seed = seed
        self.eos_token_ids = frozenset(model.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset())

    def build(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | BeamSearchParams,
        *,
        arrival: int,
        priority: int,
        cache_salt: str,
    ) -> tuple[Request, str | None]:
        """Builds a request.

        Args:
            request_id: the caller's id.
            prompt: text, token ids, or a mapping with one of "prompt", "prompt_token_ids" and "messages".
            params: what to generate.
            arrival: arrival number.
            priority: lower runs first under the "priority" policy.
            cache_salt: prefix pages are shared only between equal salts.

        Returns:
            The request and the prompt's text (None for token ids).

        Raises:
            InvalidRequestError: naming the field.
        """
        self.check_id(request_id)
        if not isinstance(params, (SamplingParams, BeamSearchParams)):
            raise InvalidRequestError(f"sampling_params: got {type(params).__name__}, wants SamplingParams or BeamSearchParams")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority: got {priority!r}, wants an integer")
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(f"cache_salt: got {cache_salt!r}, wants a string")
        _check_text("cache_salt", cache_salt)
        ids, text = self._tokens(prompt)
        room = self._max_model_len - len(ids)
        if room < 1:
            raise InvalidRequestError(
                f"prompt: got {len(ids)} tokens, wants at most {self._max_model_len - 1}: prompt and output together may have "
                f"max_model_len = {self._max_model_len}"
            )
        eos = self.eos_token_ids
        self.check_params(params)
        rope = self._model.rope
        if rope.rope_type == "dynamic":
            # A prompt longer than the trained length is rotated for its own length: its pages fit no other prompt.
            original = rope.original_max_position_embeddings or self._model.max_position_embeddings
            if len(ids) > original:
                cache_salt = f"{cache_salt}\0rope{len(ids)}"
        seed = params.seed if isinstance(params, SamplingParams) else 0
        if seed is None:
            digest = hashlib.sha256(f"{self._seed}\0{arrival}".encode()).digest()
            seed = int.from_bytes(digest[:8], "little") & MAX_SEED
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(ids),
            params=params,
            eos_token_ids=eos,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=seed,
            arrival=arrival,
            priority=priority,
            cache_salt=cache_salt,
        )
        return request, text

    @staticmethod
    def check_id(request_id: Any) -> None:
        """Refuses an id that is not a non-empty text (``InvalidRequestError``)."""
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id: got {request_id!r}, wants a non-empty string")
        _check_text("request_id", request_id)

    def check_params(self, params: SamplingParams | BeamSearchParams) -> None:
        """Refuses what this model cannot honour (``InvalidRequestError`` naming the field)."""
        vocab, eos = self._model.vocab_size, self.eos_token_ids
        if isinstance(params, BeamSearchParams):
            need = min(num_candidates(params.beam_width, len(eos)), vocab)  # all tokens are enough for any width
            if need > MAX_TOP:
                raise InvalidRequestError(
                    f"beam_width: got {params.beam_width}, which needs {need} candidates; at most {MAX_TOP}"
                )
            return
        for token in params.stop_token_ids:
            if token >= vocab:
                raise InvalidRequestError(f"stop_token_ids: got {token}, wants ids below the vocabulary size {vocab}")
        if params.min_tokens:
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
            if len(stops) > MAX_BANNED:
                raise InvalidRequestError(
                    f"min_tokens: with {len(stops)} stop and EOS ids; wants at most {MAX_BANNED} of them in all"
                )

    def _tokens(self, prompt: Any) -> tuple[list[int], str | None]:
        if isinstance(prompt, Mapping):
            unknown = [key for key in prompt if key not in PROMPT_KEYS]
            if unknown or len(prompt) != 1:
                raise InvalidRequestError(f"prompt: got keys {sorted(map(str, prompt))}, wants exactly one of {PROMPT_KEYS}")
            if "messages" in prompt:
                return self._chat(prompt["messages"])
            return self._tokens(prompt["prompt"] if "prompt" in prompt else self._id_list(prompt["prompt_token_ids"]))
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequestError("prompt: got text, but the model has no tokenizer; give prompt_token_ids")
            _check_text("prompt", prompt)
            ids = self._tokenizer.encode(prompt)
            if not ids:
                raise InvalidRequestError("prompt: got an empty text, wants at least one token")
            return self._checked(ids), prompt
        return self._checked(self._id_list(prompt)), None

    @staticmethod
    def _id_list(prompt: Any) -> list[int]:
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if isinstance(prompt, (bytes, str)) or not isinstance(prompt, Sequence):
            hint = '; the ids of one prompt want {"prompt_token_ids": [...]}' if isinstance(prompt, (int, np.integer)) else ""
            raise InvalidRequestError(f"prompt: got {type(prompt).__name__}, wants text, token ids or messages{hint}")
        return [int(token) if isinstance(token, np.integer) else token for token in prompt]

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise InvalidRequestError("prompt_token_ids: got an empty list, wants at least one token")
        vocab = self._model.vocab_size
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise InvalidRequestError(f"prompt_token_ids[{i}]: got {shown(token)}, wants an integer in [0, {vocab})")
        return ids

    def _chat(self, messages: Any) -> tuple[list[int], str | None]:
        if self._tokenizer is None:
            raise InvalidRequestError("messages: the model has no tokenizer; give prompt_token_ids")
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
            raise InvalidRequestError("messages: wants a non-empty list of {role, content}")
        try:
            ids = self._checked(self._tokenizer.apply_chat_template(messages))
        except ConfigError as error:  # no chat template: this request's fault, not the engine's
            raise InvalidRequestError(f"messages: {error}") from None
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"messages: the text cannot be encoded: {error}") from None
        return ids, self._tokenizer.decode(ids, skip_special_tokens=False)


def _check_text(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{field}: holds {text[error.start]!r} at {error.start}, half a character; wants text"
        ) from None
