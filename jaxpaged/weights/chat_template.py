"""Chat templates: Jinja in a sandbox, with the helpers that templates on the Hugging Face hub expect.

Source: "Chat templates" in the ``transformers`` documentation (the functions and filters a template may use).
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxpaged.errors import ConfigError, InvalidRequestError


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the model wrote, for training; here its body alone matters."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """Render a conversation.

    Args:
        template: Jinja source.
        messages: each with ``role`` and ``content`` (text, or a list of ``{"type": "text", "text": ...}`` parts).
        add_generation_prompt: end with the opening of the assistant's turn.
        variables: more names the template may read (``bos_token``, ``tools``, ...).

    Returns:
        The prompt text.

    Raises:
        ConfigError: the template itself is broken.
        InvalidRequestError: a message is malformed, or the template refuses the conversation.
    """
    cleaned = [_message(i, message) for i, message in enumerate(messages)]
    if not cleaned:
        raise InvalidRequestError("messages is empty; give at least one message with a role and a content")
    names = {"tools": None, "documents": None} | variables
    try:
        compiled = _compile(template)
        return compiled.render(messages=cleaned, add_generation_prompt=add_generation_prompt, **names)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is broken at line {error.lineno}: {error.message}") from error
    except _Refused as error:
        raise InvalidRequestError(f"the chat template refuses these messages: {error}") from error
    except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise InvalidRequestError(f"the chat template cannot render these messages: {error}") from error


class _Refused(Exception):
    pass


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{index}] must be an object with a string role, got {message!r}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InvalidRequestError(f"messages[{index}].content holds {part!r}; only text parts are supported")
        content = "\n".join(part["text"] for part in content)  # as vLLM joins them
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise InvalidRequestError(f"messages[{index}].content must be text or a list of text parts, got {content!r}")
    return dict(message) | {"content": content}


def _raise(message: str) -> None:
    raise _Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)
