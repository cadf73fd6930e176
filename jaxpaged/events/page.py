"""``jaxpaged events show LOG``: a log as one self-contained HTML page.

The page holds the events themselves, as compressed integers, and replays them in the browser; nothing is fetched. Every
string of the log travels inside a JSON block with ``<``, ``>`` and ``&`` escaped and is put on the page as text only.
"""

import array
import base64
import html
import importlib.resources
import json
import os
import sys
import zlib
from typing import Any

from jaxpaged.events.reader import LogViolation, read_events
from jaxpaged.events.replay import Replay

KIND_CODES = (
    "admit", "alloc", "share", "copy", "free", "evict", "swap_out", "swap_in", "offload", "restore", "preempt", "finish",
    "abort", "pin", "unpin", "step", "write",
)  # fmt: skip
"""Kinds by code; ``write`` is one entry of a step's ``writes``."""

SCRIPTS = ("model.js", "map.js", "curves.js", "panels.js", "main.js")


class _Columns:
    """One run as columns of 32-bit integers, one row an event; see ``assets/model.js`` for their meaning."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header
        self.columns = [array.array("i") for _ in range(6)]  # kind, reason, seq or request, logical, page, source or host
        self.steps = [array.array("i") for _ in range(4)]  # number, milliseconds / 10, running, waiting
        self.names: dict[str, int] = {}  # request ids, by index
        self.reasons: dict[str, int] = {"": 0}
        self.seqs: dict[int, int] = {}  # seq id -> index
        self.seq_request: list[int] = []
        self.problem = ""

    def add(self, event: dict[str, Any]) -> None:
        """Appends an event that the replay accepted."""
        kind = event["kind"]
        request = event.get("request")
        name = -1 if request is None else self.names.setdefault(request, len(self.names))
        seq = self._seq(event.get("seq"), name)
        who = name if kind in ("admit", "abort") else seq
        reason = self.reasons.setdefault(event.get("why") or "", len(self.reasons))
        if kind == "free" and event.get("cached"):
            reason |= 1 << 16
        if kind == "swap_out" and event.get("cached"):
            reason |= 1 << 16
        other = event.get("src", event.get("host", event.get("tokens", -1) if kind == "share" else -1))
        if kind == "step":
            for row_seq, position, tokens in event.get("writes") or ():
                self._row(16, 0, self._seq(row_seq, -1), position, tokens, -1)
            for column, value in zip(
                self.steps, (event["step"], event["t_us"] // 10_000, event["running"], event["waiting"]), strict=True
            ):
                column.append(value)
        self._row(KIND_CODES.index(kind), reason, who, event.get("logical", -1), event.get("page", -1), other)

    def _seq(self, seq: int | None, name: int) -> int:
        if seq is None:
            return -1
        index = self.seqs.setdefault(seq, len(self.seqs))
        if index == len(self.seq_request):
            self.seq_request.append(name)
        return index

    def _row(self, *values: int) -> None:
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)

    def to_json(self) -> dict[str, Any]:
        """The run as the page's script wants it."""
        return {
            "header": self.header,
            "problem": self.problem,
            "requests": list(self.names),
            "reasons": list(self.reasons),
            "seqs": list(self.seqs),
            "seqRequest": self.seq_request,
            "kinds": KIND_CODES,
            "events": [_pack(column) for column in self.columns],
            "steps": [_pack(column) for column in self.steps],
        }


def _pack(column: array.array) -> str:
    """Little-endian int32, zlib, base64."""
    if sys.byteorder == "big":
        column = array.array("i", column)
        column.byteswap()
    return base64.b64encode(zlib.compress(column.tobytes(), 6)).decode("ascii")


def build_page(path: str | os.PathLike[str]) -> str:
    """Draws a log as an HTML document.

    Args:
        path: a log written by ``EventLog``. Where it breaks a rule the page shows it up to there and says so.

    Returns:
        The document. It needs no network and no other file.

    Raises:
        LogViolation: not even the header can be read.
        OSError: the file cannot be read.
    """
    runs: list[_Columns] = []
    replay: Replay | None = None
    try:
        for line, event in read_events(path):
            if event.get("kind") == "torn":
                runs[-1].problem = f"Line {line} is torn: the run was cut short."
            elif replay is None or event.get("kind") == "header":
                replay = Replay(line, event)
                runs.append(_Columns(event))
            else:
                replay.apply(line, event)
                runs[-1].add(event)
    except LogViolation as violation:
        if not runs:
            raise
        runs[-1].problem = f"The log breaks a rule here and cannot be followed further: {violation}"
    if not runs:
        raise LogViolation(1, "header", "the log is empty")
    assets = importlib.resources.files("jaxpaged.events") / "assets"
    name = os.path.basename(os.fspath(path))
    data = json.dumps({"name": name, "runs": [run.to_json() for run in runs]}, separators=(",", ":"))
    for char in "<>&":
        data = data.replace(char, f"\\u{ord(char):04x}")
    parts = {
        "TITLE": html.escape(name),
        "STYLE": (assets / "page.css").read_text("utf-8"),
        "SCRIPT": "\n".join((assets / script).read_text("utf-8") for script in SCRIPTS),
        "DATA": data,
    }
    pieces = (assets / "page.html").read_text("utf-8").split("@@")  # text and names of parts in turn
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def show_main(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> int:
    """Writes a log as an HTML page.

    Args:
        path: a log written by ``EventLog``.
        out: file to write; None puts it beside the log, with ``.html`` added.

    Returns:
        Exit status: 0; 1 where the log's header is missing or unknown; 2 where a file cannot be read or written. A log that
        breaks a rule further down is shown up to there, and the page says so. Problems go to standard error.
    """
    target = os.fspath(out) if out is not None else os.fspath(path) + ".html"
    try:
        page = build_page(path)
        with open(target, "w", encoding="utf-8") as file:
            file.write(page)
    except LogViolation as violation:
        print(f"{os.fspath(path)}: {violation}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or target}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(target)
    return 0
