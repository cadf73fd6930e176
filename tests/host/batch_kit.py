"""Short ways to set up and run a job over the fake engine."""

import json
from pathlib import Path

from jaxpaged.batch.config import JobConfig, job_from_mapping
from jaxpaged.batch.job import run_job
from tests.host.batch_fake import FakeEngine


def make_job(folder: Path, lines: bytes | str | list, *, name: str = "in.jsonl", **sections) -> JobConfig:
    """Writes the input (objects become JSON lines) and builds a job whose output is ``folder/out.jsonl``."""
    if isinstance(lines, list):
        lines = "".join(json.dumps(line) + "\n" for line in lines)
    data = lines.encode() if isinstance(lines, str) else lines
    (folder / name).write_bytes(data)
    return job_from_mapping(
        {
            "model": sections.pop("model", "fake"),
            "engine": {"max_num_seqs": 4, **sections.pop("engine", {})},
            "sampling": sections.pop("sampling", {}),
            "input": {"path": str(folder / name), **sections.pop("input", {})},
            "output": {"path": str(folder / "out.jsonl"), "plot": False, **sections.pop("output", {})},
        }
    )


def run(job: JobConfig, engine: FakeEngine | None = None, **options):
    """Runs quietly; returns the summary."""
    return run_job(job, lambda: engine or FakeEngine(), quiet=True, **options)


def records(job: JobConfig) -> list[dict]:
    """The output's records."""
    raw = Path(job.output.path).read_bytes()
    assert raw == b"" or raw.endswith(b"\n")
    return [json.loads(line) for line in raw.splitlines()]
