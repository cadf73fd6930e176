"""jaxpaged: PagedAttention inference for the Llama family in JAX and Pallas, on TPU, GPU and CPU."""

from jaxpaged.config import EngineConfig
from jaxpaged.errors import CapacityError, CheckpointError, ConfigError, InvalidRequestError, InvariantError, JaxPagedError
from jaxpaged.llm import LLM
from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

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
