"""From logits to tokens, per row and independent of every other row.

The noise of a token is a function of (seed, sample index, position) alone: ``jax.random.categorical``'s Gumbel noise under a
key folded from the three. Filters find their threshold by bisecting over float bit patterns, which is exact, needs no sort,
and keeps all tokens that tie with the last one kept.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.model.inputs import SamplingInputs, StepOutputs

MAX_TOP = 64
ARGMAX_BLOCK = 512
NEG_INF = float("-inf")


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Maps float32 to uint32 so that the order is kept (negative numbers mirrored, then the sign bit flipped)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(keys: jax.Array, reached) -> jax.Array:
    """Largest uint32 ``t [R]`` for which ``reached(keys >= t)`` holds; ``reached`` must be true for ``t = 0``."""

    def body(i, threshold):
        trial = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(reached(keys >= trial[:, None]), trial, threshold)

    return lax.fori_loop(0, 32, body, jnp.zeros(keys.shape[0], jnp.uint32))


def filter_logits(logits: jax.Array, s: SamplingInputs) -> jax.Array:
    """Sets logits outside top-k, then outside top-p of what is left, to -inf.

    Args:
        logits: float32 ``[R, V]``, already divided by the temperature.
        s: ``top_k`` (0 keeps all) and ``top_p`` (1 keeps all).

    Source: top-k Fan et al. 2018; nucleus Holtzman et al. 2019; order as in vLLM and ``transformers``.
    """
    keys = _ordered_bits(logits)
    k = jnp.where(s.top_k > 0, jnp.minimum(s.top_k, logits.shape[1]), logits.shape[1])
    limit = _largest_threshold(keys, lambda kept: kept.sum(-1) >= k)
    logits = jnp.where(keys >= limit[:, None], logits, NEG_INF)
    probs = jax.nn.softmax(logits, axis=-1)
    limit = _largest_threshold(keys, lambda kept: jnp.where(kept, probs, 0.0).sum(-1) >= s.top_p)
    limit = jnp.minimum(limit, keys.max(-1))  # a top_p that float32 rounds to zero is reached by the empty set
    return jnp.where((keys >= limit[:, None]) | (s.top_p >= 1.0)[:, None], logits, NEG_INF)


def _gumbel(s: SamplingInputs, vocab: int) -> jax.Array:
    def row(seed, sample, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, sample), position), (vocab,), jnp.float32)

    return jax.vmap(row)(s.seed, s.sample, s.position)


def first_argmax(x: jax.Array) -> jax.Array:
    """The first index of each row's largest value, int32 ``[R]``, for ``x [R, V]``; of equal values the first, as ``argmax``.

    Looks for the largest block of values first: a plain maximum is vectorised on every backend, an index beside it is not.
    """
    rows, vocab = x.shape
    block = math.gcd(vocab, ARGMAX_BLOCK)
    if block < 32:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    blocks = x.reshape(rows, vocab // block, block)
    which = jnp.argmax(blocks.max(-1), axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, which[:, None, None], axis=1)[:, 0]
    return which * block + jnp.argmax(inside, axis=-1).astype(jnp.int32)


def sample(logits: jax.Array, s: SamplingInputs, *, valid_vocab: int | None = None) -> StepOutputs:
    """Draws one token per row.

    Args:
        logits: float32 ``[R, V]``, raw.
        s: what each row asks for.
        valid_vocab: ids from here on are padding of the head and are never drawn.

    Returns:
        Tokens, their raw log-probabilities and the top ones where asked for, and whether each row was finite.
    """
    vocab = logits.shape[1]
    ids = jnp.arange(vocab)
    allowed = logits
    if valid_vocab is not None and valid_vocab < vocab:
        allowed = jnp.where(ids[None, :] < valid_vocab, allowed, NEG_INF)
    rows = jnp.arange(logits.shape[0])[:, None]
    banned = jnp.where(s.banned < 0, vocab, s.banned)
    allowed = allowed.at[rows, banned].set(NEG_INF, mode="drop")

    def draw(x: jax.Array) -> jax.Array:
        warm = s.temperature > 0
        scaled = x / jnp.where(warm, s.temperature, 1.0)[:, None]
        scaled = lax.cond(s.flags[1] > 0, lambda y: filter_logits(y, s), lambda y: y, scaled)
        floor = scaled.max(-1, keepdims=True) + jnp.log(s.min_p)[:, None]
        scaled = jnp.where(scaled >= floor, scaled, NEG_INF)
        noisy = first_argmax(scaled + _gumbel(s, vocab))
        return jnp.where(warm, noisy, first_argmax(x))

    tokens = lax.cond(s.flags[0] > 0, draw, first_argmax, allowed)
    chosen = jnp.take_along_axis(allowed, tokens[:, None], axis=-1)[:, 0]
    # A sum keeps NaN and +inf (the vectorised maximum of XLA:CPU drops NaN); -inf is a masked logit.
    finite = (logits.sum(-1) < jnp.inf) & jnp.isfinite(chosen)
    logsumexp = lax.cond(
        s.flags[3] > 0, lambda x: jax.nn.logsumexp(x, axis=-1), lambda x: jnp.zeros(x.shape[0], jnp.float32), logits
    )
    logprobs = jnp.where(s.flags[3] > 0, chosen - logsumexp, 0.0)
    top = min(MAX_TOP, vocab)

    def most_likely(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if valid_vocab is not None and valid_vocab < vocab:  # here, so that a step that asks for none does not pay
            x = jnp.where(ids[None, :] < valid_vocab, x, NEG_INF)
        values, indices = lax.top_k(x, top)
        return indices.astype(jnp.int32), values - logsumexp[:, None]

    def none(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = (x.shape[0], top)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    top_ids, top_logprobs = lax.cond(s.flags[2] > 0, most_likely, none, logits)
    return StepOutputs(tokens, logprobs, top_ids, top_logprobs, finite)
