"""Checks of the parts every input format shares: prompts, messages, ids. All faults are ``InvalidRequestError``."""

import difflib
from collections.abc import Iterable
from typing import Any

from jaxpaged.errors import InvalidRequestError
from jaxpaged.sampling_params import refuse_unsupported


def check_fields(fields: Iterable[str], known: Iterable[str], where: str = "") -> None:
    """Refuses a field that is not known.

    Raises:
        InvalidRequestError: names the first unknown field and the nearest known one.
    """
    known = list(known)
    for key in fields:
        if key not in known:
            refuse_unsupported(key, where)
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequestError(f"{where}{key}: unknown field{hint} (valid: {', '.join(known)})")


def text_prompt(value: object, field: str = "prompt") -> str:
    """A prompt given as text.

    Raises:
        InvalidRequestError: it is no string.
    """
    if not isinstance(value, str):
        raise InvalidRequestError(f"{field}: got {type(value).__name__}, wants a string")
    return value


def token_prompt(value: object, field: str = "prompt_token_ids") -> list[int]:
    """A prompt given as token ids; the engine checks them against the vocabulary.

    Raises:
        InvalidRequestError: it is no list of integers, or an empty one.
    """
    if not isinstance(value, list) or any(isinstance(token, bool) or not isinstance(token, int) for token in value):
        raise InvalidRequestError(f"{field}: got {_brief(value)}, wants a list of token ids")
    if not value:
        raise InvalidRequestError(f"{field}: got an empty list, wants at least one token id")
    return value


def chat_messages(value: object, field: str = "messages") -> list[dict[str, str]]:
    """Messages for the chat template; content given in text parts is joined by line breaks.

    Returns:
        A list of ``{"role", "content"}``, both text.

    Raises:
        InvalidRequestError: names the message and what is wrong with it.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f'{field}: got {_brief(value)}, wants a non-empty list of {{"role", "content"}}')
    messages = []
    for index, message in enumerate(value):
        where = f"{field}[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(f'{where}: got {_brief(message)}, wants an object with "role" and "content"')
        check_fields(message, ("role", "content"), f"{where}.")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError(f'{where}.role: got {_brief(role)}, wants text such as "user"')
        messages.append({"role": role, "content": _content(message.get("content"), f"{where}.content")})
    return messages


def check_priority(value: object, policy: str) -> int:
    """A request's priority.

    Raises:
        InvalidRequestError: no integer, or one that the scheduling policy would ignore.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"priority: got {_brief(value)}, wants an integer (lower runs first)")
    if value and policy != "priority":
        raise InvalidRequestError(
            f"priority: got {value}, wants 0 unless engine.scheduling_policy is 'priority' (it is {policy!r})"
        )
    return value


def check_salt(value: object) -> str:
    """A request's cache salt.

    Raises:
        InvalidRequestError: it is no string.
    """
    if not isinstance(value, str):
        raise InvalidRequestError(f"cache_salt: got {_brief(value)}, wants a string")
    return value


def _content(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{where}: got {_brief(value)}, wants a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            got = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(
                f'{where}[{index}]: got {_brief(got)}, wants {{"type": "text", "text": ...}}: only text is supported'
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _brief(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
