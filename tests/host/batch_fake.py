"""A small engine without a model: same calls as the real one, tokens a fixed function of prompt and seed.

Requests finish out of order (the length depends on the prompt), over-long prompts are refused at the door, and one word makes
a request fail while it runs. Run as a program it does a job file: ``python -m tests.host.batch_fake JOB [--resume] ...``.
"""

import hashlib
import sys
import time
from types import SimpleNamespace

from jaxpaged.errors import CapacityError, InvalidRequestError
from jaxpaged.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput

MAX_MODEL_LEN = 200
VOCAB = 97
NUM_PAGES = 64


def encode(prompt) -> list[int]:
    if isinstance(prompt, dict):
        if "prompt_token_ids" in prompt:
            return list(prompt["prompt_token_ids"])
        prompt = "".join(f"<{m['role']}>{m['content']}" for m in prompt["messages"])
    return [byte % VOCAB for byte in prompt.encode()]


def token_at(prompt: list[int], seed: int, sample: int, position: int) -> int:
    digest = hashlib.sha256(repr((prompt, seed, sample, position)).encode()).digest()
    return digest[0] % VOCAB


class FakeEngine:
    """See the module."""

    def __init__(self, *, weights: str = "fake-weights", max_num_seqs: int = 4, step_s: float = 0.0):
        self.weights, self.max_num_seqs, self.step_s = weights, max_num_seqs, step_s
        self.waiting: dict[str, tuple] = {}
        self.running: dict[str, tuple] = {}
        self.generated: dict[str, int] = {}
        self.log: list[str] = []
        self.aborted: list[str] = []
        self.max_open = 0
        self.totals = dict.fromkeys(("num_prompt_tokens", "num_generated_tokens", "num_steps"), 0)
        self.ledger = SimpleNamespace(num_compilations=3)

    def fingerprint(self) -> str:
        return self.weights

    def add_request(self, request_id, prompt, params, *, priority=0, cache_salt="", final_only=False):
        tokens = encode(prompt)
        if not tokens:
            raise InvalidRequestError("prompt: got 0 tokens, wants at least 1")
        if len(tokens) >= MAX_MODEL_LEN:
            raise InvalidRequestError(f"prompt: got {len(tokens)} tokens, wants fewer than max_model_len ({MAX_MODEL_LEN})")
        if params.n > NUM_PAGES:
            raise CapacityError(f"n: {params.n} samples need {params.n} pages, the pool has {NUM_PAGES}")
        self.log.append(request_id)
        self.waiting[request_id] = (prompt, tokens, params)
        self.max_open = max(self.max_open, len(self.waiting) + len(self.running))

    def step(self) -> list[RequestOutput]:
        time.sleep(self.step_s)
        while self.waiting and len(self.running) < self.max_num_seqs:
            request_id = next(iter(self.waiting))
            self.running[request_id] = self.waiting.pop(request_id)
            self.generated[request_id] = 0
            self.totals["num_prompt_tokens"] += len(self.running[request_id][1])
        outputs = []
        for request_id in list(self.running):
            prompt, tokens, params = self.running[request_id]
            self.generated[request_id] += 1
            self.totals["num_generated_tokens"] += params.n
            outputs.append(self._output(request_id, prompt, tokens, params))
            if outputs[-1].finished:
                del self.running[request_id]
        self.totals["num_steps"] += 1
        return outputs[::-1]

    def _output(self, request_id, prompt, tokens, params) -> RequestOutput:
        wanted = 1 + sum(tokens) % min(params.max_tokens or 40, 40)
        finished, count = self.generated[request_id] >= wanted, self.generated[request_id]
        outs = []
        for sample in range(params.n):
            ids = [token_at(tokens, params.seed, sample, position) for position in range(count)]
            logprobs = None
            if params.logprobs is not None:
                top = range(1, params.logprobs + 1)
                logprobs = [
                    {rank: Logprob(-0.5 * rank, rank, f"t{rank}") for rank in top} | {token: Logprob(-1.25, None, f"t{token}")}
                    for token in ids
                ]
            outs.append(
                CompletionOutput(sample, " ".join(f"t{i}" for i in ids), ids, None, logprobs, "length" if finished else None)
            )
        text = prompt if isinstance(prompt, str) else None
        error = "logits: got NaN in row 0" if text is not None and "FAIL" in text else None
        return RequestOutput(request_id, text, tokens, outs, finished or error is not None, 0, error)

    def abort_request(self, request_id):
        self.aborted.append(request_id)
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running_seqs=len(self.running),
            num_waiting_seqs=len(self.waiting),
            num_pages=NUM_PAGES,
            num_used_pages=len(self.running) * 2,
            num_cached_pages=3,
            num_wasted_slots=len(self.running) * 5,
            **self.totals,
        )


def main() -> int:
    import argparse

    from jaxpaged.batch.config import load_job
    from jaxpaged.batch.job import run_job
    from jaxpaged.commands.generate import report

    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.0)
    args = parser.parse_args()
    job = load_job(args.job)

    def load() -> FakeEngine:
        print("loading", file=sys.stderr, flush=True)
        time.sleep(args.load_s)
        print("loaded", file=sys.stderr, flush=True)
        return FakeEngine(step_s=args.step_s)

    try:
        summary = run_job(job, load, resume=args.resume, overwrite=args.overwrite)
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary.text())
    return report(summary)


if __name__ == "__main__":
    sys.exit(main())
