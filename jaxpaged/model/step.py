"""The one jitted step: tokens in, sampled tokens and the updated page pool out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxpaged.model.attention import AttentionBackend
from jaxpaged.model.inputs import StepInputs, StepOutputs, unpack
from jaxpaged.model.kv_pages import KVPool
from jaxpaged.model.layers import linear, rms_norm
from jaxpaged.model.llama import SplitModel
from jaxpaged.model.sampling import sample


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """What is static in a step, closed over by the jitted function.

    Attributes:
        model: definition and structure of the parameters.
        backend: which kernels run.
        valid_vocab: tokens the tokenizer knows; ids above are never sampled. None for all.
    """

    model: SplitModel
    backend: AttentionBackend
    valid_vocab: int | None = None

    def __call__(
        self, leaves: tuple[jax.Array, ...], pool: KVPool, last_tokens: jax.Array, inputs: StepInputs
    ) -> tuple[StepOutputs, KVPool, jax.Array]:
        """Runs one step.

        Args:
            leaves: the parameters.
            pool: the page pool (donated by the caller).
            last_tokens: int32 ``[most sample rows]`` what the previous step sampled, kept on the device.
            inputs: the step's inputs.

        Returns:
            ``(outputs, pool, last_tokens)``, the last two updated.
        """
        model = self.model.merge(leaves)
        fed_back = last_tokens.at[jnp.maximum(inputs.device_slot, 0)].get(mode="clip")
        token_ids = jnp.where(inputs.device_slot >= 0, fed_back, inputs.token_ids)
        hidden, pool = model(token_ids, inputs, pool, self.backend)
        rows = hidden.at[inputs.sampling.token_index].get(mode="clip")
        rows = rms_norm(rows, model.norm[...], model.config.rms_norm_eps)
        logits = linear(rows, model.head(), out_dtype=jnp.float32)
        outputs = sample(logits, inputs.sampling, valid_vocab=self.valid_vocab)
        last_tokens = last_tokens.at[: outputs.token_ids.shape[0]].set(outputs.token_ids)
        return outputs, pool, last_tokens


def packed_step(program: StepProgram, like: StepInputs):
    """A jittable step of one bucket that takes its inputs as one packed int32 vector (see ``inputs.pack``).

    Args:
        program: the static part.
        like: a ``StepInputs`` of ``ShapeDtypeStruct`` giving the bucket's shapes.

    Returns:
        ``f(leaves, pool, last_tokens, flat) -> (outputs, pool, last_tokens)``; donate arguments 1 and 2.
    """

    def execute_step(leaves, pool, last_tokens, flat):
        return program(leaves, pool, last_tokens, unpack(flat, like))

    return functools.wraps(program.__call__)(execute_step)
