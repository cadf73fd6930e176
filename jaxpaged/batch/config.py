"""What a job file says: model, engine, sampling, input, output. Strict, and the same for YAML, ``--set`` and flags.

Order of precedence: flags, then ``--set``, then the file, then defaults. Relative paths start at the current directory.
"""

import dataclasses
import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from jaxpaged.config import EngineConfig, from_mapping
from jaxpaged.errors import ConfigError, InvalidRequestError
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

INPUT_FORMATS = ("auto", "jsonl", "text", "openai")

# Options that change neither what is generated nor how a record is written: free to differ when a job is resumed. The input
# itself is compared by its content, and its format as it was decided.
UNTRACKED = frozenset(
    {
        "input.path",
        "input.format",
        "output.path",
        "output.plot",
        "engine.event_log",
        "engine.debug",
        "engine.compilation_cache_dir",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputConfig:
    """Where the prompts are.

    Args:
        path: the input file, UTF-8, one request a line; blank lines are skipped.
        format: "jsonl", "text" (a prompt a line), "openai" (batch lines), or "auto" (decided by the first line).
    """

    path: str
    format: str = "auto"

    def __post_init__(self) -> None:
        _path("input.path", self.path)
        if self.format not in INPUT_FORMATS:
            near = difflib.get_close_matches(str(self.format), INPUT_FORMATS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"input.format: got {self.format!r}, wants one of {', '.join(INPUT_FORMATS)}{hint}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Where the results go and what a record holds.

    Args:
        path: the output file (JSON Lines). ``<path>.manifest.json`` and ``<path>.pool.png`` lie beside it.
        include_prompt: repeat the prompt in each record (jsonl and text formats).
        include_cached_tokens: add ``cached_tokens`` to ``usage``. Off by default: how much of a prompt was found in the
            cache depends on what ran before it, so a resumed job would write other numbers than an uninterrupted one.
        plot: draw the pool's occupancy over time into ``<path>.pool.png``.
    """

    path: str
    include_prompt: bool = False
    include_cached_tokens: bool = False
    plot: bool = True

    def __post_init__(self) -> None:
        _path("output.path", self.path)
        for name in ("include_prompt", "include_cached_tokens", "plot"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"output.{name}: got {getattr(self, name)!r}, wants true or false")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A whole job.

    Args:
        engine: the engine's options, the model among them.
        sampling: sampling parameters every line starts from, validated; kept as a mapping because a line's own fields are
            laid over it. ``beam_width`` among them selects beam search.
        input: where the prompts are.
        output: where the results go.
    """

    engine: EngineConfig
    sampling: dict[str, Any]
    input: InputConfig
    output: OutputConfig

    def tracked(self) -> dict[str, Any]:
        """Every option that may change the output, by dotted name: what a resumed job must have in common with its start."""
        flat: dict[str, Any] = {f"sampling.{key}": value for key, value in self.sampling.items()}
        for section in ("engine", "input", "output"):
            flat |= {f"{section}.{key}": value for key, value in dataclasses.asdict(getattr(self, section)).items()}
        flat["model"] = flat.pop("engine.model")
        return {key: flat[key] for key in sorted(flat) if key not in UNTRACKED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _JobFile:
    """The file's top level, as written."""

    model: str
    input: dict[str, Any]
    output: dict[str, Any]
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)


def load_job(path: str | os.PathLike[str], overrides: dict[str, Any] | None = None) -> JobConfig:
    """Reads a job file.

    Args:
        path: the YAML file.
        overrides: dotted name -> value, laid over the file (``{"engine.page_size": 32}``).

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown or a value is wrong; the message names it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"--config: {os.fspath(path)!r} does not exist; wants a job file such as configs/demo.yaml"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: cannot read {os.fspath(path)!r}: {error}") from error
    try:
        raw = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or number that is none
        raise ConfigError(f"--config: {os.fspath(path)} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"--config: {os.fspath(path)} holds {type(raw).__name__}, wants a mapping with model, input, output ..."
        )
    return job_from_mapping(raw, overrides)


def job_from_mapping(raw: dict[str, Any], overrides: dict[str, Any] | None = None) -> JobConfig:
    """Builds a job from what a YAML file holds.

    Args:
        raw: the mapping, sections as mappings.
        overrides: dotted name -> value, laid over it.

    Raises:
        ConfigError: an unknown key (with its path and the nearest valid name), a missing one, or a wrong value.
    """
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for dotted, value in (overrides or {}).items():
        section, dot, key = dotted.partition(".")
        if not dot:
            merged[section] = value
            continue
        target = merged.setdefault(section, {})
        if target is None:
            target = merged[section] = {}
        if not isinstance(target, dict):
            raise ConfigError(f"--set {dotted}: {section} is {target!r}, not a section; wants model=... or SECTION.KEY=VALUE")
        target[key] = value
    for section in ("engine", "sampling"):
        if section in merged and merged[section] is None:
            merged[section] = {}
    file = from_mapping(_JobFile, merged, where="job")
    for section in ("engine", "sampling", "input", "output"):
        if not isinstance(getattr(file, section), dict):
            raise ConfigError(f"{section}: got {type(getattr(file, section)).__name__}, wants a mapping")
    if "model" in file.engine:
        raise ConfigError("engine.model: the model is named at the top level; write model: ... there")
    check_sampling(file.sampling)
    return JobConfig(
        engine=EngineConfig.from_dict({"model": file.model, **file.engine}),
        sampling=dict(file.sampling),
        input=from_mapping(InputConfig, file.input, where="input"),
        output=from_mapping(OutputConfig, file.output, where="output"),
    )


def build_params(fields: dict[str, Any], *, where: str = "sampling") -> SamplingParams | BeamSearchParams:
    """Sampling parameters from a mapping; ``beam_width`` selects beam search.

    Raises:
        InvalidRequestError: an unknown field (with the nearest valid name) or a wrong value.
    """
    if fields.get("beam_width") is None:
        return SamplingParams.from_dict({key: value for key, value in fields.items() if key != "beam_width"}, where=where)
    known = [f.name for f in dataclasses.fields(BeamSearchParams)]
    for key in fields:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequestError(f"{where}.{key}: not a parameter of beam search{hint} (valid: {', '.join(known)})")
    return BeamSearchParams(**fields)


def lay_over(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A line's own parameters over the job's.

    A line that asks for beam search (or, with a null ``beam_width``, for sampling where the job says beams) takes of the job's
    parameters those that mean something to it.
    """
    if "beam_width" in own and (own["beam_width"] is None) != (defaults.get("beam_width") is None):
        kind = SamplingParams if own["beam_width"] is None else BeamSearchParams
        known = {f.name for f in dataclasses.fields(kind)}
        defaults = {key: value for key, value in defaults.items() if key in known}
    return {**defaults, **own}


def check_sampling(fields: dict[str, Any]) -> None:
    """Checks a job's default sampling parameters.

    Raises:
        ConfigError: an unknown field or a wrong value.
    """
    try:
        build_params(fields)
    except InvalidRequestError as error:
        message = str(error)
        raise ConfigError(message if message.startswith("sampling.") else f"sampling.{message}") from error


def parse_override(text: str) -> tuple[str, Any]:
    """Splits one ``--set`` argument, ``engine.page_size=32``, into its dotted name and its YAML value.

    Raises:
        ConfigError: there is no ``=``, or the value is not YAML.
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", name):
        raise ConfigError(
            f"--set: got {text!r}, wants KEY=VALUE with KEY such as model, engine.page_size or sampling.temperature"
        )
    try:
        return name, yaml.load(value, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {name}: {value!r} is not a YAML value: {' '.join(str(error).split())}") from error


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=list)


def _path(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}: got {value!r}, wants a file path")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice and reads 1e-5 as a number (YAML 1.1 takes it for text)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds one mapping, refusing a repeated key."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
