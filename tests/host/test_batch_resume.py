"""An interrupted job goes on where it stopped; the output is the same bytes as an uninterrupted run's."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from jaxpaged.batch.errors import JobError
from jaxpaged.batch.job import run_job
from tests.host.batch_fake import FakeEngine
from tests.host.batch_kit import make_job, records, run

LINES = [{"id": f"q{i}", "prompt": f"prompt number {i * 7919}"} for i in range(60)]
LINES[7] = {"id": "bad", "prompt": 3}
LINES[20] = {"id": "q3", "prompt": "a repeated id"}


@pytest.fixture
def finished(tmp_path):
    """A finished job and its bytes."""
    job = make_job(tmp_path, LINES)
    run(job)
    return job, (tmp_path / "out.jsonl").read_bytes()


def cut(job, size):
    os.truncate(job.output.path, size)


def test_every_length_a_kill_can_leave_is_resumed_to_the_same_bytes(finished, tmp_path):
    job, whole = finished
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    sizes = {0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[7], ends[20] - 3, ends[-2], ends[-1] - 1, ends[-1]}
    sizes |= set(random.Random(0).sample(range(len(whole)), 25))
    for size in sorted(sizes):
        cut(job, size)
        engine = FakeEngine()
        summary = run_job(job, lambda engine=engine: engine, resume=True, quiet=True)
        assert (tmp_path / "out.jsonl").read_bytes() == whole, size
        done = sum(end <= size for end in ends)
        assert summary.resumed == done and summary.written == 60 - done
        assert summary.errors == {"invalid_request": 1, "duplicate_id": 1}  # those on disk from before are counted too
        first_lines = {request.removeprefix("line-") for request in engine.log}
        assert not first_lines & {str(line) for line in range(1, done + 1)}  # nothing that was done is done again


def test_a_finished_job_needs_no_engine(finished):
    job, _ = finished
    summary = run_job(job, lambda: pytest.fail("loaded"), resume=True, quiet=True)
    assert summary.complete and summary.resumed == 60


def test_resume_of_nothing_is_a_start(tmp_path):
    job = make_job(tmp_path, LINES)
    assert run(job, resume=True).written == 60


def test_a_block_of_zeros_at_the_end_is_a_torn_record(finished, tmp_path):
    job, whole = finished
    cut(job, len(whole) // 2)
    with open(job.output.path, "ab") as file:
        file.write(b"\0" * 100)
    assert run(job, resume=True).torn_bytes > 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampling": {"temperature": 0.5}}, r"config changed \(sampling\.temperature: not set -> 0\.5\)"),
        ({"engine": {"page_size": 32}}, r"config changed \(engine\.page_size: null -> 32\)"),
        ({"model": "other"}, r'config changed \(model: "fake" -> "other"\)'),
        ({"output": {"include_prompt": True}}, r"output\.include_prompt: false -> true"),
    ],
)
def test_a_changed_config_is_refused_by_name(finished, tmp_path, changes, says):
    _, whole = finished
    with pytest.raises(JobError, match=says):
        run(make_job(tmp_path, LINES, **changes), resume=True)
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_a_changed_input_is_refused(finished, tmp_path):
    _, whole = finished
    with pytest.raises(JobError, match="the input file changed"):
        run(make_job(tmp_path, [*LINES[:-1], {"prompt": "new"}]), resume=True)
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_a_moved_input_is_not_a_changed_one(finished, tmp_path):
    job, _ = finished
    cut(job, 0)
    assert run(make_job(tmp_path, LINES, name="moved.jsonl"), resume=True).complete


def test_a_changed_input_format_is_refused_unless_it_is_what_was_decided(finished, tmp_path):
    assert run(make_job(tmp_path, LINES, input={"format": "jsonl"}), resume=True).complete
    with pytest.raises(JobError, match=r"input\.format changed \(jsonl -> text\)"):
        run(make_job(tmp_path, LINES, input={"format": "text"}), resume=True)


def test_changed_weights_are_refused_and_the_records_kept(finished):
    job, whole = finished
    cut(job, len(whole) // 2)
    kept = records_bytes(job)
    with pytest.raises(JobError, match="the weights changed"):
        run(job, FakeEngine(weights="others"), resume=True)
    assert records_bytes(job) == kept[: kept.rfind(b"\n") + 1]


def records_bytes(job):
    with open(job.output.path, "rb") as file:
        return file.read()


def test_a_missing_or_damaged_manifest_is_refused(finished, tmp_path):
    job, whole = finished
    manifest = tmp_path / "out.jsonl.manifest.json"
    manifest.write_text("{")
    with pytest.raises(JobError, match="no readable manifest"):
        run(job, resume=True)
    manifest.unlink()
    with pytest.raises(JobError, match="has no manifest"):
        run(job, resume=True)
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_records_that_belong_to_no_line_or_another_are_refused(finished, tmp_path):
    job, whole = finished
    lines = whole.splitlines(keepends=True)
    for edited, says in (
        (lines[1:], r"record 1 .*does not belong to input line 1"),
        ([*lines[:5], *lines[6:]], r"record 6 .*\(id 'q6'\) does not belong to input line 6 \(id 'q5'\)"),
        ([*lines, lines[-1]], r"record 61 .*has no input line"),
        ([*lines[:2], b"nonsense\n", *lines[3:]], r"record 3 .*is no record"),
    ):
        (tmp_path / "out.jsonl").write_bytes(b"".join(edited))
        with pytest.raises(JobError, match=says):
            run(job, resume=True)


def test_the_manifest_tells_what_the_job_was(finished, tmp_path):
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["weights"] == "fake-weights" and manifest["input_format"] == "jsonl" and len(manifest["input_sha256"]) == 64
    assert manifest["config"]["engine.max_num_seqs"] == 4 and manifest["versions"].keys() >= {"jaxpaged", "jax", "python"}
    assert not list(tmp_path.glob(".manifest-*"))


def start(tmp_path, *flags):
    (tmp_path / "job.yaml").write_text(
        json.dumps(
            {
                "model": "fake",
                "engine": {"max_num_seqs": 4},
                "input": {"path": str(tmp_path / "in.jsonl")},
                "output": {"path": str(tmp_path / "out.jsonl"), "plot": False},
            }
        )
    )
    program = [sys.executable, "-m", "tests.host.batch_fake", str(tmp_path / "job.yaml"), *flags]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_records(tmp_path, process, count):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (tmp_path / "out.jsonl").exists() and (tmp_path / "out.jsonl").read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.005)
    pytest.fail(f"no {count} records: {process.communicate()}")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_a_job_killed_at_random_moments_ends_with_the_same_bytes(finished, tmp_path, kills):
    job, whole = finished
    rng = random.Random(kills)
    survived = 0
    for _ in range(kills):
        for name in ("out.jsonl", "out.jsonl.manifest.json"):
            (tmp_path / name).unlink()
        process = start(tmp_path, "--step-s", "0.004")
        wait_for_records(tmp_path, process, rng.randrange(1, 50))
        time.sleep(rng.random() * 0.02)
        process.kill()
        process.communicate()
        survived += process.returncode == -signal.SIGKILL
        part = (tmp_path / "out.jsonl").read_bytes()
        assert whole.startswith(part)
        run(job, resume=True)
        assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert survived == kills


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_ends_a_job_cleanly(finished, tmp_path, signum, code):
    job, whole = finished
    for name in ("out.jsonl", "out.jsonl.manifest.json"):
        (tmp_path / name).unlink()
    process = start(tmp_path, "--step-s", "0.01")
    wait_for_records(tmp_path, process, 10)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "go on with --resume" in err and signal.Signals(signum).name in err and "of 60 done" in out
    part = (tmp_path / "out.jsonl").read_bytes()
    assert part.endswith(b"\n") and whole.startswith(part) and len(part) < len(whole)
    run(job, resume=True)
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_a_signal_while_the_model_loads_leaves_an_old_output_alone(finished, tmp_path):
    _, whole = finished
    process = start(tmp_path, "--overwrite", "--load-s", "30")
    assert process.stderr.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "SIGINT" in err
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_the_second_signal_kills_at_once(tmp_path):
    make_job(tmp_path, LINES)
    process = start(tmp_path, "--step-s", "20")
    assert process.stderr.readline() == "loading\n" and process.stderr.readline() == "loaded\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)  # the step goes on for twenty seconds
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM


def test_what_was_finished_out_of_turn_is_counted_when_interrupted(tmp_path):
    """The first line takes eleven steps: the others finish within three, wait for it, and are lost by the interrupt."""
    job = make_job(tmp_path, [{"prompt": "n" * 10}, *({"prompt": "a"} for _ in range(8))], sampling={"max_tokens": 40})
    engine = FakeEngine()
    step = engine.step

    def interrupt():
        if engine.totals["num_steps"] == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    engine.step = interrupt
    summary = run(job, engine)
    assert (summary.interrupted, summary.done, summary.lost, engine.aborted) == (signal.SIGINT, 0, 8, ["line-1"])
    assert "8 finished out of turn" in summary.text() and records(job) == []
    assert run(job, resume=True).written == 9
