"""Random runs of the real scheduler with a log, and a follower that compares the log's replay with the scheduler."""

import random

from jaxpaged.errors import CapacityError, InvalidRequestError
from jaxpaged.events import Replay
from jaxpaged.events.reader import read_events
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler.events import EventLog
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
