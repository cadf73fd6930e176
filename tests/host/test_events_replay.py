"""The checker: it rebuilds what was logged, and finds every broken rule at its line."""

import json
import pathlib
import re

import pytest

from jaxpaged.events import LogViolation, check_main, replay
from jaxpaged.events.stats import sparkline
from jaxpaged.scheduler.events import KINDS
from tests.host.events_sim import Sim

HEADER = {"kind": "header", "schema": 1, "page_size": 4, "num_pages": 9, "num_host_pages": 2}


def event(kind, **fields):
    return {"step": 0, "t_us": 0, "kind": kind, **fields}


def admit(request="a", **more):
    return event("admit", request=request, **more)


def alloc(page, seq=1, logical=0, before=0, after=1, request="a", **more):
    return event("alloc", request=request, seq=seq, logical=logical, page=page, before=before, after=after, **more)


def free(page, seq=1, logical=0, before=1, after=0, request="a", **more):
    return event("free", request=request, seq=seq, logical=logical, page=page, before=before, after=after, **more)


def share(page, seq=2, logical=0, before=1, after=2, why="fork", request="a", **more):
    return event("share", request=request, seq=seq, logical=logical, page=page, before=before, after=after, why=why, **more)


def copy(src, page, seq=2, logical=0, before=2, after=1, why="fork", request="a"):
    return event("copy", request=request, seq=seq, logical=logical, src=src, page=page, before=before, after=after, why=why)


def swap(kind, page, host, seq=1, logical=0, request="a", **more):
    before = 1 if kind == "swap_out" else 0
    fields = {"before": before, "after": 1 - before, "host": host, **more}
    return event(kind, request=request, seq=seq, logical=logical, page=page, **fields)


def step(number=0, writes=(), used=0, shared=0, cached=0, **more):
    fields = {"tokens": sum(w[2] for w in writes), "used": used, "shared": shared, "cached": cached, "running": 1, "waiting": 0}
    return {**event("step", **fields, free=8 - used - cached, writes=[list(w) for w in writes]), "step": number, **more}


def cached(page=1, seq=1, request="a"):
    """A full page that nobody names any more but that can be found."""
    return [alloc(page, seq, request=request), step(0, [(seq, 0, 4)], used=1), free(page, seq, request=request, cached=True)]


def late(events, number=1):
    return [{**e, "step": max(number, e["step"])} for e in events]


def write(path, events, header=HEADER, end="\n"):
    path.write_text("\n".join(json.dumps(e) for e in [header, *events]) + end)
    return path


def run(tmp_path, events, **more):
    (result,) = replay(write(tmp_path / "log", events, **more))
    return result


def violation(tmp_path, events, **more):
    with pytest.raises(LogViolation) as caught:
        run(tmp_path, events, **more)
    return caught.value.rule, caught.value.line


# -- sound logs


def test_a_fork_a_copy_and_the_last_holder_in_place(tmp_path):
    """R9: of two holders of a half-filled page the first writer copies it, the last one writes in place."""
    events = [
        admit(),
        alloc(5),
        step(0, [(1, 0, 2)], used=1, wasted=2),
        share(5),
        copy(5, 7),
        step(1, [(2, 2, 1), (1, 2, 1)], used=2, wasted=2),
    ]
    pool = run(tmp_path, late(events[:3], 0) + late(events[3:]))
    assert pool.tables == {1: {0: 5}, 2: {0: 7}}
    assert pool.ref == {5: 1, 7: 1}
    assert (pool.filled[5], pool.filled[7]) == (3, 3)
    assert pool.stats.copies == {"fork": 1}


def test_a_cached_page_is_found_again_and_evicted(tmp_path):
    events = [*cached(), share(1, 3, before=0, after=1, why="prefix", request="b"), free(1, 3, request="b", cached=True)]
    pool = run(tmp_path, events)
    assert pool.cached == {1} and not pool.ref
    assert run(tmp_path, [*events, event("evict", page=1)]).cached == set()


def test_a_group_is_swapped_out_and_in_with_its_sharing(tmp_path):
    events = [
        alloc(3),
        share(3),
        swap("swap_out", 3, 1, before=2, after=1),
        swap("swap_out", 3, 1, seq=2),
        swap("swap_in", 6, 1),
        swap("swap_in", 6, 1, seq=2, before=1, after=2),
    ]
    halfway = run(tmp_path, events[:4])
    assert halfway.host_tables == {1: {0: 1}, 2: {0: 1}} and halfway.host_ref == {1: 2} and not halfway.ref
    pool = run(tmp_path, events)
    assert pool.tables == {1: {0: 6}, 2: {0: 6}} and pool.ref == {6: 2} and not pool.host_tables
    assert pool.stats.peak_host_pages == 1


def test_an_offloaded_page_comes_back(tmp_path):
    away = [*cached(2), event("offload", page=2, host=0)]
    assert run(tmp_path, away).offloaded == {0}
    back = event("restore", request="b", seq=4, logical=0, page=8, before=0, after=1, host=0, why="hit")
    pool = run(tmp_path, [*away, back])
    assert pool.tables == {4: {0: 8}} and pool.filled[8] == 4 and not pool.offloaded
    assert not run(tmp_path, [*away, event("evict", host=0)]).offloaded


def test_a_window_frees_the_front_of_a_table(tmp_path):
    header = {**HEADER, "sliding_window": 4}
    events = [alloc(1), alloc(2, logical=1), step(0, [(1, 0, 7)], used=2)]
    events += late([free(1), step(1, [(1, 7, 1)], used=1)])
    assert run(tmp_path, events, header=header).tables == {1: {1: 2}}
    assert violation(tmp_path, events) == ("write", 6), "without a window the front is still needed"


@pytest.mark.parametrize("seed", range(12))
def test_a_random_run_replays_exactly(tmp_path, seed):
    """R27: after every step the rebuilt tables and counts are those of the one who logged."""
    size = (1, 2, 4, 16)[seed % 4]
    sim = Sim(tmp_path / "log", seed=seed, offload=seed % 2 == 1, page_size=size, num_pages=(160, 80, 40, 24)[seed % 4]).run()
    seen = []
    (pool,) = replay(
        tmp_path / "log",
        each_step=lambda p: seen.append(({s: dict(t) for s, t in p.tables.items()}, dict(p.ref), len(p.cached))),
    )
    assert seen == [({s: t for s, t in at["tables"].items() if t}, at["ref"], at["cached"]) for at in sim.trace]
    assert not pool.ref and not pool.tables and pool.stats.num_owned == 0
    assert pool.stats.steps == len(sim.trace) and pool.stats.tokens == sum(at["tokens"] for at in sim.trace)
    assert pool.stats.peak_pages >= max(at["used"] for at in sim.trace)


# -- broken logs: the rule and the line (the header is line 1)

BROKEN = {
    "the count before is wrong": ([alloc(1), share(1, before=2, after=3)], "count", 3),
    "the count after is wrong": ([alloc(1, after=2)], "count", 2),
    "a page is freed twice": ([alloc(1), free(1), free(1)], "double-free", 4),
    "a page is freed by another": ([alloc(1), free(1, seq=2)], "double-free", 3),
    "another page is freed": ([alloc(1), alloc(2, logical=1), free(2, before=1)], "table", 4),
    "an owned page is handed out": ([alloc(1), alloc(1, seq=2)], "free-page", 3),
    "a cached page is handed out": ([*cached(), alloc(1, seq=2)], "free-page", 5),
    "a free page is shared": ([share(1, before=0, after=1, why="prefix")], "free-page", 2),
    "a freed page is shared": ([alloc(1), free(1), share(1, before=0, after=1)], "free-page", 4),
    "the scratch page is owned": ([alloc(0)], "scratch-page", 2),
    "a page lies outside the pool": ([alloc(9)], "page-range", 2),
    "a table entry is overwritten": ([alloc(1), alloc(2)], "table", 3),
    "a sequence names a page twice": ([alloc(1), share(1, seq=1, logical=1)], "table", 3),
    "a fork crosses requests": ([alloc(1), share(1, request="b")], "isolation", 3),
    "a beam crosses requests": ([alloc(1), share(1, request="b", why="beam")], "isolation", 3),
    "a sequence changes its request": ([alloc(1), alloc(2, logical=1, request="b")], "request", 3),
    "a half-filled page is a prefix hit": (
        [alloc(1), step(0, [(1, 0, 3)], used=1), share(1, 5, why="prefix", request="b")], "partial-page", 4,
    ),
    "a share has no reason": ([alloc(1), share(1, why="luck")], "why", 3),
    "an unpinned page is shared as pinned": ([alloc(1), step(0, [(1, 0, 4)], used=1), share(1, why="pinned")], "pin", 4),
    "a page with one owner is copied": ([alloc(1), copy(1, 2, seq=1, before=1, after=0)], "needless-copy", 3),
    "a copy goes into an owned page": ([alloc(1), alloc(3, 3), share(1), copy(1, 3)], "free-page", 5),
    "a copy comes from another page": ([alloc(1), share(1), copy(4, 2)], "table", 4),
    "a full page is copied": (
        [alloc(1), step(0, [(1, 0, 4)], used=1), *late([share(1), copy(1, 2), alloc(3, 2, 1), step(1, [(2, 4, 1)], used=3)])],
        "needless-copy", 5,
    ),
    "a shared page is written": (
        [alloc(1), step(0, [(1, 0, 2)], used=1), *late([share(1), step(1, [(2, 2, 1)], used=1, shared=1)])], "write-shared", 5,
    ),
    "a slot is left out": ([alloc(1), step(0, [(1, 1, 1)], used=1)], "write-gap", 3),
    "a page is left out": ([alloc(1), alloc(2, logical=1), step(0, [(1, 4, 1)], used=2)], "write-gap", 4),
    "a slot is written twice": ([alloc(1), step(0, [(1, 0, 2)], used=1), step(1, [(1, 1, 1)], used=1)], "rewrite", 4),
    "a write has no page": ([alloc(1), step(0, [(1, 0, 5)], used=1)], "write", 3),
    "a page is held for later": ([alloc(1), alloc(2, logical=1), step(0, [(1, 0, 4)], used=2)], "need", 4),
    "an owned page is evicted": ([alloc(1), event("evict", page=1)], "evict", 3),
    "a free page is evicted": ([event("evict", page=1)], "evict", 2),
    "a pinned page is evicted": ([*cached(), event("pin", page=1, before=0, after=1), event("evict", page=1)], "pin", 6),
    "a pinned page is offloaded": (
        [*cached(), event("pin", page=1, before=0, after=1), event("offload", page=1, host=0)], "pin", 6,
    ),
    "a free page is pinned": ([event("pin", page=1, before=0, after=1)], "pin", 2),
    "pins are miscounted": ([*cached(), event("pin", page=1, before=1, after=2)], "count", 5),
    "an unpinned page is unpinned": ([*cached(), event("unpin", page=1, before=1, after=0)], "pin", 5),
    "the host pool is exceeded": ([alloc(1), swap("swap_out", 1, 2)], "host-bound", 3),
    "a host page is taken twice": (
        [alloc(1), alloc(2, 2), swap("swap_out", 1, 0), swap("swap_out", 2, 0, seq=2)], "host-page", 5,
    ),
    "an offloaded host page is overwritten": (
        [*cached(), event("offload", page=1, host=0), *cached(2, 2)[:1], swap("swap_out", 2, 0, seq=2)], "host-page", 7,
    ),
    "another host page comes back": ([alloc(1), swap("swap_out", 1, 0), swap("swap_in", 1, 1)], "table", 4),
    "a swapped page lands on another's": (
        [alloc(1), swap("swap_out", 1, 0), alloc(2, 2), swap("swap_in", 2, 0, before=1, after=2)], "host-page", 5,
    ),
    "a restore comes from nowhere": ([swap("restore", 1, 0)], "host-page", 2),
    "a sequence ends with pages": ([alloc(1), event("finish", seq=1, why="stop")], "held", 3),
    "a sequence ends with host pages": ([alloc(1), swap("swap_out", 1, 0), event("finish", seq=1, why="stop")], "held", 4),
    "a request is aborted with pages": ([alloc(1), event("abort", request="a")], "held", 3),
    "a sequence goes on after its end": ([event("finish", seq=1, why="stop"), alloc(1)], "finished", 3),
    "a sequence ends twice": ([event("finish", seq=1, why="stop"), event("finish", seq=1, why="stop")], "finished", 3),
    "a preemption has no mode": ([event("preempt", seq=1, why="mood")], "why", 2),
    "a step goes back": ([step(1), step(0)], "step-order", 3),
    "a step is planned twice": ([step(1), step(1)], "step-order", 3),
    "time goes back": ([admit(t_us=5), admit(t_us=4)], "time-order", 3),
    "used is wrong": ([alloc(1), step(0, [(1, 0, 1)], used=2)], "summary", 3),
    "shared is wrong": ([alloc(1), share(1), step(0, used=1)], "summary", 4),
    "cached is wrong": ([*cached(), step(1, cached=2)], "summary", 5),
    "free is wrong": ([step(0, free=7)], "summary", 2),
    "wasted is wrong": ([alloc(1), step(0, [(1, 0, 1)], used=1, wasted=2)], "summary", 3),
    "tokens are wrong": ([alloc(1), step(0, [(1, 0, 1)], used=1, tokens=2)], "summary", 3),
    "a step writes a sequence twice": ([alloc(1), step(0, [(1, 0, 1), (1, 1, 1)], used=1)], "fields", 3),
    "a kind is unknown": ([event("grow", seq=1)], "fields", 2),
    "a field is missing": ([{k: v for k, v in alloc(1).items() if k != "logical"}], "fields", 2),
    "a field is no number": ([alloc("1")], "fields", 2),
    "a field is true": ([alloc(1, seq=True)], "fields", 2),
    "a page is negative": ([alloc(-1)], "fields", 2),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_log_is_rejected_at_its_line(tmp_path, capsys, what):
    events, rule, line = BROKEN[what]
    assert violation(tmp_path, events) == (rule, line)
    assert check_main(tmp_path / "log") == 1
    assert f"line {line}: {rule}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "header", [{}, {"kind": "header"}, {"kind": "header", "schema": 99}, {**HEADER, "page_size": "4"}, alloc(1)]
)
def test_a_wrong_header_is_rejected(tmp_path, header):
    assert violation(tmp_path, [], header=header) == ("header", 1)


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens"])
def test_a_step_beyond_its_limits_is_rejected(tmp_path, limit):
    events = [alloc(1), alloc(2, 2), step(0, [(1, 0, 1), (2, 0, 1)], used=2)]
    assert run(tmp_path, events, header={**HEADER, limit: 2}).stats.tokens == 2
    assert violation(tmp_path, events, header={**HEADER, limit: 1}) == ("limits", 4)


@pytest.mark.parametrize("seed", range(4))
def test_losing_any_one_event_of_a_run_is_noticed(tmp_path, seed):
    """Drops each table event of a run in turn: the replay must fail, never end with other tables than the logger's."""
    sim = Sim(tmp_path / "log", seed=seed, requests=6, offload=True).run()
    lines = (tmp_path / "log").read_text().splitlines()
    for i, line in enumerate(lines[1:], 1):
        if json.loads(line)["kind"] in ("alloc", "share", "copy", "free", "swap_out", "swap_in", "restore"):
            (tmp_path / "cut").write_text("\n".join(lines[:i] + lines[i + 1 :]) + "\n")
            with pytest.raises(LogViolation):
                list(replay(tmp_path / "cut"))
    assert sim.trace


# -- damaged files


def test_a_torn_last_line_is_reported_and_tolerated(tmp_path, capsys):
    write(tmp_path / "log", [alloc(1), step(0, [(1, 0, 1)], used=1)], end='\n{"step":1,"t_u')
    assert check_main(tmp_path / "log") == 0
    assert "line 4 is torn" in capsys.readouterr().err


def test_a_damaged_line_elsewhere_is_rejected(tmp_path, capsys):
    path = write(tmp_path / "log", [alloc(1)])
    path.write_text(path.read_text() + '{"step":\n' + json.dumps(free(1)) + "\n")
    assert check_main(path) == 1
    assert "line 3: json: " in capsys.readouterr().err


def test_runs_in_one_file_are_checked_one_by_one(tmp_path, capsys):
    path = write(tmp_path / "log", [alloc(1)], end='\n{"st\n')
    path.write_text(path.read_text() + json.dumps(HEADER) + "\n" + json.dumps(alloc(1)) + "\n")
    assert [r.tables for r in replay(path)] == [{1: {0: 1}}, {1: {0: 1}}]
    assert check_main(path) == 0
    out = capsys.readouterr()
    assert "run 2: every table" in out.out and "line 3 is torn" in out.err


def test_an_empty_or_missing_file_is_no_log(tmp_path, capsys):
    (tmp_path / "log").write_text("")
    assert check_main(tmp_path / "log") == 1
    assert check_main(tmp_path / "none") == 2
    assert "none: cannot be read: No such file" in capsys.readouterr().err


# -- totals


def test_waste_is_split_by_the_papers_rules(tmp_path):
    """R29: token states, reserved, internal, and the rest; by hand for one sequence of 6 tokens in a pool of 8 pages of 4.

    Three steps write 2, 3 and 1 tokens. Page 1 has 2 empty slots in step 0, filled later: reserved. Page 2 has 3 empty
    slots in step 1 and 2 in step 2; one of them is filled, two never: 1 reserved and 2 + 2 internal.
    """
    events = [
        alloc(1), step(0, [(1, 0, 2)], used=1, wasted=2),
        *late([alloc(2, logical=1), step(1, [(1, 2, 3)], used=2, wasted=3)]),
        *late([step(2, [(1, 5, 1)], used=2, wasted=2), free(2, logical=1), free(1, cached=True), step(3, cached=1)], 2),
    ]  # fmt: skip
    stats = run(tmp_path, events).stats
    slots = 4 * 8 * 4
    waste = stats.waste
    assert waste.token_states == (2 + 5 + 6) / slots
    assert waste.reserved == (2 + 1) / slots
    assert waste.internal == (2 + 2) / slots
    assert waste.cached == 4 / slots
    assert waste.free == (7 + 6 + 6 + 7) * 4 / slots
    assert waste.token_states + waste.reserved + waste.internal + waste.external_and_other == 1


def test_saving_is_one_minus_physical_over_logical(tmp_path):
    """R15: two sequences naming one page save half; averaged with a step without sharing, a quarter."""
    events = [alloc(1), step(0, [(1, 0, 2)], used=1), *late([share(1), step(1, used=1, shared=1)])]
    stats = run(tmp_path, events).stats
    assert stats.saving == 0.25
    assert stats.saving_of_mean == pytest.approx(1 - 1 / 1.5)


def test_the_summary_names_its_numbers(tmp_path, capsys):
    Sim(tmp_path / "log", seed=2, offload=True).run()
    assert check_main(tmp_path / "log") == 0
    text = capsys.readouterr().out
    for word in (
        "concurrency",
        "lengths",
        "token states",
        "reserved",
        "memory saved by sharing",
        "copies",
        "frees",
        "preemptions",
        "peak",
    ):
        assert word in text
    counted = [json.loads(line)["kind"] for line in (tmp_path / "log").read_text().splitlines()]
    assert f"copies {counted.count('copy')} " in text and f"frees {counted.count('free')}," in text


def test_a_sparkline_keeps_its_peaks():
    assert sparkline([0, 0, 7, 0], width=2) == "▁█"
    assert sparkline([0]) == "▁"


def test_the_documents_list_every_rule_and_kind():
    root = pathlib.Path(__file__).parents[2]
    text = (root / "docs" / "events.md").read_text()
    listed = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.M))
    code = "".join((root / "jaxpaged" / "events" / name).read_text() for name in ("reader.py", "pool.py", "replay.py"))
    raised = set(re.findall(r'(?:fail\(|LogViolation\((?:1|line|held\[0\]), )\s*"([a-z-]+)"', code))
    raised |= {"write-gap", "rewrite", "finished"}  # chosen by an expression
    assert listed == raised
    assert raised - {"json", "header", "limits"} <= {rule for _, rule, _ in BROKEN.values()} | {"write"}
    assert all(f"`{kind}`" in text for kind in KINDS)
