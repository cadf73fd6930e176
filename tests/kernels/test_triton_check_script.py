"""``scripts/check_gpu.py`` works: its smoke mode runs every section on CPU, interpreted, from a plain checkout."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(out: pathlib.Path, *flags: str) -> subprocess.CompletedProcess:
    """The script as a user starts it, without this checkout on the module path."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), "--out", str(out), *flags]
    return subprocess.run(command, env=env, cwd=out, capture_output=True, text=True, check=False, timeout=500)


@pytest.mark.long
def test_smoke(tmp_path):
    done = run(tmp_path, "--smoke")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["finished"]
    rows = report["correctness"] + report["mutations"]
    assert {row["op"] for row in rows} >= {
        "pages past 2**31 elements",
        "write_kv, copy_pages, swap",
        "paged_attention",
        "write_kv",
    }
    assert all(row["passed"] for row in rows)
    assert all(row["us"] > 0 and row["xla_us"] > 0 for row in report["attention"])
    assert len(next(iter(report["tuning"]["trials"].values()))) == 2
    table = json.loads((tmp_path / "cpu.json").read_text())
    assert table["device"] == "cpu"
    text = (tmp_path / "report.md").read_text()
    assert "interpreted on CPU (smoke run: times mean nothing)" in text
    assert "## Correctness" in text and "## Attention" in text and "## Search" in text


def test_without_a_gpu_it_says_so(tmp_path):
    done = run(tmp_path)
    if done.returncode != 2:
        pytest.skip("this machine has a GPU")
    assert "jax[cuda12]" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_sections_end_when_their_time_is_over(tmp_path):
    """With no time at all every point is left out, and the report still comes."""
    done = run(tmp_path, "--smoke", "--only", "tune", "--minutes", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["finished"]
    assert set(report["tuning"]["trials"].values()) == {"left out: the section's time is over"}
