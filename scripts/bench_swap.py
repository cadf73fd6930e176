"""Swapping a sequence out and in against recomputing it, by page size (the shape of figure 19 in Kwon et al. 2023).

Swap moves a sequence's pages to host memory and back, ``chunk`` pages a call; recompute runs its tokens through the model
again in one step. Both are timed in this process on the same pool. The paper's finding to look for: swapping is slow for small
pages (many small moves), recomputation does not depend on the page size, and they meet in the middle.

    python scripts/bench_swap.py --model models/SmolLM2-135M-Instruct.gguf
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.engine import platform as platforms
from jaxpaged.engine.buckets import BucketConfig, Buckets
from jaxpaged.engine.host_pool import HostPool
from jaxpaged.engine.input_builder import InputBuilder
from jaxpaged.engine.load import load_model
from jaxpaged.model.inputs import pack
from jaxpaged.model.kv_pages import alloc, pool_spec
from jaxpaged.model.step import StepProgram, packed_step
from jaxpaged.request import Request, Sequence
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxpaged.weights.checkpoint import open_checkpoint


def median_ms(fn, repeats: int) -> float:
    """Median milliseconds of ``fn`` after one warm-up."""
    fn()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, .gguf file, Orbax checkpoint or hub id")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the sequence")
    parser.add_argument("--page-sizes", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    config = checkpoint.config
    platform = platforms.resolve(EngineConfig(model=args.model), config)
    model = load_model(checkpoint, platform.dtype, scan_layers=platform.scan_layers)
    print(f"{args.tokens} tokens, {platform.dtype}, {platform.name}")
    print(
        f"{'page size':>9} {'pages':>6} {'out ms':>8} {'in ms':>8} {'swap ms':>8} {'recompute ms':>13} {'swap/recompute':>15}"
    )
    for page_size in map(int, args.page_sizes.split(",")):
        pages = -(-args.tokens // page_size)
        spec = pool_spec(config, num_pages=2 * pages + 2, page_size=page_size, dtype=platform.kv_dtype)
        buckets = Buckets(BucketConfig(max_num_seqs=2, max_num_batched_tokens=args.tokens, max_pages=pages))
        builder = InputBuilder(buckets, spec, platform.target)
        host = HostPool(spec, pages, platform.backend)
        pool = host.warm_up(alloc(spec))
        outs = [(i + 1, i) for i in range(pages)]
        backs = [(i, i + 1) for i in range(pages)]

        device = {"pool": pool, "last": jnp.zeros(2, jnp.int32)}
        del pool

        def swap_out(host=host, outs=outs, device=device):
            host.save(device["pool"], outs)
            host.save(device["pool"], [])  # waits for the bytes

        def swap_in(host=host, backs=backs, device=device):
            device["pool"] = host.restore(device["pool"], backs)
            jax.block_until_ready(device["pool"].data)

        out_ms, in_ms = median_ms(swap_out, args.repeats), median_ms(swap_in, args.repeats)
        request = Request("r", tuple([1] * args.tokens), SamplingParams(), frozenset(), 1, 0, 0)
        seq = Sequence(0, request, 0, [1] * args.tokens, args.tokens)
        table = tuple(range(1, pages + 1))
        plan = SchedulerOutput(0, (ScheduledSequence(0, 0, args.tokens, False, 0, table),), ((0, 0),))
        inputs, _ = builder.build(plan, lambda _, seq=seq: seq)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
        step = jax.jit(packed_step(StepProgram(model, platform.backend), like), donate_argnums=(1, 2))
        flat = pack(inputs)

        def recompute(step=step, flat=flat, device=device):
            out, device["pool"], device["last"] = step(model.leaves, device["pool"], device["last"], flat)
            np.asarray(out.token_ids)

        recompute_ms = median_ms(recompute, args.repeats)
        total = out_ms + in_ms
        print(
            f"{page_size:>9} {pages:>6} {out_ms:>8.2f} {in_ms:>8.2f} {total:>8.2f} {recompute_ms:>13.2f} "
            f"{total / recompute_ms:>15.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
