"""The model alone, without engine or sampler: logits of every position, the tokens given in chunks over a page pool."""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.engine.load import load_model
from jaxpaged.model.attention import AttentionBackend
from jaxpaged.model.inputs import SamplingInputs, StepInputs
from jaxpaged.model.kv_pages import PlanShape, alloc, plan, pool_spec
from jaxpaged.model.layers import linear, rms_norm
from jaxpaged.weights.checkpoint import open_checkpoint

PAGE_SIZE = 4


class Forward:
    """A model read from a directory, run in one bucket of ``num_tokens`` tokens and one row.

    Args:
        directory: a Hugging Face directory.
        num_tokens: most tokens of a chunk.
        scan_layers: scan over stacked layers instead of unrolling them.
    """

    def __init__(self, directory: str | Path, num_tokens: int = 64, *, scan_layers: bool = False):
        checkpoint = open_checkpoint(str(directory))
        self.config = checkpoint.config
        self._model = load_model(checkpoint, "float32", scan_layers=scan_layers)
        self._pages = -(-num_tokens // PAGE_SIZE)
        self._shape = PlanShape(num_tokens, 1, self._pages)
        self._spec = pool_spec(self.config, num_pages=self._pages + 1, page_size=PAGE_SIZE, dtype="float32")
        self._run = jax.jit(self._logits, donate_argnums=1)

    def _logits(self, leaves, pool, inputs: StepInputs):
        model = self._model.merge(leaves)
        hidden, pool = model(inputs.token_ids, inputs, pool, AttentionBackend("xla"))
        hidden = rms_norm(hidden, model.norm[...], self.config.rms_norm_eps)
        return linear(hidden, model.head(), out_dtype=jnp.float32), pool

    def logits(self, token_ids: Sequence[int], chunks: Sequence[int] | None = None) -> np.ndarray:
        """Next-token logits after every position ``[len(token_ids), V]``; the tokens are run in ``chunks`` (lengths)."""
        pool, start, rows = alloc(self._spec), 0, []
        width = self._shape.num_tokens
        table = np.arange(self._pages, 0, -1, dtype=np.int32)[None]  # pages in reverse order
        for count in chunks or [len(token_ids)]:
            pad = functools.partial(np.pad, pad_width=(0, width - count))
            positions = np.arange(start, start + count, dtype=np.int32)
            lengths = None
            if self.config.rope.rope_type == "dynamic":  # all tokens are a prompt: rotated for its whole length
                lengths = np.full(width, len(token_ids), np.int32)
            inputs = StepInputs(
                token_ids=pad(np.asarray(token_ids[start : start + count], np.int32)),
                device_slot=np.full(width, -1, np.int32),
                positions=pad(positions),
                rope_lengths=lengths,
                plan=plan(
                    np.array([count]), np.array([start + count]), table, spec=self._spec, shape=self._shape,
                    sliding_window=self.config.sliding_window,
                ),
                sampling=_NO_SAMPLING,
            )  # fmt: skip
            logits, pool = self._run(self._model.leaves, pool, inputs)
            rows.append(np.asarray(logits)[:count])
            start += count
        return np.concatenate(rows)


_none = np.zeros(0, np.int32)
_NO_SAMPLING = SamplingInputs(*[_none] * 10)
