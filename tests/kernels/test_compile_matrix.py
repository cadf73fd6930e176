"""Compiling for devices that are not there: the quick set by default, everything in the long tail."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels.targets import TARGETS, Compiled, Job, Kernel, compile_for, compile_many, environment
from scripts import compile_matrix

PYTHON = compile_matrix.default_python()
needs_plugins = pytest.mark.skipif(
    PYTHON is None, reason="no .venv-compile with the TPU compiler and the CUDA plugin; make it with scripts/compile_env.sh"
)


def run(*arguments: str, timeout: float) -> str:
    """The matrix's output; fails the test if anything is wrong."""
    command = [sys.executable, str(compile_matrix.ROOT / "scripts" / "compile_matrix.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@needs_plugins
@pytest.mark.timeout(900)
def test_quick_set_is_within_budget():
    """The main kernels compile for two TPUs and a GPU, in place, and take no more instructions than recorded."""
    out = run("--quick", timeout=880)
    assert "0 wrong" in out


@needs_plugins
@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_kernel_and_step_is_within_budget():
    """Every op for every target, and whole steps of real models: compiled, in place, within budget."""
    out = run(timeout=2380)
    assert "0 wrong" in out


@needs_plugins
def test_a_failing_job_is_reported_and_the_others_go_on():
    """A job that raises, or takes the compiler's process down, is one failed report; the jobs after it are compiled."""
    here = os.path.dirname(__file__)
    jobs = [Job(name, f"compile_jobs:{name}") for name in ("dies", "raises", "doubles")]
    dies, raises, doubles = compile_many("v5e", jobs, python=PYTHON, paths=(here,))
    assert not dies.ok
    assert "died" in dies.error
    assert "no such thing" in raises.error
    assert doubles.ok
    assert doubles.in_place
    one = compile_for("h200", "compile_jobs:doubles", python=PYTHON, paths=(here,), donated=False)
    assert one.ok
    assert one.alias_bytes == 0


def report(**fields) -> Compiled:
    """A report of a decode kernel."""
    base = {
        "name": "decode",
        "target": "v5e",
        "jax_version": "1",
        "kernels": (Kernel("paged_decode.1", bundles=105, spills=10),),
    }
    return Compiled(**(base | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""),
        ({"error": "XlaRuntimeError: no"}, "does not compile"),
        ({"error": "KernelUnsupportedError: no"}, "refused"),
        ({"kernels": (Kernel("paged_decode.1", bundles=106, spills=10),)}, "106 bundles, budget 100"),
        ({"kernels": (Kernel("paged_decode.2", bundles=100, spills=40),)}, "40 spills"),
        ({"donated_bytes": 10, "alias_bytes": 9}, "aliases 9 of 10"),
        ({"donated_bytes": 10, "alias_bytes": 10, "large_copies": 2}, "copies the pool 2 times"),
        ({"donated_bytes": 2**30, "alias_bytes": 2**30, "temp_bytes": 2**24}, "temporary memory 16.0 MiB"),
        ({"target": "h200", "kernels": (Kernel("paged_decode", spills=8, registers=90),)}, "spills registers"),
        ({"target": "h200", "kernels": (Kernel("paged_decode", spills=0, registers=99),)}, "99 registers, budget 90"),
        ({"target": "h200", "ptxas_version": "13.0", "kernels": (Kernel("paged_decode", spills=0, registers=99),)}, ""),
        ({"target": "h200", "ptxas_version": "13.0", "kernels": (Kernel("paged_decode", spills=8, registers=90),)}, "spills"),
    ],
)
def test_what_counts_as_wrong(fields, words):
    """Every condition of the matrix is noticed, and a good report passes."""
    old = {"paged_decode": {"bundles": 100, "spills": 10, "registers": 90}}
    budget = {"1": {"v5e": {"decode": old}, "h200": {"decode": old, "ptxas": "12.9"}}}
    if fields.get("target") == "h200":
        fields = {"ptxas_version": "12.9"} | fields
    wrong = "; ".join(compile_matrix.judge(report(**fields), budget))
    assert (words in wrong) if words else not wrong


def test_recording_round_trip(tmp_path):
    """What is recorded is what is held against later; refusals are remembered as such."""
    refused = report(name="other", error="KernelUnsupportedError: no", kernels=())
    budget = json.loads(json.dumps(compile_matrix.to_budget([report(), refused], {})))
    assert not compile_matrix.judge(report(), budget)
    assert not compile_matrix.judge(refused, budget)
    assert compile_matrix.judge(report(kernels=(Kernel("paged_decode.1", bundles=200, spills=0),)), budget)


def test_budget_covers_every_job():
    """The recorded budget has an entry for every kernel of the full matrix, for at least one jax version."""
    budget = json.loads(compile_matrix.BUDGET.read_text())
    for target in TARGETS:
        names = {j.name for j in compile_matrix.jobs_for(target, False)}
        assert any(names <= set(versions.get(target, {})) for versions in budget.values()), target


def test_targets():
    """Every target says where its program runs and how fast its memory is; environments never touch the caller's devices."""
    for name, target in TARGETS.items():
        assert target.name == name
        assert target.bandwidth > 1e11
        assert target.memory_bytes > 1e10
        env = environment(target, "/dump")
        assert env["JAX_PLATFORMS"] == "cpu"
        assert "/dump" in env["LIBTPU_INIT_ARGS" if target.platform == "tpu" else "XLA_FLAGS"]
        assert "optimization_level" not in env.get("XLA_FLAGS", "optimization_level" * (target.platform == "gpu"))
    with pytest.raises(ValueError, match="a100"):
        compile_many("k80", [])
