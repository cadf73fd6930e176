"""Many requests over one long shared prompt: read the prompt's KV once per step instead of once per request.

Run it anywhere:  python docs/examples/cascade.py

Eight requests share a prompt of 2,048 tokens and hold 5 to 40 tokens of their own. ``plan_cascade`` splits a decode step into
the shared prefix and the rows' own tokens; ``cascade_attention`` merges the two by their log-sum-exps.
"""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk

NUM_HEADS, PAGE, PROMPT_TOKENS, REQUESTS = 8, 16, 2048, 8
TARGET = {"cpu": "cpu", "gpu": "gpu", "tpu": "tpu"}[jax.default_backend()]


def main() -> dict[str, float]:
    """Runs the step both ways; returns the largest difference and the bytes of KV that each way reads."""
    spec = pk.PoolSpec(num_layers=1, num_pages=200, page_size=PAGE, num_kv_heads=2, head_dim=64, dtype="float32")
    rng = np.random.default_rng(0)
    pool = pk.KVPool(jnp.asarray(rng.normal(size=spec.data_shape), jnp.float32), None, spec)

    prompt_pages = PROMPT_TOKENS // PAGE
    prompt = list(range(1, 1 + prompt_pages))
    own = [5 * (i + 1) for i in range(REQUESTS)]  # tokens behind the prompt
    pages, tables = iter(range(1 + prompt_pages, spec.num_pages)), []
    for tokens in own:
        tables.append(prompt + [next(pages) for _ in range(-(-tokens // PAGE))])
    query_lens, seq_lens = [1] * REQUESTS, [PROMPT_TOKENS + n for n in own]

    flat = pk.plan(query_lens, seq_lens, tables, spec=spec, target=TARGET)
    levels = pk.plan_cascade(
        query_lens, seq_lens, tables, group_sizes=[REQUESTS], prefix_pages=[prompt_pages], spec=spec, target=TARGET
    )
    q = jnp.asarray(rng.normal(size=(REQUESTS, NUM_HEADS, 64)), jnp.float32)
    one_by_one = jax.jit(pk.paged_attention)(q, pool, flat)
    shared = jax.jit(pk.cascade_attention)(q, pool, levels)
    return {
        "largest difference": float(jnp.abs(one_by_one - shared).max()),
        "bytes read one by one": float(sum(seq_lens) * spec.bytes_per_token),
        "bytes read by cascade": float((PROMPT_TOKENS + sum(own)) * spec.bytes_per_token),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value:.3g}")
