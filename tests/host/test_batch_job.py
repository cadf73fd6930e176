"""The job over a fake engine: one record for every line, in input order, whatever order the engine finishes in."""

import dataclasses
import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged.batch import job as job_module
from jaxpaged.batch.errors import JobError
from jaxpaged.batch.writer import RecordWriter
from jaxpaged.errors import ConfigError
from tests.host.batch_fake import MAX_MODEL_LEN, FakeEngine
from tests.host.batch_kit import make_job, records, run

PROMPTS = [{"id": f"q{i}", "prompt": f"prompt number {i * 7919}"} for i in range(30)]


def test_every_line_gets_its_own_result_in_input_order(tmp_path):
    job, engine = make_job(tmp_path, PROMPTS, sampling={"max_tokens": 30}), FakeEngine()
    summary = run(job, engine)
    found = records(job)
    assert [record["id"] for record in found] == [f"q{i}" for i in range(30)]
    lengths = [len(record["outputs"][0]["token_ids"]) for record in found]
    assert lengths != sorted(lengths) and len(set(lengths)) > 5  # the engine did finish out of order
    for line, record in zip(PROMPTS, found, strict=True):
        alone = make_job(tmp_path, [line], name="alone.jsonl", sampling={"max_tokens": 30, "temperature": 0.0})
        assert record["usage"]["prompt_tokens"] == len(line["prompt"])
        assert record["usage"]["total_tokens"] == len(line["prompt"]) + len(record["outputs"][0]["token_ids"])
        assert alone.sampling["max_tokens"] == 30
    assert (summary.total, summary.written, summary.errors.total(), summary.complete) == (30, 30, 0, True)


def test_bad_lines_become_error_records_with_true_line_numbers_and_stop_nothing(tmp_path):
    """B56: one file with every fault: a list, broken JSON, null, an unknown field, an over-long prompt, a repeated id, invalid
    UTF-8, a request that fails while running, one larger than the pool and an empty prompt, between good lines and a blank."""
    lines = [
        b'{"id": "good", "prompt": "hello"}',
        b"",
        b"[1,2]",
        b'{"id": "broken", "prompt"',
        b"null",
        b'{"id": "field", "prompt": "a", "max_tokns": 3}',
        b'{"id": "long", "prompt": "' + b"x" * MAX_MODEL_LEN + b'"}',
        b'{"id": "good", "prompt": "again"}',
        b'{"id": "utf8", "prompt": "\xc3\x28"}',
        b'{"id": "dies", "prompt": "FAIL here"}',
        b'{"id": "wide", "prompt": "a", "n": 1000}',
        b'{"id": "empty", "prompt": ""}',
        b'{"id": "last", "prompt": "bye"}',
    ]
    job = make_job(tmp_path, b"\n".join(lines))
    summary = run(job)
    found = [(r["id"], r["error"]["type"], r["error"]["line"]) if "error" in r else (r["id"], "ok", None) for r in records(job)]
    assert found == [
        ("good", "ok", None),
        (None, "not_an_object", 3),
        (None, "invalid_json", 4),
        (None, "not_an_object", 5),
        ("field", "invalid_request", 6),
        ("long", "invalid_request", 7),
        ("good", "duplicate_id", 8),
        (None, "invalid_utf8", 9),
        ("dies", "engine_error", 10),
        ("wide", "capacity", 11),
        ("empty", "invalid_request", 12),
        ("last", "ok", None),
    ]
    assert summary.total == summary.written == 12
    assert summary.errors == {
        "not_an_object": 2,
        "invalid_json": 1,
        "invalid_request": 3,
        "duplicate_id": 1,
        "invalid_utf8": 1,
        "engine_error": 1,
        "capacity": 1,
    }
    assert "10 (1 capacity, 1 duplicate_id" in summary.text()


def test_a_record_in_full(tmp_path):
    lines = [{"id": "a", "prompt": "hi", "max_tokens": 2, "n": 2, "logprobs": 1, "seed": 1}]
    job = make_job(tmp_path, lines, output={"include_prompt": True, "include_cached_tokens": True})
    run(job)
    (record,) = records(job)
    assert (record["id"], record["prompt"], [out["index"] for out in record["outputs"]]) == ("a", "hi", [0, 1])
    first = record["outputs"][0]
    assert first.keys() == {"index", "text", "token_ids", "finish_reason", "logprobs"} and first["finish_reason"] == "length"
    token = first["token_ids"][0]
    assert first["logprobs"][0]["token_id"] == token and first["logprobs"][0]["logprob"] == (-0.5 if token == 1 else -1.25)
    assert [top["token"] for top in first["logprobs"][0]["top"]] == (["t1"] if token != 1 else [])
    generated = sum(len(out["token_ids"]) for out in record["outputs"])
    assert record["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": generated,
        "total_tokens": 2 + generated,
        "cached_tokens": 0,
    }


def test_text_lines(tmp_path):
    job = make_job(tmp_path, "first prompt\n\nsecond prompt\n", name="in.txt", output={"include_prompt": True})
    run(job)
    assert [(record["id"], record["prompt"]) for record in records(job)] == [
        ("line-1", "first prompt"),
        ("line-3", "second prompt"),
    ]


def test_two_runs_write_the_same_bytes_though_nothing_is_seeded(tmp_path):
    job = make_job(tmp_path, PROMPTS, sampling={"n": 2})
    run(job)
    first = (tmp_path / "out.jsonl").read_bytes()
    run(job, FakeEngine(max_num_seqs=2), overwrite=True)
    assert (tmp_path / "out.jsonl").read_bytes() == first
    run(make_job(tmp_path, PROMPTS, sampling={"n": 2}, engine={"seed": 1}), overwrite=True)
    assert (tmp_path / "out.jsonl").read_bytes() != first


def test_the_engine_is_fed_lazily_and_the_window_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(job_module, "WINDOW_FACTOR", 6)
    job, engine = make_job(tmp_path, [{"prompt": "x" * (i % 90 + 1)} for i in range(300)]), FakeEngine()
    open_lines = []
    step = engine.step

    def watched():
        open_lines.append(len(engine.waiting) + len(engine.running))
        return step()

    engine.step = watched
    assert run(job, engine).written == 300
    assert max(open_lines) == 4 * 4  # ADMIT_FACTOR * max_num_seqs
    assert [record["id"] for record in records(job)] == [f"line-{i}" for i in range(1, 301)]


def test_an_existing_output_is_never_overwritten_by_accident(tmp_path):
    job = make_job(tmp_path, PROMPTS)
    run(job)
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(JobError, match=r"--resume goes on with it, --overwrite starts over"):
        run(job)
    with pytest.raises(JobError, match="give one of them"):
        run(job, resume=True, overwrite=True)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_overwriting_keeps_the_old_output_until_the_model_is_loaded(tmp_path):
    job = make_job(tmp_path, PROMPTS)
    run(job)
    before = (tmp_path / "out.jsonl").read_bytes()

    def broken():
        raise ConfigError("model: no such file")

    with pytest.raises(ConfigError):
        job_module.run_job(job, broken, overwrite=True, quiet=True)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert run(job, resume=True).resumed == 30


def test_an_empty_input_is_a_finished_job_without_an_engine(tmp_path):
    job = make_job(tmp_path, b"\n\n")
    summary = job_module.run_job(job, lambda: pytest.fail("no engine is needed"), quiet=True)
    assert summary.complete and summary.total == 0 and records(job) == []


def test_output_and_input_must_differ(tmp_path):
    job = make_job(tmp_path, PROMPTS, output={"path": str(tmp_path / "x" / ".." / "in.jsonl")})
    (tmp_path / "x").mkdir()
    with pytest.raises(JobError, match="is the input file"):
        run(job)


def test_a_missing_folder_is_made(tmp_path):
    path = tmp_path / "no" / "where" / "out.jsonl"
    run(make_job(tmp_path, PROMPTS, output={"path": str(path)}))
    assert path.is_file()
    with pytest.raises(JobError, match=r"output\.path: cannot open '.*out\.jsonl/deeper\.jsonl'"):
        run(make_job(tmp_path, PROMPTS, output={"path": str(path / "deeper.jsonl")}))


def test_no_permission_is_named_before_the_model_is_loaded(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("jaxpaged.batch.writer.os.open", refuse)  # root may write anywhere, so the refusal is simulated
    with pytest.raises(JobError, match="no permission to write"):
        job_module.run_job(make_job(tmp_path, PROMPTS), lambda: pytest.fail("loaded"), quiet=True)


def test_two_jobs_cannot_write_one_output(tmp_path):
    job = make_job(tmp_path, PROMPTS)

    def meanwhile():
        with pytest.raises(JobError, match="another job is writing"):
            run(job, resume=True)
        return FakeEngine()

    assert job_module.run_job(job, meanwhile, quiet=True).complete


def limited_run(job, folder, limit_bytes, *flags):
    (folder / "job.yaml").write_text(json.dumps(as_mapping(job)))
    program = [sys.executable, "-m", "tests.host.batch_fake", str(folder / "job.yaml"), *flags]

    def limit():
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(program, capture_output=True, text=True, preexec_fn=limit if limit_bytes else None, check=False)


def as_mapping(job):
    return {
        "model": job.engine.model,
        "engine": {"max_num_seqs": job.engine.max_num_seqs},
        "sampling": job.sampling,
        "input": {"path": job.input.path},
        "output": {"path": job.output.path, "plot": False},
    }


def test_a_full_disk_is_a_clear_error_and_what_is_there_can_be_resumed(tmp_path):
    """The file-size limit makes a real write stop in the middle of a record, as a full disk does."""
    job = make_job(tmp_path, PROMPTS)
    run(job)
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl.manifest.json").unlink()
    outcome = limited_run(job, tmp_path, len(whole) * 2 // 3)
    assert outcome.returncode == 1 and "error: cannot write" in outcome.stderr and "--resume" in outcome.stderr
    part = (tmp_path / "out.jsonl").read_bytes()
    assert part.endswith(b"\n") and whole.startswith(part) and 0 < len(part) < len(whole)
    assert limited_run(job, tmp_path, 0, "--resume").returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_progress_without_a_terminal_is_a_line_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpaged.batch.progress.LINE_INTERVAL_S", 0.02)
    stream = io.StringIO()
    job_module.run_job(make_job(tmp_path, PROMPTS), lambda: FakeEngine(step_s=0.01), stream=stream)
    lines = stream.getvalue().splitlines()
    assert lines and all("/30 done, " in line and "tokens/s" in line and "running" in line and "pool" in line for line in lines)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_is_a_bar(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpaged.batch.progress.BAR_INTERVAL_S", 0.0)
    stream = Terminal()
    job_module.run_job(make_job(tmp_path, PROMPTS), lambda: FakeEngine(step_s=0.01), stream=stream)
    assert "30/30" in stream.getvalue() and "tokens/s, 4 running, " in stream.getvalue() and "pool 12%" in stream.getvalue()


def test_a_job_that_is_told_to_be_quiet_is(tmp_path):
    stream = Terminal()
    job_module.run_job(make_job(tmp_path, PROMPTS), FakeEngine, stream=stream, quiet=True)
    assert stream.getvalue() == ""


def test_an_impossible_tokens_logprob_is_still_json(tmp_path):
    from jaxpaged.batch.formats import rounded

    assert [rounded(value) for value in (-0.12345678, float("-inf"), float("nan"), 0)] == [-0.123457, -9999.0, -9999.0, 0]


def test_the_summary_and_the_picture(tmp_path):
    job = make_job(tmp_path, PROMPTS, output={"plot": True})
    text = run(job).text()
    for word in (
        "30 of 30 done",
        "generated",
        "tokens/s",
        "peak 8 of 64 pages",
        "preemptions",
        "compilations: 3",
        "out.jsonl.pool.png",
    ):
        assert word in text
    assert (tmp_path / "out.jsonl.pool.png").read_bytes().startswith(b"\x89PNG")


def test_the_trace_of_a_long_job_stays_small_and_keeps_its_peak():
    from jaxpaged.batch.plot import MAX_SAMPLES, PoolTrace
    from jaxpaged.outputs import EngineStats

    trace = PoolTrace()
    for step in range(20_000):
        trace.add(step * 1.0, EngineStats(num_pages=100, num_used_pages=99 if step == 12_345 else 1))
    assert len(trace.samples) < MAX_SAMPLES and trace.peak_used == 99
    assert trace.samples[0].time_s == 0 and trace.samples[-1].time_s > 19_900
    gaps = {b.time_s - a.time_s for a, b in zip(trace.samples, trace.samples[1:], strict=False)}
    assert gaps == {8.0}


def test_an_input_changed_meanwhile_is_noticed(tmp_path):
    job, engine = make_job(tmp_path, PROMPTS), FakeEngine()
    os.utime(job.input.path, (1, 1))
    step = engine.step

    def touch():
        os.utime(job.input.path, (2, 2))
        return step()

    engine.step = touch
    assert "changed while the job ran" in run(job, engine).text()


@pytest.mark.parametrize("field", ["input", "output"])
def test_the_event_log_is_a_file_of_its_own(tmp_path, field):
    job = make_job(tmp_path, PROMPTS)
    path = getattr(job, field).path
    job = dataclasses.replace(job, engine=dataclasses.replace(job.engine, event_log=path))
    before = Path(job.input.path).read_text()
    with pytest.raises(JobError, match=f"engine.event_log: .* is the {field} file"):
        run(job)
    assert Path(job.input.path).read_text() == before


def test_an_output_deleted_while_the_job_runs_is_an_error(tmp_path):
    job = make_job(tmp_path, PROMPTS)
    with RecordWriter(job.output.path) as writer:
        os.unlink(job.output.path)
        with pytest.raises(JobError, match="was deleted while the job ran"):
            writer.append([{"id": 1}])
