"""The writer: what a line looks like, when it reaches the file, what it never holds."""

import itertools
import json

import pytest

from jaxpaged.config import SchedulerConfig
from jaxpaged.errors import ConfigError, InvariantError
from jaxpaged.scheduler.events import CONFIG_FIELDS, KINDS, EventLog
from tests.host.events_sim import Sim

CONFIG = SchedulerConfig(page_size=4, num_pages=9, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def ticking():
    ticks = itertools.count()
    return lambda: next(ticks) * 0.001


def test_every_field_stands_in_the_line(tmp_path):
    """R26, R28: step, time, request, sequence, index, page, counts before and after, and why."""
    log = EventLog(tmp_path / "log", config=CONFIG, clock=ticking())
    log.begin_step(7)
    log.emit("copy", request="a", seq=3, logical=2, page=5, src=4, before=2, after=1, why="fork")
    log.emit("free", seq=3, logical=0, page=1, before=1, after=0, cached=True)
    log.emit("step", tokens=1, writes=[[3, 8, 1]])
    log.close()
    header, copy, free, step = lines(tmp_path / "log")
    assert header == {"kind": "header", "schema": 1, **{name: getattr(CONFIG, name) for name in CONFIG_FIELDS}}
    assert copy == {
        "step": 7, "t_us": 1000, "kind": "copy", "request": "a", "seq": 3, "logical": 2, "page": 5, "src": 4, "before": 2,
        "after": 1, "why": "fork",
    }  # fmt: skip
    assert free == {
        "step": 7,
        "t_us": 2000,
        "kind": "free",
        "seq": 3,
        "logical": 0,
        "page": 1,
        "before": 1,
        "after": 0,
        "cached": True,
    }
    assert step == {"step": 7, "t_us": 3000, "kind": "step", "tokens": 1, "writes": [[3, 8, 1]]}


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "</script>", "žluťoučký 🐎", "\ud800", "\x00"])
def test_any_request_id_survives(tmp_path, name):
    log = EventLog(tmp_path / "log")
    log.emit("admit", request=name, why=name)
    log.close()
    event = lines(tmp_path / "log")[1]
    assert (event["request"], event["why"]) == (name, name)
    assert (tmp_path / "log").read_bytes().isascii()


def test_events_reach_the_file_at_the_next_step(tmp_path):
    log = EventLog(tmp_path / "log")
    log.begin_step(0)
    log.emit("admit", request="a")
    assert len(lines(tmp_path / "log")) == 1
    log.begin_step(1)
    assert [event["kind"] for event in lines(tmp_path / "log")] == ["header", "admit"]
    log.emit("admit", request="b")
    log.close()
    log.close()
    assert [event.get("step") for event in lines(tmp_path / "log")] == [None, 0, 1]


def test_a_second_run_is_appended_behind_a_torn_line(tmp_path):
    path = tmp_path / "log"
    EventLog(path).close()
    with path.open("a") as file:
        file.write('{"step":0,"t_us":1,"ki')
    EventLog(path).close()
    first, torn, second = path.read_text().splitlines()
    assert json.loads(first) == json.loads(second) == {"kind": "header", "schema": 1}
    assert torn == '{"step":0,"t_us":1,"ki'


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(InvariantError, match="event kind: got 'allok'"):
        EventLog(tmp_path / "log").emit("allok")


def test_the_same_seed_writes_the_same_log_but_for_the_time(tmp_path):
    """R30: a log is deterministic for a seed."""
    for name in ("one", "two"):
        Sim(tmp_path / name, seed=3, offload=True).run()
    assert without_time(tmp_path / "one") == without_time(tmp_path / "two")
    Sim(tmp_path / "three", seed=4, offload=True).run()
    assert without_time(tmp_path / "one") != without_time(tmp_path / "three")


def without_time(path):
    return [{name: value for name, value in event.items() if name != "t_us"} for event in lines(path)]


def test_the_simulator_uses_every_kind_of_table_event(tmp_path):
    """The simulator stands in for the scheduler in these tests, so what it never does would never be tested."""
    seen = set()
    for seed in range(6):
        Sim(tmp_path / str(seed), seed=seed, offload=seed % 2 == 1, num_pages=40).run()
        seen |= {event["kind"] for event in lines(tmp_path / str(seed))}
    assert seen - {"header"} == KINDS - {"abort", "pin", "unpin"}


def test_a_log_that_cannot_be_opened_is_named(tmp_path):
    for path in (tmp_path / "no" / "log", tmp_path, ""):
        with pytest.raises(ConfigError, match="event_log: cannot open"):
            EventLog(path)
