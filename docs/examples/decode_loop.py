"""A decode loop of one's own over a page pool: one attention layer that generates with its own cache management.

Run it anywhere:  python docs/examples/decode_loop.py

Three sequences of different lengths share one pool. Each step writes the new token's K and V and attends, in one jitted call
that is given the pool by donation and returns it. Pages are handed out only when a sequence grows into them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk

NUM_HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 2, 64, 16
TARGET = {"cpu": "cpu", "gpu": "gpu", "tpu": "tpu"}[jax.default_backend()]


def random_model(seed: int = 0) -> dict[str, jax.Array]:
    """A toy model: token embedding, one attention layer, output."""
    keys = jax.random.split(jax.random.key(seed), 5)
    width, kv = NUM_HEADS * HEAD_DIM, 2 * KV_HEADS * HEAD_DIM
    shapes = {"embed": (256, width), "wq": (width, width), "wkv": (width, kv), "wo": (width, width), "head": (width, 256)}
    return {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5 * 4
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@functools.partial(jax.jit, donate_argnames="pool")
def step(params, pool, tokens, plan):
    """Runs the step's tokens ``[T]`` through the layer; returns the pool and next tokens ``[T]`` (greedy)."""
    x = params["embed"][tokens]
    q = (x @ params["wq"]).reshape(-1, NUM_HEADS, HEAD_DIM)
    k, v = jnp.split((x @ params["wkv"]).reshape(-1, 2 * KV_HEADS, HEAD_DIM), 2, axis=1)
    pool = pk.write_kv(pool, k, v, plan)  # first write, then attend: the queries see their own keys
    out = pk.paged_attention(q, pool, plan)
    x = out.reshape(len(tokens), -1) @ params["wo"]
    return pool, jnp.argmax(x @ params["head"], axis=-1)


def main(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Generates ``new_tokens`` tokens for each prompt."""
    params = random_model()
    spec = pk.PoolSpec(num_layers=1, num_pages=64, page_size=PAGE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32")
    pool = pk.alloc(spec)
    free = list(range(spec.num_pages - 1, 0, -1))  # page 0 is nobody's
    tables: list[list[int]] = [[] for _ in prompts]
    sequences = [list(p) for p in prompts]

    def grow() -> None:
        for table, sequence in zip(tables, sequences, strict=True):
            while len(table) * PAGE < len(sequence):
                table.append(free.pop())

    # Prefill: all prompts in one ragged step, padded to 32 tokens.
    grow()
    lengths = [len(s) for s in sequences]
    plan = pk.plan(lengths, lengths, tables, spec=spec, target=TARGET, shape=pk.PlanShape(32, len(prompts), 8))
    flat = np.zeros(32, np.int32)
    flat[: sum(lengths)] = np.concatenate(sequences)
    pool, picked = step(params, pool, flat, plan)
    last = np.asarray(picked)[np.cumsum(lengths) - 1]

    # Decode: one token per sequence and step; one shape, so one compilation.
    shape = pk.PlanShape(len(prompts), len(prompts), 8, decode_only=True)
    for _ in range(new_tokens - 1):
        for sequence, token in zip(sequences, last, strict=True):
            sequence.append(int(token))
        grow()
        lengths = [len(s) for s in sequences]
        plan = pk.plan([1] * len(prompts), lengths, tables, spec=spec, target=TARGET, shape=shape)
        pool, picked = step(params, pool, last.astype(np.int32), plan)
        last = np.asarray(picked)
    return [[*s[len(p) :], int(t)] for s, p, t in zip(sequences, prompts, last, strict=True)]


if __name__ == "__main__":
    for number, tokens in enumerate(main([[1, 2, 3], list(range(20)), [7]], new_tokens=40)):
        print(f"sequence {number}: {tokens}")
