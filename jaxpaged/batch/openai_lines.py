"""OpenAI batch lines: ``{custom_id, method, url, body}`` in, ``{id, custom_id, response, error}`` out.

A field of the body is applied, or accepted because its value asks for nothing (``presence_penalty: 0``, ``stop: null``),
or answered with an error naming it. ``user`` and ``metadata`` are labels and change nothing.

**Source**: OpenAI's batch and API reference (request and response objects of ``/v1/chat/completions`` and
``/v1/completions``); extra sampling fields as vLLM takes them.
"""

import dataclasses
import hashlib
import itertools
import re
from typing import Any

from jaxpaged.batch.config import JobConfig, build_params
from jaxpaged.batch.formats import Identity, ranked, rounded, usage_of
from jaxpaged.batch.items import BadLine, Item, with_seed
from jaxpaged.batch.prompts import chat_messages, check_fields, check_priority, check_salt, text_prompt, token_prompt
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import CompletionOutput, RequestOutput

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
LABELS = ("user", "metadata")
SHARED = ("temperature", "top_p", "n", "seed", "max_tokens", "top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos")
SHARED += ("skip_special_tokens", "best_of")
EXTRAS = ("priority", "cache_salt")
# Fields that are not supported, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([],),
    "stream": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "store": (False,),
}


@dataclasses.dataclass(frozen=True)
class OpenAIFormat:
    """OpenAI batch lines for the two text endpoints.

    Args:
        job: the job.
        created: what ``created`` of every response says, in Unix seconds; fixed, so that runs are comparable byte by byte.
    """

    job: JobConfig
    created: int
    wants_json: bool = True

    def parse(self, line: int, value: Any) -> Item | BadLine:
        """The line's request, or why there is none."""
        name = value.get("custom_id")
        if not isinstance(name, str) or not name:
            return BadLine(line, None, "invalid_request", f"custom_id: got {name!r}, wants a non-empty string")
        try:
            check_fields(value, ("custom_id", "method", "url", "body"))
            if value.get("method", "POST") != "POST":
                raise InvalidRequestError(f"method: got {value['method']!r}, wants 'POST'")
            url, body = value.get("url"), value.get("body")
            if url not in (CHAT_URL, COMPLETIONS_URL):
                raise InvalidRequestError(f"url: got {url!r}, wants {CHAT_URL!r} or {COMPLETIONS_URL!r}")
            if not isinstance(body, dict):
                raise InvalidRequestError(f"body: got {type(body).__name__}, wants an object")
        except InvalidRequestError as error:
            return BadLine(line, name, "invalid_request", str(error))
        try:
            return self._request(line, name, url, body)
        except InvalidRequestError as error:
            return BadLine(line, name, "invalid_request", str(error), is_body=True)

    def _request(self, line: int, name: str, url: str, body: dict[str, Any]) -> Item:
        given = {key: value for key, value in body.items() if value is not None}
        own = ("messages", "max_completion_tokens", "top_logprobs") if url == CHAT_URL else ("prompt",)
        check_fields(given, ("model", *own, "logprobs", *SHARED, *EXTRAS, *LABELS, *NEUTRAL))
        for key, harmless in NEUTRAL.items():
            if key in given and not any(_same(given[key], value) for value in harmless):
                wants = " or ".join(repr(value) for value in (*harmless, None))
                raise InvalidRequestError(f"{key}: got {given[key]!r}, which is not supported; leave it out (or {wants})")
        model = given.get("model", self.job.engine.model)
        if not isinstance(model, str):
            raise InvalidRequestError(f"model: got {model!r}, wants a string")
        fields = {"max_tokens": None if url == CHAT_URL else 16, **self.job.sampling}
        fields |= {key: given[key] for key in SHARED if key in given}
        if "max_tokens" in body:  # null runs to the model's limit
            fields["max_tokens"] = body["max_tokens"]
        if url == CHAT_URL:
            prompt: str | dict[str, Any] = {"messages": chat_messages(given.get("messages"))}
            fields |= _chat_fields(given)
        else:
            prompt = _completions_prompt(given.get("prompt"))
            fields |= {"logprobs": given["logprobs"]} if "logprobs" in given else {}
        return Item(
            line,
            name,
            prompt,
            with_seed(build_params(fields, where="body"), self.job.engine.seed, line),
            check_priority(given.get("priority", 0), self.job.engine.scheduling_policy),
            check_salt(given.get("cache_salt", "")),
            {"url": url, "model": model},
        )

    def result(self, item: Item, output: RequestOutput) -> dict[str, Any]:
        """A line with status 200 and the full response object."""
        chat = item.echo["url"] == CHAT_URL
        usage: dict[str, Any] = usage_of(output)
        if self.job.output.include_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": output.num_cached_tokens}
        request_id = _hash(item.id, item.line)
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": item.echo["model"],
            "choices": [_chat_choice(out) if chat else _text_choice(out) for out in output.outputs],
            "usage": usage,
        }
        response = {"status_code": 200, "request_id": request_id, "body": body}
        return {"id": f"batch_req_{request_id}", "custom_id": item.id, "response": response, "error": None}

    def error(self, bad: BadLine) -> dict[str, Any]:
        """Status 400 with an error body (500 for a failure while generating); no response where the line itself is wrong."""
        request_id = _hash(bad.id, bad.line)
        record: dict[str, Any] = {"id": f"batch_req_{request_id}", "custom_id": bad.id, "response": None, "error": None}
        if not bad.is_body:
            return record | {"error": {"code": bad.kind, "message": bad.message, "line": bad.line}}
        ours = bad.kind == "engine_error"
        param = None if ours else re.match(r"(?:body\.)?([A-Za-z_][\w.\[\]]*):", bad.message)
        fault = {
            "message": bad.message,
            "type": "server_error" if ours else "invalid_request_error",
            "param": param and param[1],
            "code": bad.kind,
            "line": bad.line,
        }
        return record | {"response": {"status_code": 500 if ours else 400, "request_id": request_id, "body": {"error": fault}}}

    def identity(self, record: dict[str, Any]) -> Identity:
        """Whose record it is."""
        if record["error"] is not None:
            return Identity(record["custom_id"], record["error"]["line"], record["error"]["code"])
        fault = record["response"]["body"].get("error")
        if fault is not None:
            return Identity(record["custom_id"], fault["line"], fault["code"])
        return Identity(record["custom_id"], None, None)


def _same(got: Any, wanted: Any) -> bool:
    return got == wanted and isinstance(got, bool) == isinstance(wanted, bool)


def _hash(name: str | int | None, line: int) -> str:
    return hashlib.sha256(f"{name}\n{line}".encode()).hexdigest()[:24]


def _chat_fields(given: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "max_completion_tokens" in given:
        if given.get("max_tokens", given["max_completion_tokens"]) != given["max_completion_tokens"]:
            raise InvalidRequestError("max_completion_tokens: differs from max_tokens; give one of them")
        fields["max_tokens"] = given["max_completion_tokens"]
    wanted = given.get("logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidRequestError(f"logprobs: got {wanted!r}, wants true or false (top_logprobs takes the number)")
    if "top_logprobs" in given and not wanted:
        raise InvalidRequestError("top_logprobs: wants logprobs: true beside it")
    if wanted is not None:
        fields["logprobs"] = given.get("top_logprobs", 0) if wanted else None
    return fields


def _completions_prompt(value: Any) -> str | dict[str, Any]:
    if isinstance(value, list) and any(isinstance(entry, (str, list)) for entry in value):
        if len(value) != 1:
            raise InvalidRequestError(f"prompt: got {len(value)} prompts, wants one; give each its own line")
        value = value[0]
    if isinstance(value, list):
        return {"prompt_token_ids": token_prompt(value, "prompt")}
    return text_prompt(value)


def _chat_choice(out: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if out.logprobs is not None:
        content = []
        for token, table in zip(out.token_ids, out.logprobs, strict=True):
            content.append({**_chat_logprob(table[token]), "top_logprobs": [_chat_logprob(lp) for _, lp in ranked(table)]})
        logprobs = {"content": content, "refusal": None}
    message = {"role": "assistant", "content": out.text, "refusal": None}
    return {"index": out.index, "message": message, "logprobs": logprobs, "finish_reason": out.finish_reason}


def _chat_logprob(entry: Any) -> dict[str, Any]:
    token = entry.decoded_token or ""
    return {"token": token, "logprob": rounded(entry.logprob), "bytes": list(token.encode())}


def _text_choice(out: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if out.logprobs is not None:
        tokens = [table[token].decoded_token or "" for token, table in zip(out.token_ids, out.logprobs, strict=True)]
        offsets = [0, *itertools.accumulate(map(len, tokens))][: len(tokens)]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [rounded(t[token].logprob) for token, t in zip(out.token_ids, out.logprobs, strict=True)],
            "top_logprobs": [
                {lp.decoded_token or "": rounded(lp.logprob) for _, lp in ranked(table)} for table in out.logprobs
            ],
            "text_offset": offsets,
        }
    return {"index": out.index, "text": out.text, "logprobs": logprobs, "finish_reason": out.finish_reason}
