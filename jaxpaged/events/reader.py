"""Reads a page-event log line by line, telling torn last lines from damaged ones."""

import json
import os
from collections.abc import Iterator
from typing import Any

from jaxpaged.errors import InvariantError


class LogViolation(InvariantError):
    """A log breaks a rule.

    Attributes:
        line: number of the offending line, from 1.
        rule: short name of the rule (``docs/events.md`` lists them).
        detail: what was found and what the rule wants.
    """

    def __init__(self, line: int, rule: str, detail: str) -> None:
        super().__init__(f"line {line}: {rule}: {detail}")
        self.line, self.rule, self.detail = line, rule, detail


def read_events(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields ``(line number, event)`` for every line of a log.

    A crash can cut the line being written. Such a line is tolerated where it is the file's last, or where the next run's
    header follows it; it is yielded as ``{"kind": "torn"}``.

    Args:
        path: a log written by ``EventLog``.

    Raises:
        LogViolation: rule "json": a line is damaged elsewhere, or is no JSON object.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        held: tuple[int, str] | None = None  # a damaged line, until the next line tells whether it may be
        for number, line in enumerate(file, 1):
            event, problem = _parse(line)
            if held is not None:
                if event.get("kind") != "header":
                    raise LogViolation(held[0], "json", held[1])
                yield held[0], {"kind": "torn"}
                held = None
            if problem:
                held = (number, problem)
            else:
                yield number, event
        if held is not None:
            if line.endswith(b"\n"):
                raise LogViolation(held[0], "json", held[1])
            yield held[0], {"kind": "torn"}


def _parse(line: bytes) -> tuple[dict[str, Any], str]:
    """The event of a line, or what is wrong with it."""
    if not line.endswith(b"\n"):
        return {}, "the line has no end"
    try:
        event = json.loads(line)
    except ValueError as error:
        return {}, f"not JSON ({error})"
    if not isinstance(event, dict):
        return {}, f"got {type(event).__name__}, wants an object"
    return event, ""
