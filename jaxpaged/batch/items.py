"""One input line after parsing, and what can be wrong with one. Plain data."""

import dataclasses
import hashlib
from typing import Any

from jaxpaged.sampling_params import MAX_SEED, BeamSearchParams, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A line that asks for a generation.

    Attributes:
        line: its number in the file, from 1.
        id: the caller's id (``id`` or ``custom_id``), or ``line-N`` where the line gives none.
        prompt: what the engine takes: text, or a mapping with ``prompt_token_ids`` or ``messages``.
        params: the job's sampling parameters with the line's own laid over them; the seed is set.
        priority: lower runs first, under the ``priority`` policy.
        cache_salt: requests with different salts never share pages.
        echo: what the output record repeats of the line (such as ``url`` and ``model`` of an OpenAI line).
    """

    line: int
    id: str | int
    prompt: str | dict[str, Any]
    params: SamplingParams | BeamSearchParams
    priority: int = 0
    cache_salt: str = ""
    echo: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be served; it becomes an error record.

    Attributes:
        line: its number in the file, from 1.
        id: the caller's id where it could be read, else None.
        kind: a short word for counting: ``invalid_utf8``, ``invalid_json``, ``not_an_object``, ``duplicate_id``,
            ``invalid_request``, ``capacity``, ``engine_error``.
        message: what is wrong, what was got and what is wanted.
        is_body: whether the fault is in the body of a well-formed OpenAI line (answered with status 400).
    """

    line: int
    id: str | int | None
    kind: str
    message: str
    is_body: bool = False


def derive_seed(job_seed: int, line: int) -> int:
    """The seed of a line that gives none: a fixed function of the job's seed and the line's number.

    So a resumed job, where the line may be the first the engine sees, samples the same tokens.

    Args:
        job_seed: the engine's ``seed`` option.
        line: line number, from 1.

    Returns:
        An integer in [0, 2**63 - 1].
    """
    digest = hashlib.sha256(f"jaxpaged job seed {job_seed} line {line}".encode()).digest()
    return int.from_bytes(digest[:8], "big") & MAX_SEED


def with_seed(params: SamplingParams | BeamSearchParams, job_seed: int, line: int) -> SamplingParams | BeamSearchParams:
    """``params`` with a derived seed where none is given (beam search draws nothing and has none)."""
    if isinstance(params, BeamSearchParams) or params.seed is not None:
        return params
    return dataclasses.replace(params, seed=derive_seed(job_seed, line))
