"""What one step takes and gives: frozen pytrees, and the packing that turns many small host arrays into one transfer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.model.kv_pages import AttentionPlan, PlanShape

Array = np.ndarray | jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingInputs:
    """Per sample row (R of them; unused rows are zeros).

    Attributes:
        token_index: int32 ``[R]`` flat index of the query token whose logits are sampled.
        seed: uint32 ``[R, 2]`` high and low word of the request's seed.
        sample: int32 ``[R]`` sample index within the request.
        position: int32 ``[R]`` position the sampled token will have.
        temperature, top_p, min_p: float32 ``[R]``; temperature 0 is greedy.
        top_k: int32 ``[R]``; 0 keeps all.
        banned: int32 ``[R, W]`` token ids that must not be sampled (EOS and stop ids before ``min_tokens``); -1 for none.
        flags: int32 ``[4]``: any row samples; any row filters by top-k or top-p; any row wants the top log-probabilities; any
            row wants the log-probability of its token.
    """

    token_index: Array
    seed: Array
    sample: Array
    position: Array
    temperature: Array
    top_p: Array
    min_p: Array
    top_k: Array
    banned: Array
    flags: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """One step's inputs.

    Attributes:
        token_ids: int32 ``[T]``; ignored where ``device_slot`` is set.
        device_slot: int32 ``[T]`` sample row of the previous step whose token this is, or -1.
        positions: int32 ``[T]``.
        rope_lengths: int32 ``[T]`` (dynamic RoPE only, see ``rope.rope_tables``), else None.
        plan: what the attention kernels share.
        sampling: what is sampled from which token.
    """

    token_ids: Array
    device_slot: Array
    positions: Array
    rope_lengths: Array | None
    plan: AttentionPlan
    sampling: SamplingInputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """One step's results.

    Attributes:
        token_ids: int32 ``[R]`` sampled tokens.
        logprobs: float32 ``[R]`` log-softmax of the raw logits at the sampled tokens; zeros unless a row asked.
        top_ids, top_logprobs: ``[R, top]``, best first; zeros unless a row asked.
        finite: bool ``[R]``, False where a row's logits were not finite.
    """

    token_ids: Array
    logprobs: Array
    top_ids: Array
    top_logprobs: Array
    finite: Array


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The bucket of a step: every static size.

    Attributes:
        plan: tokens, rows and pages.
        num_samples: sample rows (R).
    """

    plan: PlanShape
    num_samples: int

    def __str__(self) -> str:
        kind = "decode" if self.plan.decode_only else "mixed"
        return f"{kind}[T={self.plan.num_tokens}, S={self.plan.num_seqs}, P={self.plan.max_pages}, R={self.num_samples}]"


def pack(tree) -> np.ndarray:
    """Flattens a pytree of 4-byte numpy arrays into one int32 vector, so that a step costs one host-to-device transfer."""
    return np.concatenate([np.ravel(leaf).view(np.int32) for leaf in jax.tree.leaves(tree)])


def unpack(flat: jax.Array, like):
    """The inverse of ``pack`` inside jit.

    Args:
        flat: int32 vector.
        like: a pytree of arrays or ``ShapeDtypeStruct`` with the same structure, shapes and dtypes.
    """
    leaves, treedef = jax.tree.flatten(like)
    out, at = [], 0
    for leaf in leaves:
        size = int(np.prod(leaf.shape))
        part = flat[at : at + size].reshape(leaf.shape)
        out.append(part if leaf.dtype == jnp.int32 else jax.lax.bitcast_convert_type(part, leaf.dtype))
        at += size
    return jax.tree.unflatten(treedef, out)
