"""The HTML page in a real browser: scrubbed, its numbers are the replay's; it needs no network; no id can break out."""

import json
import re

import pytest

from jaxpaged.events import build_page, replay, show_main
from jaxpaged.scheduler.events import EventLog
from tests.e2e import chromium
from tests.host.events_drive import drive
from tests.host.events_sim import Sim

pytestmark = pytest.mark.skipif(chromium.BINARY is None, reason="needs a chromium binary (Debian: apt-get install chromium)")

COUNT_NAMES = ("owned", "shared", "cached", "free", "host", "wasted")


def frames(path):
    """What the page must show per step, from the Python replay."""
    found = []

    def look(pool):
        used = len(pool.ref)
        found.append(
            {
                "owned": used - pool.num_shared,
                "shared": pool.num_shared,
                "cached": len(pool.cached),
                "free": pool.num_pages - 1 - used - len(pool.cached),
                "host": len(pool.host_ref) + len(pool.offloaded),
                "wasted": used * pool.page_size - pool.filled_used,
                "tables": {seq: [table[i] for i in sorted(table)] for seq, table in pool.tables.items()},
                "away": {seq: [table[i] for i in sorted(table)] for seq, table in pool.host_tables.items()},
                "lengths": {seq: pool.lengths.get(seq, 0) for seq in (*pool.tables, *pool.host_tables)},
            }
        )

    (run,) = replay(path, each_step=look)
    return found, run


COUNTS = """Object.fromEntries(["owned", "shared", "cached", "free", "host", "wasted"].map(
    (name) => [name, Number(document.getElementById("count-" + name).textContent)]))"""

ROWS = """[...document.querySelectorAll("#row-list li")].map((row) => [Number(row.dataset.seq),
    Number(row.querySelector(".tokens").textContent), [...row.querySelectorAll(".chip")].map((chip) => chip.textContent)])"""

SLIDE = """(() => { const slider = document.getElementById("slider"); slider.value = %d;
    slider.dispatchEvent(new Event("input", { bubbles: true })); })()"""


@pytest.fixture(scope="module")
def browser():
    with chromium.Browser(width=1600, height=1400) as one:
        yield one


@pytest.fixture
def page(browser, tmp_path):
    """Opens the page of a log."""

    def open_log(log):
        assert show_main(log, tmp_path / "page.html") == 0
        browser.console.clear()
        browser.requests.clear()
        browser.open(tmp_path / "page.html")
        return browser

    yield open_log
    assert browser.console == []
    assert all(url.startswith(("file:", "data:")) for url in browser.requests), "the page asked the network"


def make_log(path, **more):
    Sim(path, **({"seed": 9, "offload": True, "page_size": 4, "num_pages": 40, "requests": 24} | more)).run()
    return path


def check_frame(browser, want):
    assert browser.eval(COUNTS) == {name: want[name] for name in COUNT_NAMES}
    rows = {seq: (tokens, chips) for seq, tokens, chips in browser.eval(ROWS)}
    assert bool(rows) == bool(want["lengths"])
    for seq, (tokens, chips) in rows.items():
        pages = [str(p) for p in want["tables"].get(seq, [])] + [f"h{p}" for p in want["away"].get(seq, [])]
        shown = [chip for chip in chips if chip != "·"]  # pages given back behind the window
        assert (tokens, shown) == (want["lengths"][seq], pages)
    return rows


@pytest.mark.parametrize("seed", [9, 10])
def test_scrubbing_shows_the_replays_numbers(page, tmp_path, seed):
    """Every step, visited forwards, backwards and at random, has the counts and block tables of the Python replay."""
    log = make_log(tmp_path / "log", seed=seed, num_pages=30)
    want, run = frames(log)
    browser = page(log)
    assert any(frame["host"] for frame in want) and any(frame["shared"] for frame in want) and run.stats.kinds["copy"]
    order = [*range(len(want)), *reversed(range(len(want))), *[(i * 7919) % len(want) for i in range(len(want))]]
    for frame in order:
        browser.eval(SLIDE % frame)
        check_frame(browser, want[frame])
        assert browser.text("#step") == str(frame)
    browser.eval(SLIDE % len(want))
    assert browser.text("#step") == "end"
    assert browser.eval(COUNTS) == {"owned": 0, "shared": 0, "cached": len(run.cached), "free": 29 - len(run.cached),
                                    "host": len(run.offloaded), "wasted": 0}  # fmt: skip


@pytest.mark.parametrize("mode", ["swap", "offload", "window", "auto"])
def test_a_run_of_the_real_scheduler_is_shown_exactly(page, tmp_path, mode):
    """Forks, beams, swaps, offloads, pins and windows of the real scheduler: each step as the Python replay has it."""
    drive(tmp_path / "log", mode, 1, 120, each=lambda follower: None)
    want, _ = frames(tmp_path / "log")
    browser = page(tmp_path / "log")
    for frame in [*range(len(want)), len(want) // 2, 0]:
        browser.eval(SLIDE % frame)
        check_frame(browser, want[frame])


def test_keys_and_buttons_move_through_the_steps(page, tmp_path):
    log = make_log(tmp_path / "log")
    want, _ = frames(log)
    browser = page(log)
    browser.eval("document.body.focus()")
    for _ in range(3):
        browser.key("ArrowRight")
    assert browser.text("#step") == "3"
    browser.key("ArrowRight", shift=True)
    assert browser.text("#step") == "13"
    check_frame(browser, want[13])
    browser.key("ArrowLeft")
    assert browser.text("#step") == "12"
    browser.key("End")
    assert browser.text("#step") == "end"
    browser.key("Home")
    assert browser.text("#step") == "0"
    for button, step in (("#next", "1"), ("#next", "2"), ("#back", "1"), ("#last", "end"), ("#first", "0")):
        x, y, width, height = browser.box(button)
        browser.click(x + width / 2, y + height / 2)
        assert browser.text("#step") == step
    assert browser.eval("document.getElementById('slider').getAttribute('aria-valuetext')").startswith("step 0: ")


def test_playing_runs_to_the_end(page, tmp_path):
    browser = page(make_log(tmp_path / "log", requests=6))
    browser.eval("document.getElementById('speed').value = '120'")
    browser.eval("document.getElementById('play').click()")
    assert browser.eval("document.getElementById('play').getAttribute('aria-label')") == "Pause"
    browser.until("document.getElementById('step').textContent === 'end'")
    assert browser.eval("document.getElementById('play').getAttribute('aria-label')") == "Play"


def test_the_curves_move_the_cursor(page, tmp_path):
    log = make_log(tmp_path / "log")
    want, _ = frames(log)
    browser = page(log)
    x, y, width, height = browser.box("#curves")
    middle = x + 44 + (width - 56) / 2
    browser.click(middle, y + height / 2)
    frame = browser.eval("Number(document.body.dataset.frame)")
    assert abs(frame - len(want) / 2) <= 1
    check_frame(browser, want[frame])


def test_a_page_tells_its_owners_and_history(page, tmp_path):
    log = make_log(tmp_path / "log")
    want, _ = frames(log)
    frame = max(range(len(want)), key=lambda i: want[i]["shared"])
    pages = [p for table in want[frame]["tables"].values() for p in table]
    busy = max(pages, key=pages.count)
    browser = page(log)
    browser.eval(SLIDE % frame)
    x, y, width, _ = browser.box("#map")
    # the cells have one size: find it from the canvas as the page lays it out
    cell = next(c for c in range(42, 3, -1) if -(-39 // max(1, int((width - 4) // c))) * c <= 340)
    columns = min(39, int((width - 4) // cell))
    browser.mouse("mouseMoved", x + 2 + (busy - 1) % columns * cell + cell / 2, y + 2 + (busy - 1) // columns * cell + cell / 2)
    assert browser.text("#inspect-title") == f"Page {busy}"
    owners = browser.eval("[...document.querySelectorAll('.owners li button')].map((b) => b.textContent)")
    found = sorted(int(re.search(r" · (\d+)$", owner)[1]) for owner in owners)
    assert found == sorted(seq for seq, table in want[frame]["tables"].items() if busy in table)
    assert f"shared by {len(found)}" in browser.text(".facts")
    events = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    latest = [
        e for e in events if busy in (e.get("page"), e.get("src") if e["kind"] == "copy" else None) and e["step"] <= frame
    ]
    steps = browser.eval("[...document.querySelectorAll('.past .step')].map((b) => Number(b.textContent))")
    assert steps and max(steps) <= frame and len(steps) <= 9
    assert browser.text(".past li span").startswith("page ") and len(latest) >= len(steps)


def test_picking_a_sequence_shows_its_table_and_stays_while_scrubbing(page, tmp_path):
    log = make_log(tmp_path / "log")
    want, _ = frames(log)
    browser = page(log)
    browser.eval(SLIDE % 10)
    seq = browser.eval("Number(document.querySelector('#row-list li').dataset.seq)")
    browser.eval("document.querySelector('#row-list li button').click()")
    table = "[...document.querySelectorAll('#picked-table .chip')].map((chip) => Number(chip.textContent))"
    assert browser.eval(table) == want[10]["tables"][seq]
    assert browser.eval("document.querySelector('#row-list li button').getAttribute('aria-pressed')") == "true"
    browser.key("ArrowRight")
    assert browser.eval(table) == want[11]["tables"].get(seq, [])
    browser.key("Escape")
    assert browser.text("#inspect-title") == "Nothing picked"


def test_the_map_is_painted(page, tmp_path):
    """The map is not blank, changes with the step, and is the same again at the same step."""
    browser = page(make_log(tmp_path / "log"))
    image = "document.getElementById('map').toDataURL()"
    blank = browser.eval("""(() => { const map = document.getElementById("map"), copy = document.createElement("canvas");
        copy.width = map.width; copy.height = map.height; return copy.toDataURL(); })()""")
    browser.eval(SLIDE % 3)
    third = browser.eval(image)
    browser.eval(SLIDE % 20)
    later = browser.eval(image)
    browser.eval(SLIDE % 3)
    assert len({blank, third, later}) == 3
    assert browser.eval(image) == third


EVIL = '</script><script>document.title="broken"</script>"\'<img src=x onerror=alert(1)>&amp;\u2028'


def test_a_hostile_request_id_is_only_text(page, tmp_path):
    log = EventLog(tmp_path / "log")
    log.begin_step(0)
    log.emit("admit", request=EVIL)
    log.emit("alloc", request=EVIL, seq=0, logical=0, page=1, before=0, after=1)
    log.emit("step", tokens=1, used=1, shared=0, cached=0, free=0, running=1, waiting=0, writes=[[0, 0, 1]])
    log.close()
    browser = page(tmp_path / "log")
    assert browser.eval("document.querySelectorAll('script').length") == 2
    assert browser.eval("document.querySelectorAll('img').length") == 0
    assert browser.eval("document.title") == "log · page pool"
    assert browser.eval("document.querySelector('#row-list b').textContent") == EVIL
    assert EVIL in browser.text("#happened")


def test_a_broken_log_is_shown_up_to_its_fault(page, tmp_path):
    log = make_log(tmp_path / "log")
    lines = log.read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if '"step":12' in line and '"alloc"' in line)
    log.write_text("\n".join([*lines[:cut], lines[cut].replace('"after":1', '"after":7')]) + "\n")
    browser = page(log)
    assert f"line {cut + 1}: count: " in browser.text("#problem")
    assert browser.eval("document.getElementById('problem').hidden") is False
    browser.key("End")
    assert browser.text("#step") == "end"


def test_runs_of_one_file_can_be_chosen(page, tmp_path):
    log = make_log(tmp_path / "log", requests=3)
    Sim(log, seed=1, requests=5).run()
    steps = [run.stats.steps for run in replay(log)]
    browser = page(log)
    assert browser.eval("Number(document.getElementById('slider').max)") == steps[0]
    browser.eval("(() => { const r = document.getElementById('run'); r.value = '1'; r.dispatchEvent(new Event('change')); })()")
    browser.until(f"document.getElementById('slider').max === '{steps[1]}'")


@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_fits_its_window(page, browser, tmp_path, width):
    log = make_log(tmp_path / "log")
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        page(log)
        assert browser.eval("document.documentElement.scrollWidth") <= width
    finally:
        browser.call("Emulation.setDeviceMetricsOverride", width=1600, height=1400, deviceScaleFactor=1, mobile=False)


@pytest.mark.long
def test_a_large_log_scrubs_quickly(page, tmp_path):
    """10,000 pages and 10,000 steps: a jump to any step and its drawing take less than a quarter of a second each."""
    log = EventLog(tmp_path / "log")
    table: dict[int, list[int]] = {seq: [] for seq in range(100)}
    for step in range(10_000):
        log.begin_step(step)
        seq = step % 100
        if step // 100 < 100:
            page_id = 1 + seq * 100 + len(table[seq])
            log.emit("alloc", request=f"r{seq}", seq=seq, logical=len(table[seq]), page=page_id, before=0, after=1)
            table[seq].append(page_id)
        used = min(step + 1, 10_000)
        log.emit("step", tokens=1, used=used, shared=0, cached=0, free=10_000 - used, running=100, waiting=0,
                 writes=[[seq, step // 100, 1]])  # fmt: skip
    log.close()
    browser = page(tmp_path / "log")
    assert "10,000 pages" in browser.text("#subtitle")
    times = browser.eval("""(async () => { const out = [];
        for (const frame of [9999, 1, 5000, 9000, 2000, 7000, 3, 10000]) {
          const slider = document.getElementById("slider"), start = performance.now();
          slider.value = frame; slider.dispatchEvent(new Event("input"));
          out.push(performance.now() - start);
          await new Promise(requestAnimationFrame);
        } return out; })()""")
    assert sorted(times)[len(times) // 2] < 250, times


def test_the_page_names_no_other_place(tmp_path):
    """Self-contained: no address, import or external resource in the document."""
    text = build_page(make_log(tmp_path / "log"))
    assert not re.search(r"https?://|@import|<link[^>]+stylesheet|\bfetch\(|XMLHttpRequest|url\((?!data:)", text)
    assert "default-src 'none'" in text
