"""Random life of a scheduler: every operation a caller has, in any order, against page contents and lone runs."""

import dataclasses

from jaxpaged.errors import CapacityError, InvalidRequestError
from jaxpaged.request import FinishReason, Request
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.host.beam_reference import beam_reference
from tests.host.fakes import EOS, Harness, config, lone_run, request

COMMON = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


def random_config(rng):
    """Pools from 3 usable pages up, every mode, windows and host pages."""
    caching = rng.random() < 0.75
    host = rng.choice([0, 2, 8, 30])
    return config(
        page_size=(page_size := rng.choice([1, 2, 3, 4, 8])),
        num_pages=max(4, 1 + rng.choice([10, 20, 28, 40]) // page_size),
        max_num_seqs=rng.choice([2, 4, 8, 8]),
        max_num_batched_tokens=rng.choice([1, 4, 8, 16, 40]),
        max_model_len=rng.choice([12, 24]),
        num_host_pages=host,
        enable_prefix_caching=caching,
        offload_cached_pages=caching and host > 0 and rng.random() < 0.5,
        preemption_mode=rng.choice(["recompute", "swap", "auto"]),
        policy=rng.choice(["fcfs", "priority"]),
        sliding_window=rng.choice([None, None, 1, 3, 6]),
    )


class Driver:
    """Does random operations and keeps what each request must come to."""

    def __init__(self, rng, cfg=None, *, events=None, check=True) -> None:
        self.rng = rng
        self.harness = Harness(cfg or random_config(rng), events=events)
        self.check = check
        self.names = 0
        self.base: dict[str, list[int]] = {}
        self.pinned: list[tuple[tuple[int, ...], str]] = []
        self.counts = {"added": 0, "refused": 0, "verified": 0, "forked": 0, "aborted": 0, "pinned": 0}

    # --- operations --------------------------------------------------------------------------------------------------

    def add(self) -> None:
        rng = self.rng
        self.names += 1
        length = rng.randint(1, 10)
        start = rng.choice([0, 0, 0, 3])
        tokens = (COMMON * 3)[start : start + length]
        if rng.random() < 0.4:
            tokens = tuple(rng.randint(1, 11) for _ in range(length))
        if rng.random() < 0.2:
            params = BeamSearchParams(
                beam_width=rng.randint(1, 4),
                max_tokens=rng.randint(1, 8),
                length_penalty=rng.choice([0.0, 1.0, -0.5, 2.0]),
                early_stopping=rng.choice([True, False, "never"]),
                ignore_eos=rng.random() < 0.3,
            )
        else:
            params = SamplingParams(
                n=rng.choice([1, 1, 1, 1, 2, 3, 4]),
                max_tokens=rng.choice([1, 2, 5, 8, 12, None]),
                stop_token_ids=rng.choice([(), (), (3,)]),
                ignore_eos=rng.random() < 0.3,
            )
        req = request(
            f"r{self.names}", tokens, params, eos={EOS} if rng.random() < 0.8 else (), seed=rng.randint(0, 3),
            priority=rng.randint(0, 2), cache_salt=rng.choice(["", "", "a"]),
        )  # fmt: skip
        if isinstance(params, SamplingParams) and rng.random() < 0.05:
            self.harness.device.broken.add(req.request_id)
        self._enter(req)

    def _enter(self, req: Request) -> None:
        try:
            self.harness.add(req)
        except (CapacityError, InvalidRequestError):
            self.counts["refused"] += 1
            assert req.request_id not in self.harness.scheduler._requests
            return
        self.counts["added"] += 1
        self.base[req.request_id] = list(req.prompt_token_ids)

    def live(self) -> list[Request]:
        return [r for r in self.harness.requests.values() if r.request_id in self.harness.scheduler._requests]

    def fork(self) -> None:
        live = [r for r in self.live() if isinstance(r.params, SamplingParams)]
        if not live:
            return
        self.names += 1
        parent = self.rng.choice(live)
        index = self.rng.randrange(len(parent.sequences))
        try:
            child = self.harness.scheduler.fork(parent.request_id, f"f{self.names}", index=index)
        except (CapacityError, InvalidRequestError):
            self.counts["refused"] += 1
            return
        self.counts["forked"] += 1
        self.harness.requests[child.request_id] = child
        self.base[child.request_id] = child.sequences[0].token_ids[:]

    def abort(self) -> None:
        live = self.live()
        if live:
            req = self.harness.scheduler.abort(self.rng.choice(live).request_id)
            assert req is not None and req.finished
            self.counts["aborted"] += 1
            self._settle(req)
        else:
            assert self.harness.scheduler.abort("nobody") is None

    def pin(self) -> None:
        tokens = COMMON[: self.rng.randint(1, 8)]
        salt = self.rng.choice(["", "a"])
        try:
            self.harness.scheduler.pin_prefix(tokens, salt)
        except (CapacityError, InvalidRequestError):
            return
        self.counts["pinned"] += 1
        self.pinned.append((tokens, salt))

    def unpin(self) -> None:
        if self.pinned:
            self.harness.scheduler.unpin_prefix(*self.pinned.pop(self.rng.randrange(len(self.pinned))))

    def dispatch(self) -> None:
        """Plans and starts a step; with two in flight the older one is taken in first, as the engine does."""
        if len(self.harness.in_flight) >= 2:
            self.collect()
        self.harness.dispatch()

    def collect(self) -> None:
        if self.harness.in_flight:
            before = {r.request_id for r in self.live()}
            progressed = self.harness.collect()
            assert [r.arrival for r in progressed] == sorted(r.arrival for r in progressed)
            assert {r.request_id for r in progressed} <= before
            for req in progressed:
                if req.finished:
                    self._settle(req)

    def step(self) -> None:
        """A synchronous step."""
        while self.harness.in_flight:
            self.collect()
        self.harness.dispatch()
        self.collect()

    def operation(self) -> None:
        """One random operation, then the invariant."""
        choice = self.rng.random()
        if choice < 0.2:
            self.add()
        elif choice < 0.23:
            self.fork()
        elif choice < 0.24:
            self.abort()
        elif choice < 0.25:
            self.pin()
        elif choice < 0.26:
            self.unpin()
        elif choice < 0.5:
            self.step()
        elif choice < 0.8:
            self.dispatch()
        else:
            self.collect()
        if self.check:
            self.harness.scheduler.check_integrity()

    # --- what must have come out -------------------------------------------------------------------------------------

    def _settle(self, req: Request) -> None:
        """Checks an ended request against the truth and forgets it."""
        self.counts["verified"] += 1
        base = self.base.pop(req.request_id)
        if isinstance(req.params, BeamSearchParams):
            self._verify_beams(req)
        else:
            for seq in req.sequences:
                self._verify_sample(req, seq, base)
        del self.harness.requests[req.request_id]
        for seq in req.sequences:
            self.harness.device.rows.pop(seq.seq_id, None)
            self.harness.device.last.pop(seq.seq_id, None)

    def _verify_sample(self, req, seq, base) -> None:
        cfg = self.harness.cfg
        eos = frozenset() if req.params.ignore_eos else req.eos_token_ids
        stops = eos | frozenset(req.params.stop_token_ids)
        limit = min(len(req.prompt_token_ids) + req.max_tokens, cfg.max_model_len)
        want = lone_run(base, limit=limit, seed=req.seed, index=seq.index, stop_ids=stops)
        got = seq.token_ids[len(base) :]
        if req.request_id in self.harness.device.broken or seq.finish_reason is FinishReason.ABORT:
            assert got == want[: len(got)]
            assert seq.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or got == want
            return
        assert got == want, f"{req.request_id}[{seq.index}]: {got}, alone {want}"
        last = got[-1]
        assert seq.finish_reason is (FinishReason.STOP if last in stops else FinishReason.LENGTH)
        assert seq.stop_reason == (last if last in stops and last not in eos else None)
        assert len(seq.logprobs) == seq.num_generated_tokens
        assert abs(sum(logprob for logprob, _ in seq.logprobs) - seq.cumulative_logprob) < 1e-6

    def _verify_beams(self, req) -> None:
        params, cfg = req.params, self.harness.cfg
        if any(seq.finish_reason is FinishReason.ABORT for seq in req.sequences):
            return
        limit = min(len(req.prompt_token_ids) + req.max_tokens, cfg.max_model_len)
        want = beam_reference(
            req.prompt_token_ids,
            width=params.beam_width,
            max_tokens=limit - len(req.prompt_token_ids),
            stop_ids=frozenset() if params.ignore_eos else req.eos_token_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        assert [seq.generated_token_ids for seq in req.sequences] == [tokens for tokens, _, _ in want]
        for seq, (_, total, _) in zip(req.sequences, want, strict=True):
            assert abs(seq.cumulative_logprob - total) < 1e-6
            assert abs(sum(logprob for logprob, _ in seq.logprobs) - total) < 1e-6

    def drain(self, max_steps: int = 20_000) -> None:
        """Runs until nothing is live; everything is given back."""
        while self.pinned:
            self.unpin()
        steps = 0
        while self.harness.scheduler.has_unfinished():
            self.step()
            steps += 1
            assert steps < max_steps, "no progress"
        while self.harness.in_flight:
            self.collect()
        self.harness.rest_check()
        assert not self.base
        stats = dataclasses.asdict(self.harness.scheduler.stats())
        assert all(value >= 0 for value in stats.values())
