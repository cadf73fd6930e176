"""How much memory page sharing saves with parallel samples and beam search on real prompts.

For each width the engine runs the prompts together and, after every step, compares block-table entries (logical pages) with
the pages they name (physical). Printed: saving = 1 - physical / logical, averaged over steps, beside the ranges of the paper
(Kwon et al. 2023, figure 15 and section 6.3, with its ShareGPT-like and Alpaca-like loads), and the copies that were needed.

    python scripts/measure_sharing.py --model models/SmolLM2-135M-Instruct.gguf
"""

import argparse
import dataclasses
import json
from pathlib import Path

from jaxpaged import LLM, BeamSearchParams, SamplingParams

PAPER = {
    ("parallel", 2): "6.1 % Alpaca, 16.2 % ShareGPT",
    ("parallel", 4): "8.5 % Alpaca",
    ("parallel", 6): "9.8 % Alpaca, 30.5 % ShareGPT",
    ("beam", 2): "37.6 % Alpaca, 44.3 % ShareGPT",
    ("beam", 4): "53.1 % Alpaca",
    ("beam", 6): "55.2 % Alpaca, 66.3 % ShareGPT",
}


@dataclasses.dataclass
class Usage:
    """Sums over steps."""

    steps: int = 0
    saving: float = 0.0
    logical: int = 0
    physical: int = 0
    peak_logical: int = 0
    peak_physical: int = 0
    waste: float = 0.0

    def add(self, stats, page_size: int) -> None:
        """Takes in the state after one step."""
        if not stats.num_logical_pages:
            return
        self.steps += 1
        self.saving += 1 - stats.num_used_pages / stats.num_logical_pages
        self.logical += stats.num_logical_pages
        self.physical += stats.num_used_pages
        self.peak_logical = max(self.peak_logical, stats.num_logical_pages)
        self.peak_physical = max(self.peak_physical, stats.num_used_pages)
        self.waste += stats.num_wasted_slots / (stats.num_used_pages * page_size)


def load_prompts(path: Path, llm: LLM, limit: int) -> list[dict]:
    """Prompts of a job's input file, shortest first."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    prompts = [{k: row[k] for k in ("prompt", "messages", "prompt_token_ids") if k in row} for row in rows]
    return sorted(prompts, key=lambda p: len(json.dumps(p)))[:limit]


def run(llm: LLM, prompts: list[dict], params) -> tuple[Usage, int]:
    """Runs all prompts together; returns the usage and the page copies made."""
    engine, usage = llm.engine, Usage()
    before = engine.stats().num_page_copies
    for i, prompt in enumerate(prompts):
        engine.add_request(f"p{i}", prompt, params, final_only=True, cache_salt=str(i))  # no sharing between requests
    while engine.has_unfinished_requests():
        engine.step()
        usage.add(engine.stats(), engine.platform.page_size)
    return usage, engine.stats().num_page_copies - before


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, .gguf file, Orbax checkpoint or hub id")
    parser.add_argument("--prompts", type=Path, default=Path("configs/demo_prompts.jsonl"))
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--widths", default="2,4,6")
    parser.add_argument("--page-size", type=int, default=16)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        page_size=args.page_size,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=2048,
        num_pages=4096,
        async_scheduling=False,
    )
    prompts = load_prompts(args.prompts, llm, args.num_prompts)
    print(f"{len(prompts)} prompts, {args.max_tokens} new tokens, pages of {args.page_size}")
    print(f"{'mode':<9} {'width':>5} {'saving':>8} {'logical':>8} {'physical':>9} {'waste':>7} {'copies':>7}  paper")
    for mode in ("parallel", "beam"):
        for width in map(int, args.widths.split(",")):
            if mode == "parallel":
                params = SamplingParams(n=width, temperature=1.0, seed=0, max_tokens=args.max_tokens, ignore_eos=True)
            else:
                params = BeamSearchParams(beam_width=width, max_tokens=args.max_tokens, ignore_eos=True)
            usage, copies = run(llm, prompts, params)
            print(
                f"{mode:<9} {width:>5} {usage.saving / usage.steps:>8.1%} {usage.logical / usage.steps:>8.1f} "
                f"{usage.physical / usage.steps:>9.1f} {usage.waste / usage.steps:>7.1%} {copies:>7}  "
                f"{PAPER.get((mode, width), '')}",
                flush=True,
            )


if __name__ == "__main__":
    main()
