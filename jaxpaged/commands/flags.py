"""Command-line flags made from config dataclasses: one flag a field, its help taken from the class's docstring."""

import argparse
import dataclasses
import inspect
import re
from typing import Any

from jaxpaged.config import DTYPES, IMPLEMENTATIONS, KV_CACHE_DTYPES, PREEMPTION_MODES, EngineConfig, field_types
from jaxpaged.sampling_params import SamplingParams

CHOICES = {
    "dtype": DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "implementation": IMPLEMENTATIONS,
    "preemption_mode": PREEMPTION_MODES,
    "scheduling_policy": ("fcfs", "priority"),
}
ENGINE, SAMPLING = "engine.", "sampling."
DEFAULT_MAX_TOKENS = 128
"""Of a prompt given on the command line, where 16 would look cut off."""
NOTES = {"sampling.max_tokens": f", {DEFAULT_MAX_TOKENS} with --prompt"}
# Both classes have a seed; --seed is the engine's, which seeds every request that does not name its own.
SKIPPED = {"engine.model", "sampling.seed"}


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> its description, from the ``Args:`` section of the class's docstring."""
    doc = inspect.getdoc(cls) or ""
    section = doc.partition("Args:\n")[2].partition("\n\n")[0]
    docs: dict[str, str] = {}
    for match in re.finditer(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE):
        docs[match[1]] = " ".join(match[2].replace("``", "").split())
    return docs


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of ``EngineConfig``."""
    _add(parser.add_argument_group("engine options (override the file's engine section)"), EngineConfig, ENGINE)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of ``SamplingParams`` but the seed."""
    _add(parser.add_argument_group("sampling options (override the file's sampling section)"), SamplingParams, SAMPLING)


def given_flags(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The flags that were given, by field name.

    Args:
        args: parsed arguments.
        prefix: ``ENGINE`` or ``SAMPLING``.
    """
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


def _add(group: argparse._ArgumentGroup, cls: type, prefix: str) -> None:
    docs, types = field_docs(cls), field_types(cls)
    for field in dataclasses.fields(cls):
        if prefix + field.name in SKIPPED:
            continue
        flag, plain = "--" + field.name.replace("_", "-"), types[field.name]
        default = "" if field.default is dataclasses.MISSING else f" (default: {_show(field.default)})"
        options: dict[str, Any] = {
            "dest": prefix + field.name,
            "default": argparse.SUPPRESS,
            "help": (docs.get(field.name, "").rstrip(".") + default + NOTES.get(prefix + field.name, "")).replace("%", "%%"),
        }
        if plain is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif field.name == "stop_token_ids":
            group.add_argument(flag, type=int, nargs="+", metavar="ID", **options)
        elif field.name in CHOICES:
            group.add_argument(flag, choices=CHOICES[field.name], **options)
        else:
            group.add_argument(flag, type=plain, metavar={int: "N", float: "X"}.get(plain, "TEXT"), **options)


def _show(value: object) -> str:
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
