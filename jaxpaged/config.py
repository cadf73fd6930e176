"""Options of the engine and of its parts. Frozen, strict, and independent of JAX.

``EngineConfig`` is what a user writes (keyword arguments of ``LLM``, the ``engine:`` section of a job, flags). From it and
the model each part gets its own small config, so that no part sees options that are not its business.
"""

import dataclasses
import difflib
import types
import typing
from typing import Any, Literal, TypeVar

from jaxpaged.errors import ConfigError

T = TypeVar("T")

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2")
IMPLEMENTATIONS = ("auto", "triton", "mosaic_tpu", "xla", "reference")
PREEMPTION_MODES = ("auto", "recompute", "swap")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name}: got {value!r}, wants one of {', '.join(choices)}{hint}")


def _at_least(name: str, value: object, low: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}: got {value!r}, wants an integer >= {low}{' or null' if optional else ''}")
    if value >= 2**31 and name != "seed":
        raise ConfigError(f"{name}: got {value}, wants an integer from {low} to {2**31 - 1}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know; everything in tokens, pages and sequences.

    Args:
        page_size: tokens a page holds.
        num_pages: pages in the pool, the scratch page 0 included (so ``num_pages - 1`` can be owned).
        num_host_pages: pages of host memory for swapping and offloading; 0 for none.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most query tokens in one step.
        max_model_len: most tokens of one sequence, prompt and output together.
        enable_prefix_caching: whether freed full pages stay findable.
        policy: "fcfs" or "priority" (lower ``Request.priority`` first, then arrival).
        preemption_mode: "recompute", "swap", or "auto" (recompute for single sequences, swap for groups; as in the paper).
        offload_cached_pages: keep evicted cached pages in host memory and bring them back on a hit.
        sliding_window: tokens a position can look back on, itself included; None for full attention.
        kv_dtype: part of every prefix key: pages of different formats never match.
    """

    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_host_pages: int = 0
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    offload_cached_pages: bool = False
    sliding_window: int | None = None
    kv_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, low in (
            ("page_size", 1),
            ("num_pages", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 1),
        ):
            _at_least(name, getattr(self, name), low)
        _at_least("num_host_pages", self.num_host_pages, 0)
        _at_least("sliding_window", self.sliding_window, 1, optional=True)
        _choice("policy", self.policy, ("fcfs", "priority"))
        _choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of the engine. Names follow vLLM where it has one.

    Args:
        model: a Hugging Face directory, a ``.gguf`` file, an Orbax checkpoint directory, or a hub id.
        tokenizer: another directory or hub id for the tokenizer; None takes the model's own.
        revision: branch, tag or commit of a hub id.
        dtype: of weights and activations. "auto": the checkpoint's own on TPU and GPU (bfloat16 for quantised GGUF);
            on CPU bfloat16 where the processor multiplies it natively (AMX or AVX512-BF16), else float32.
        kv_cache_dtype: of the page pool. "auto": ``dtype``. "fp8" is "fp8_e4m3". 8-bit pools keep one float32 scale per
            token and KV head.
        page_size: tokens a page holds; None lets the platform choose (16 on CPU and GPU; 16 to 128 on TPU).
        num_pages: pages sequences may own; None sizes the pool by ``memory_fraction``, in coarse steps.
        memory_fraction: share of the device's memory to use for weights, temporaries and pool together, in (0, 1]; on CPU
            the share of the memory free after loading the weights that the pool may take. Default 0.9, on CPU 0.3.
        max_model_len: most tokens of one sequence; None takes the model's own limit.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: token budget of one step; longer prompts are computed in chunks.
        enable_prefix_caching: reuse the pages of equal prompt beginnings.
        seed: of everything random that a request does not seed itself.
        implementation: attention kernels: "auto" picks by platform; an explicit one never falls back.
        scheduling_policy: "fcfs" or "priority".
        preemption_mode: "auto", "recompute" or "swap".
        swap_space: GiB of host memory for swapped-out and offloaded pages; 0 for none.
        offload_cached_pages: move cached pages to ``swap_space`` before they are lost.
        async_scheduling: schedule the next step while the device runs the current one. None: on TPU and GPU yes; on CPU no,
            where the host's work would take a core from the model's.
        event_log: path of the JSONL page-event log; None writes none.
        debug: poison freed pages with NaN and check every invariant after each step (slow).
        compilation_cache_dir: of the persistent compilation cache; None takes JAX's own setting or
            ``~/.cache/jaxpaged/xla``; "" turns it off.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    page_size: int | None = None
    num_pages: int | None = None
    memory_fraction: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    seed: int = 0
    implementation: str = "auto"
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "auto"
    swap_space: float = 0.0
    offload_cached_pages: bool = False
    async_scheduling: bool | None = None
    event_log: str | None = None
    debug: bool = False
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model: got {self.model!r}, wants a directory, a .gguf file, an Orbax checkpoint or a hub id")
        for name in ("tokenizer", "revision", "event_log", "compilation_cache_dir"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name}: got {value!r}, wants a text or null")
        _choice("dtype", self.dtype, DTYPES)
        _choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _choice("implementation", self.implementation, IMPLEMENTATIONS)
        _choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        for name in ("page_size", "num_pages", "max_model_len"):
            _at_least(name, getattr(self, name), 1, optional=True)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _at_least(name, getattr(self, name), 1)
        _at_least("seed", self.seed, 0)
        fraction = self.memory_fraction
        if fraction is not None and (
            isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1
        ):
            raise ConfigError(f"memory_fraction: got {fraction!r}, wants a number in (0, 1]")
        if isinstance(self.swap_space, bool) or not isinstance(self.swap_space, (int, float)) or not 0 <= self.swap_space < 1e6:
            raise ConfigError(f"swap_space: got {self.swap_space!r}, wants GiB >= 0")
        if self.async_scheduling not in (None, True, False):
            raise ConfigError(f"async_scheduling: got {self.async_scheduling!r}, wants true, false or null")
        for name in ("enable_prefix_caching", "offload_cached_pages", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: got {getattr(self, name)!r}, wants true or false")
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ConfigError("preemption_mode: 'swap' wants swap_space > 0 (GiB of host memory)")
        if self.offload_cached_pages and (self.swap_space == 0 or not self.enable_prefix_caching):
            raise ConfigError("offload_cached_pages: wants swap_space > 0 and enable_prefix_caching")

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, where: str = "engine") -> "EngineConfig":
        """Builds from a mapping (YAML section, keyword arguments, flags).

        Raises:
            ConfigError: an unknown key (with its path and the nearest valid name) or a value out of range.
        """
        return from_mapping(cls, fields, where=where)


def from_mapping(cls: type[T], fields: dict[str, Any], *, where: str) -> T:
    """Builds dataclass ``cls`` from a mapping, strictly.

    Raises:
        ConfigError: ``fields`` is no mapping, has a key that is no field (its path and the nearest valid name are given),
            or lacks a required one.
    """
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: got {type(fields).__name__}, wants a mapping")
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in fields:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}.{key}: unknown key{hint} (valid: {', '.join(known)})")
    missing = [
        n
        for n, f in known.items()
        if n not in fields and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    return cls(**fields)


def field_types(cls: type) -> dict[str, type]:
    """Maps each field of a config dataclass to its plain type (``int | None`` -> ``int``), for command-line flags."""

    def plain(hint):
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            return next(arg for arg in typing.get_args(hint) if arg is not type(None))
        return hint

    return {name: plain(hint) for name, hint in typing.get_type_hints(cls).items()}
