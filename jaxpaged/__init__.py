"""jaxpaged: PagedAttention inference for the Llama family in JAX and Pallas, on TPU, GPU and CPU."""

from typing import TYPE_CHECKING, Any

from jaxpaged.config import EngineConfig
from jaxpaged.errors import CapacityError, CheckpointError, ConfigError, InvalidRequestError, InvariantError, JaxPagedError
from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from jaxpaged.llm import LLM

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "InvalidRequestError",
    "InvariantError",
    "JaxPagedError",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    """``LLM`` loads JAX, which takes seconds; configs, errors and the command line's help do without."""
    if name == "LLM":
        from jaxpaged.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
