"""The jsonl and text formats: a line to an ``Item``, a result to an output record.

Every format offers the same four functions, so that the job does not know which one it serves: ``parse`` a line,
``result`` and ``error`` records, and ``identity`` of a record already written.
"""

import dataclasses
from typing import Any, Protocol

from jaxpaged.batch.config import JobConfig, build_params, lay_over
from jaxpaged.batch.items import BadLine, Item, with_seed
from jaxpaged.batch.prompts import chat_messages, check_fields, check_priority, check_salt, text_prompt, token_prompt
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
SAMPLING_FIELDS = tuple(
    dict.fromkeys([f.name for f in dataclasses.fields(SamplingParams)] + [f.name for f in dataclasses.fields(BeamSearchParams)])
)
LINE_FIELDS = ("id", *PROMPT_FIELDS, "priority", "cache_salt", *SAMPLING_FIELDS)
LOGPROB_DIGITS = 6
LOWEST_LOGPROB = -9999.0


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Whose record it is.

    Attributes:
        id: the caller's id; None in the record of a line whose id could not be read.
        line: the line number, where the record tells it.
        error_kind: None for a result.
    """

    id: str | int | None
    line: int | None
    error_kind: str | None


class LineFormat(Protocol):
    """What the job asks of an input format."""

    def parse(self, line: int, value: Any) -> Item | BadLine:
        """The line's request.

        Args:
            line: line number, from 1.
            value: the decoded JSON object, or the text of the line where ``wants_json`` is false.
        """
        ...

    def result(self, item: Item, output: RequestOutput) -> dict[str, Any]:
        """The output record of a finished request."""
        ...

    def error(self, bad: BadLine) -> dict[str, Any]:
        """The output record of a line that cannot be served."""
        ...

    def identity(self, record: dict[str, Any]) -> Identity:
        """Whose record it is; raises ``KeyError`` or ``TypeError`` where it is no record of this format."""
        ...

    @property
    def wants_json(self) -> bool:
        """Whether lines are JSON objects."""
        ...


@dataclasses.dataclass(frozen=True)
class JsonlFormat:
    """Lines ``{"id", "prompt" | "messages" | "prompt_token_ids", ...sampling overrides, "priority", "cache_salt"}``.

    With ``wants_json`` false the same records for lines that are prompts themselves.
    """

    job: JobConfig
    wants_json: bool = True

    def parse(self, line: int, value: Any) -> Item | BadLine:
        """The line's request, or why there is none."""
        fields = value if self.wants_json else {"prompt": value}
        name = line_id(fields.get("id"), line)
        if isinstance(name, BadLine):
            return name
        try:
            check_fields(fields, LINE_FIELDS)
            prompt = _prompt(fields)
            overrides = {key: fields[key] for key in SAMPLING_FIELDS if key in fields}
            params = build_params(lay_over(self.job.sampling, overrides))
            priority = check_priority(fields.get("priority", 0), self.job.engine.scheduling_policy)
            salt = check_salt(fields.get("cache_salt", ""))
        except InvalidRequestError as error:
            return BadLine(line, name, "invalid_request", str(error))
        echo = {key: fields[key] for key in PROMPT_FIELDS if key in fields} if self.job.output.include_prompt else {}
        return Item(line, name, prompt, with_seed(params, self.job.engine.seed, line), priority, salt, echo)

    def result(self, item: Item, output: RequestOutput) -> dict[str, Any]:
        """``{"id", "prompt"?, "outputs": [...], "usage"}``."""
        usage = usage_of(output)
        if self.job.output.include_cached_tokens:
            usage["cached_tokens"] = output.num_cached_tokens
        return {
            "id": item.id,
            **item.echo,
            "outputs": [_completion(out, item.params) for out in output.outputs],
            "usage": usage,
        }

    def error(self, bad: BadLine) -> dict[str, Any]:
        """``{"id", "error": {"type", "message", "line"}}``."""
        return {"id": bad.id, "error": {"type": bad.kind, "message": bad.message, "line": bad.line}}

    def identity(self, record: dict[str, Any]) -> Identity:
        """Whose record it is."""
        if "error" in record:
            return Identity(record["id"], record["error"]["line"], record["error"]["type"])
        if "outputs" not in record:
            raise KeyError("outputs")
        return Identity(record["id"], None, None)


def line_id(value: object, line: int) -> str | int | BadLine:
    """The caller's id, ``line-N`` where it is missing or null."""
    if value is None:
        return f"line-{line}"
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        return BadLine(line, None, "invalid_request", f"id: got {value!r}, wants a non-empty string or an integer")
    return value


def usage_of(output: RequestOutput) -> dict[str, int]:
    """Token counts in OpenAI's words; a prompt shared by several samples counts once."""
    prompt, completion = len(output.prompt_token_ids), sum(len(out.token_ids) for out in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def rounded(logprob: float) -> float:
    """A log-probability as records hold it: six decimals, and -9999 for an impossible token (JSON has no infinity)."""
    value = float(logprob)
    return round(value, LOGPROB_DIGITS) if value > LOWEST_LOGPROB else LOWEST_LOGPROB


def _prompt(fields: dict[str, Any]) -> str | dict[str, Any]:
    given = [name for name in PROMPT_FIELDS if name in fields]
    if len(given) != 1:
        raise InvalidRequestError(
            f"prompt: got {' and '.join(given) or 'none'}, wants exactly one of {', '.join(PROMPT_FIELDS)}"
        )
    value = fields[given[0]]
    if given[0] == "prompt":
        return text_prompt(value)
    if given[0] == "messages":
        return {"messages": chat_messages(value)}
    return {"prompt_token_ids": token_prompt(value)}


def _completion(out: CompletionOutput, params: SamplingParams | BeamSearchParams) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": out.index,
        "text": out.text,
        "token_ids": [int(token) for token in out.token_ids],
        "finish_reason": out.finish_reason,
    }
    if out.stop_reason is not None:
        record["stop_reason"] = out.stop_reason
    if isinstance(params, BeamSearchParams) and out.cumulative_logprob is not None:
        record["cumulative_logprob"] = rounded(out.cumulative_logprob)
    if out.logprobs is not None:
        record["logprobs"] = [_logprob(token, table) for token, table in zip(out.token_ids, out.logprobs, strict=True)]
    return record


def _logprob(token: int, table: dict[int, Any]) -> dict[str, Any]:
    entry = table[token]
    return {
        "token_id": int(token),
        "token": entry.decoded_token,
        "logprob": rounded(entry.logprob),
        "top": [
            {"token_id": int(other), "token": lp.decoded_token, "logprob": rounded(lp.logprob)} for other, lp in ranked(table)
        ],
    }


def ranked(table: dict[int, Any]) -> list[tuple[int, Any]]:
    """The most likely tokens of one position, best first (entries without a rank were not asked for)."""
    return sorted(((token, lp) for token, lp in table.items() if lp.rank is not None), key=lambda pair: (pair[1].rank, pair[0]))
