"""The real scheduler's log replays exactly: after every step the rebuilt tables and counts are the scheduler's own."""

import dataclasses
import json
import random

import pytest

from jaxpaged.errors import CapacityError, InvalidRequestError
from jaxpaged.events import Replay, check_main
from jaxpaged.events.reader import read_events
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler.events import KINDS, EventLog
from tests.host.fakes import EOS, Harness, beam_params, config, request


class Follower:
    """Runs a harness and, after every call that can change a table, replays what was logged since."""

    def __init__(self, path, cfg, *, pipelined=False):
        self.path = path
        self.log = EventLog(path, config=cfg)
        self.harness = Harness(cfg, pipelined=pipelined, events=self.log)
        self.replay = None
        self.lines = 0

    def compare(self):
        self.log.begin_step(self.log._step)  # flushes
        for line, event in list(read_events(self.path))[self.lines :]:
            if self.replay is None:
                self.replay = Replay(line, event)
            else:
                self.replay.apply(line, event)
            self.lines = line
        scheduler, replay = self.harness.scheduler, self.replay
        kv, states = scheduler._kv, scheduler._results.states
        tables = {seq: {i: p for i, p in enumerate(s.table) if p} for seq, s in states.items()}
        host = {seq: {i: p for i, p in enumerate(s.host_table) if p >= 0} for seq, s in states.items()}
        assert replay.tables == {seq: table for seq, table in tables.items() if table}
        assert replay.host_tables == {seq: table for seq, table in host.items() if table}
        assert replay.ref == {page: count for page, count in enumerate(kv.pool.ref_cnt) if count}
        assert replay.host_ref == {page: count for page, count in enumerate(kv.host.ref_cnt) if count}
        assert replay.pins == kv.pool.pins
        assert replay.offloaded == set(kv.host.index.key_of)
        assert len(replay.cached) == kv.pool.num_cached
        lengths = {seq: s.seq.num_computed_tokens for seq, s in states.items() if s.table or s.host_table}
        assert {seq: replay.lengths[seq] for seq in lengths} == lengths


MODES = {
    "plain": {},
    "tight": {"num_pages": 8, "num_host_pages": 3, "preemption_mode": "recompute"},
    "swap": {"num_host_pages": 12, "preemption_mode": "swap"},
    "auto": {"num_host_pages": 6},
    "offload": {"num_host_pages": 5, "offload_cached_pages": True},
    "window": {"sliding_window": 6},
    "no cache": {"enable_prefix_caching": False, "num_host_pages": 8},
    "small pages": {"page_size": 1, "num_pages": 30, "num_host_pages": 12},
}


def random_request(rng, name):
    prefix = [1 + i % 9 for i in range(rng.choice([0, 0, 4, 8, 9]))]
    prompt = prefix + [rng.randrange(1, 12) for _ in range(rng.randint(1, 6))]
    if rng.random() < 0.25:
        return request(name, prompt, beam_params(rng.randint(1, 3), rng.randint(1, 7)), eos={EOS}, seed=rng.randrange(99))
    params = SamplingParams(n=rng.choice([1, 1, 2, 3]), max_tokens=rng.randint(1, 9), seed=1)
    return request(name, prompt, params, eos={EOS}, seed=rng.randrange(99))


def drive(path, mode, seed, operations, each=lambda follower: follower.compare()):
    """Random adds, forks, aborts, pins and steps; then runs dry. Returns the follower."""
    rng = random.Random(seed)
    cfg = config(**{"num_pages": 16, **MODES[mode]})
    follower = Follower(path, cfg, pipelined=seed % 2 == 1)
    harness, scheduler = follower.harness, follower.harness.scheduler
    pinned = []
    for i in range(operations):
        live = [r for r in harness.requests.values() if not r.finished and r.request_id in scheduler._requests]
        choice = rng.random()
        try:
            if choice < 0.2:
                harness.add(random_request(rng, f"r{i}"))
            elif choice < 0.25 and live:
                fork = scheduler.fork(rng.choice(live).request_id, f"f{i}")
                harness.requests[fork.request_id] = fork
            elif choice < 0.28 and live:
                scheduler.abort(rng.choice(live).request_id)
            elif choice < 0.3:
                tokens = tuple(1 + i % 9 for i in range(rng.choice([4, 8])))
                scheduler.pin_prefix(tokens)
                pinned.append(tokens)
            elif choice < 0.32 and pinned:
                scheduler.unpin_prefix(pinned.pop(rng.randrange(len(pinned))))
            else:
                harness.step(check=False)
        except (CapacityError, InvalidRequestError):
            pass
        each(follower)
    while scheduler.has_unfinished() or harness.in_flight:
        harness.step(check=False)
        each(follower)
        if not scheduler.has_unfinished():
            while harness.in_flight:
                harness.collect()
    each(follower)
    follower.log.close()
    return follower


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
def test_a_random_run_replays_exactly(tmp_path, mode, seed):
    """R27: rebuilt tables, host tables, counts, pins and lengths equal the scheduler's after every operation."""
    follower = drive(tmp_path / "log", mode, seed, 150)
    assert check_main(tmp_path / "log") == 0
    assert follower.replay.stats.steps > 30
    assert not follower.replay.ref and not follower.replay.host_ref


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_long_random_run_replays_exactly(tmp_path, mode):
    """As above, ten times longer, checked at the end of each of ten runs."""
    for seed in range(10):
        drive(tmp_path / str(seed), mode, 100 + seed, 600, each=lambda follower: None).compare()


def test_the_scheduler_tells_every_kind(tmp_path):
    seen = set()
    for mode in MODES:
        for seed in range(2):
            drive(tmp_path / f"{mode}{seed}", mode, seed, 150, each=lambda follower: None)
            seen |= {event["kind"] for _, event in read_events(tmp_path / f"{mode}{seed}")}
    assert seen == KINDS | {"header"}


def test_the_same_run_writes_the_same_log_but_for_the_time(tmp_path):
    """R30: a log is deterministic for a seed."""
    for name in ("one", "two"):
        drive(tmp_path / name, "auto", 5, 150, each=lambda follower: None)
    one, two = ([{**e, "t_us": 0} for _, e in read_events(tmp_path / name)] for name in ("one", "two"))
    assert one == two


def test_a_log_holds_no_token_ids(tmp_path):
    """R30: with all token ids replaced by others, of the same equalities, the log is the same."""
    logs = []
    for shift in (0, 500):
        log = EventLog(tmp_path / str(shift), config=config(), clock=lambda: 0.0)
        harness = Harness(config(), events=log)
        for i in range(4):
            params = SamplingParams(max_tokens=5, n=2, ignore_eos=True)
            harness.add(request(f"r{i}", [shift + 1 + t for t in range(7 + i)], params))
        harness.run()
        log.close()
        logs.append((tmp_path / str(shift)).read_text())
    assert logs[0] == logs[1]
    allowed = {
        "kind", "step", "t_us", "request", "seq", "logical", "page", "src", "host", "before", "after", "why", "cached",
        "tokens", "prompt", "used", "shared", "free", "wasted", "running", "waiting", "writes",
    }  # fmt: skip
    assert {name for line in logs[0].splitlines()[1:] for name in json.loads(line)} <= allowed


def test_a_scheduler_without_a_log_plans_the_same(tmp_path):
    plans = []
    for log in (None, EventLog(tmp_path / "log", config=config())):
        harness = Harness(config(), events=log)
        for i in range(5):
            harness.add(request(f"r{i}", 5 + i, SamplingParams(max_tokens=6, n=2), arrival=i))
        harness.run()
        plans.append([dataclasses.asdict(output) for output in harness.outputs])
    assert plans[0] == plans[1]
