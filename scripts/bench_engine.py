"""Tokens per second of the engine at several batch sizes, beside ``transformers`` float32 static-batch generation.

Both run in this process, in turns, on the same prompts (about 20 tokens each, 128 new tokens, greedy, no early stop), so that
the ratios hold on a machine whose speed drifts. Also printed: where a step's time goes, the floor, and the host's share.

    python scripts/bench_engine.py --model models/SmolLM2-135M-Instruct.gguf
    python scripts/bench_engine.py --model MODEL --batch-sizes 1,8 --no-transformers
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np

from jaxpaged import LLM, SamplingParams
from jaxpaged.model.inputs import pack
from jaxpaged.param_names import model_params
from jaxpaged.weights.checkpoint import Checkpoint

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle on the shore"


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """``count`` different prompts of about 20 tokens."""
    assert llm.tokenizer is not None
    return [llm.tokenizer.encode(f"{i}. {PROMPT}") for i in range(count)]


def run_engine(llm: LLM, ids: list[list[int]], new_tokens: int) -> float:
    """Seconds to generate ``new_tokens`` for every prompt."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in ids], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(o.outputs[0].token_ids) == new_tokens for o in outputs)
    return seconds


def run_transformers(model, ids: list[list[int]], new_tokens: int) -> float:
    """Seconds of a static, left-padded batch."""
    import torch

    width = max(map(len, ids))
    batch = torch.zeros((len(ids), width), dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, prompt in enumerate(ids):
        batch[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            batch, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
    seconds = time.perf_counter() - start
    assert out.shape[1] == width + new_tokens
    return seconds


def floor_ms(llm: LLM, batch: int, context: int) -> tuple[float, float]:
    """Bytes a decode step must read (weights once, live KV once) in ms at the measured read bandwidth, and that in GB/s."""
    x = jax.numpy.ones(64 << 20, jax.numpy.float32)
    total = jax.jit(lambda v: v.sum())
    total(x).block_until_ready()
    best = min(_timed(lambda: total(x).block_until_ready()) for _ in range(5))
    bandwidth = x.nbytes / best
    engine = llm.engine
    size = {"float32": 4}.get(engine.platform.dtype, 2)
    weights = size * sum(int(np.prod(s)) for p, s in model_params(engine.model_config).items())
    kv = batch * context * engine.runner.spec.bytes_per_token
    return (weights + kv) / bandwidth * 1e3, bandwidth / 1e9


def _timed(fn) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def host_times(llm: LLM, batch: int, steps: int = 60) -> dict[str, float]:
    """Median microseconds of a step's parts, run one after another, with ``batch`` sequences decoding."""
    engine = llm.engine
    scheduler, builder, runner = engine._scheduler, engine._builder, engine.runner
    params = SamplingParams(temperature=0, max_tokens=steps + 20, ignore_eos=True)
    for i, prompt in enumerate(prompts(llm, batch)):
        engine.add_request(f"host-{i}", prompt, params, final_only=True)
    rows: dict[str, list[float]] = {}
    while engine.has_unfinished_requests():
        clock = [time.perf_counter()]
        output = scheduler.schedule()
        clock.append(time.perf_counter())
        inputs, shape = builder.build(output, engine._find)
        clock.append(time.perf_counter())
        flat = pack(inputs)
        clock.append(time.perf_counter())
        result = runner.resolve(runner.run(output, shape, flat, wants_top=False))
        clock.append(time.perf_counter())
        engine._report(scheduler.update_from_output(output, result))
        clock.append(time.perf_counter())
        if len(output.scheduled) == batch == output.num_tokens:
            for name, seconds in zip(("schedule", "build", "pack", "device", "update"), np.diff(clock), strict=True):
                rows.setdefault(name, []).append(seconds * 1e6)
    return {name: statistics.median(values) for name, values in rows.items()}


def to_transformers(checkpoint: Checkpoint):
    """The same weights as a float32 ``transformers`` model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tie_word_embeddings,
    )
    if c.rope.rope_type != "default" or c.attention_bias or c.mlp_bias:
        raise SystemExit("this comparison is written for models without RoPE scaling and biases; use --no-transformers")
    model = LlamaForCausalLM(config).float().eval()
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    state = {}
    for path, value in checkpoint.iter_params("float32"):
        tensor = torch.from_numpy(np.array(value))
        name = path.split("/")
        prefix = f"model.layers.{name[1]}." if name[0] == "layers" else ""
        if name[-1] == "qkv_proj":
            for part, rows in zip("qkv", tensor.split([q, kv, kv]), strict=True):
                state[f"{prefix}self_attn.{part}_proj.weight"] = rows
        elif name[-1] == "gate_up_proj":
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                state[f"{prefix}mlp.{part}_proj.weight"] = rows
        else:
            names = {
                "input_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "o_proj": "self_attn.o_proj",
                "down_proj": "mlp.down_proj",
                "embed_tokens": "model.embed_tokens",
                "norm": "model.norm",
                "lm_head": "lm_head",
            }
            state[f"{prefix}{names[name[-1]]}.weight"] = tensor
    missing, extra = model.load_state_dict(state, strict=False)
    assert not extra and set(missing) <= {"lm_head.weight"}, (missing, extra)
    model.tie_weights()
    return model


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, .gguf file, Orbax checkpoint or hub id")
    parser.add_argument("--batch-sizes", default="1,8,32,64")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turns; the median is printed")
    parser.add_argument("--dtype", default="auto", help="of the engine (transformers runs float32)")
    parser.add_argument("--page-size", type=int, default=None)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--host-batch", type=int, default=0, help="also print host time per step at this many sequences (256)")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args()
    sizes = [int(s) for s in args.batch_sizes.split(",")]
    most = max(*sizes, args.host_batch)
    start = time.perf_counter()
    llm = LLM(
        args.model,
        dtype=args.dtype,
        page_size=args.page_size,
        max_num_seqs=most,
        max_model_len=1024,
        max_num_batched_tokens=2048,
        num_pages=most * 16 * 16 // (args.page_size or 16),
        enable_prefix_caching=False,
        use_tqdm=sys.stderr.isatty(),
    )
    print(
        f"engine ready after {time.perf_counter() - start:.1f} s, {llm.engine.platform.dtype}; "
        f"compile ledger: {len(llm.engine.ledger.entries)} programs, {llm.engine.ledger.seconds:.1f} s"
    )
    reference = None if args.no_transformers else to_transformers(llm.engine.checkpoint)
    results = []
    print(f"{'sequences':>9} {'engine tok/s':>13} {'transformers':>13} {'ratio':>6} {'step ms':>8} {'floor ms':>9}")
    for size in sizes:
        ids = prompts(llm, size)
        run_engine(llm, ids, 4)
        ours, theirs = [], []
        for _ in range(args.repeats):
            ours.append(run_engine(llm, ids, args.new_tokens))
            if reference is not None:
                theirs.append(run_transformers(reference, ids, args.new_tokens))
        tokens = size * args.new_tokens
        floor, bandwidth = floor_ms(llm, size, 20 + args.new_tokens // 2)
        row = {
            "sequences": size,
            "engine": tokens / statistics.median(ours),
            "step_ms": statistics.median(ours) / args.new_tokens * 1e3,
            "floor_ms": floor,
        }
        if theirs:
            row["transformers"] = tokens / statistics.median(theirs)
            row["ratio"] = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        results.append(row)
        print(
            f"{size:>9} {row['engine']:>13.1f} {row.get('transformers', float('nan')):>13.1f} "
            f"{row.get('ratio', float('nan')):>6.2f} {row['step_ms']:>8.1f} {floor:>9.1f}",
            flush=True,
        )
    print(f"floor: weights and live KV read once at {bandwidth:.1f} GB/s (measured read bandwidth)")
    if args.host_batch:
        times = host_times(llm, args.host_batch)
        host = sum(v for k, v in times.items() if k != "device")
        print(
            f"host time per step at {args.host_batch} sequences: {host / 1e3:.2f} ms  ("
            + ", ".join(f"{k} {v / 1e3:.2f}" for k, v in times.items())
            + " ms)"
        )
        results.append({"host_batch": args.host_batch, **times})
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
