"""The real scheduler's log replays exactly: after every step the rebuilt tables and counts are the scheduler's own."""

import dataclasses
import json

import pytest

from jaxpaged.events import check_main
from jaxpaged.events.reader import read_events
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler.events import KINDS, EventLog
from tests.host.events_drive import MODES, drive
from tests.host.fakes import Harness, config, request


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
    """R26: every kind of event there is is told by some run."""
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
