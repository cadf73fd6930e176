"""The job through the real engine and the real command: formats, resume after a kill, and the demo's own files."""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from jaxpaged.batch.config import load_job
from jaxpaged.batch.formats import JsonlFormat
from jaxpaged.batch.items import Item
from jaxpaged.batch.reader import detect_format, read_items
from jaxpaged.cli import main
from tests.kit.bytes_tokenizer import write_bytes_tokenizer
from tests.kit.tiny import write_tiny

ROOT = Path(__file__).parents[2]
VOCAB = 266


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny(folder, vocab_size=VOCAB, bos_token_id=256, eos_token_id=257)
    write_bytes_tokenizer(folder)
    return folder


def write_job(folder, model, lines, **sections):
    data = lines if isinstance(lines, bytes) else "".join(json.dumps(line) + "\n" for line in lines).encode()
    (folder / "in.jsonl").write_bytes(data)
    job = {
        "model": str(model),
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "page_size": 4, "num_pages": 200, "dtype": "float32"},
        "sampling": {"max_tokens": 24, "ignore_eos": True, **sections.pop("sampling", {})},
        "input": {"path": str(folder / "in.jsonl")},
        "output": {"path": str(folder / "out.jsonl"), **sections.pop("output", {})},
    }
    job["engine"] |= sections.pop("engine", {})
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def command(job, *flags):
    return [sys.executable, "-m", "jaxpaged.cli", "generate", "--config", str(job), *flags]


def run(job, *flags, code=0):
    """The command in this process (which has JAX loaded); returns what it printed."""
    return run_argv("generate", "--config", str(job), *flags, code=code)


def run_argv(*argv, code=0):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        got = main(argv)
    assert got == code, err.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())


def output(folder):
    return (folder / "out.jsonl").read_bytes()


def records(folder):
    return [json.loads(line) for line in output(folder).splitlines()]


LINES = [
    {"id": f"q{i}", "prompt": "".join(chr(97 + (i * j) % 26) for j in range(1, 4 + i % 40)), "temperature": 0 if i % 3 else 1.0}
    for i in range(60)
]


def test_a_job_with_every_kind_of_line(tmp_path, model):
    """Good lines give results, each kind of bad one an error with its line number, and the job ends with exit code 3."""
    lines = [
        b'{"id": "plain", "prompt": "hello", "max_tokens": 5, "temperature": 0, "logprobs": 2}',
        b'{"id": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 1, "n": 2}',
        b'{"id": "ids", "prompt_token_ids": [256, 104, 105], "max_tokens": 3}',
        b"broken",
        b'{"id": "vocab", "prompt_token_ids": [99999]}',
        b'{"id": "long", "prompt": "' + b"x" * 400 + b'"}',
        b'{"id": "nothing", "prompt_token_ids": []}',
        b'{"id": "plain", "prompt": "again"}',
        b'{"id": "last", "prompt": "bye", "max_tokens": 1}',
    ]
    done = run(write_job(tmp_path, model, b"\n".join(lines)), code=3)
    found = {record["id"]: record for record in records(tmp_path) if "outputs" in record}
    bad = [(record["id"], record["error"]["line"]) for record in records(tmp_path) if "error" in record]
    assert bad == [(None, 4), ("vocab", 5), ("long", 6), ("nothing", 7), ("plain", 8)]
    assert list(found) == ["plain", "chat", "ids", "last"]
    assert [len(out["token_ids"]) for out in found["chat"]["outputs"]] == [5, 5]
    assert found["plain"]["usage"] == {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11}
    assert found["ids"]["usage"]["prompt_tokens"] == 3 and found["last"]["usage"]["completion_tokens"] == 1
    logprobs = found["plain"]["outputs"][0]["logprobs"]
    for token, entry in zip(found["plain"]["outputs"][0]["token_ids"], logprobs, strict=True):
        assert entry["token_id"] == token == entry["top"][0]["token_id"] and entry["logprob"] == entry["top"][0]["logprob"]
        assert len(entry["top"]) == 2
    assert "9 of 9 done" in done.stdout and "5 (" in done.stdout and "compilations" in done.stdout
    assert (tmp_path / "out.jsonl.pool.png").read_bytes().startswith(b"\x89PNG")


def test_openai_lines(tmp_path, model):
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
    }
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "hi", "max_tokens": 4}},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x" * 400}},
    ]
    run(write_job(tmp_path, model, lines), code=3)
    first, second, third = records(tmp_path)
    assert len(first["response"]["body"]["choices"][0]["logprobs"]["content"]) == 4
    assert second["response"]["body"]["usage"]["completion_tokens"] == 4
    assert third["response"]["status_code"] == 400 and third["response"]["body"]["error"]["line"] == 3


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_killed_at_random_moments_and_resumed_to_the_same_bytes(tmp_path, model, kills):
    """Greedy and unseeded sampled lines, through a pool small enough to preempt; resumed with a cold cache."""
    job = write_job(tmp_path, model, LINES, engine={"num_pages": 48}, output={"plot": False})
    run(job)
    whole, rng = output(tmp_path), random.Random(kills)
    assert len(records(tmp_path)) == len(LINES)
    for _ in range(kills):
        process = subprocess.Popen(command(job, "--overwrite"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
        wait_for_records(tmp_path, process, whole, rng.randrange(1, len(LINES) - 8))
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        part = output(tmp_path)
        assert whole.startswith(part) and part != whole
        done = run(job, "--resume")
        assert output(tmp_path) == whole, done.stdout
        assert f"{part.count(10)} by an earlier run" in done.stdout


def wait_for_records(folder, process, whole, count):
    """Until the job has replaced the old output and written ``count`` records."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        part = output(folder)
        if part != whole and part.count(b"\n") >= count:
            return
        time.sleep(0.002)
    pytest.fail(f"no {count} records: {process.communicate()[1].decode()}")


def test_a_signal_ends_the_job_cleanly(tmp_path, model):
    lines = [line | {"max_tokens": 150} for line in LINES]
    job = write_job(tmp_path, model, lines, output={"plot": False})
    process = subprocess.Popen(command(job), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (tmp_path / "out.jsonl").exists() and output(tmp_path):
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "go on with --resume" in err, err
    assert output(tmp_path).endswith(b"\n") and len(records(tmp_path)) < len(lines)
    run(job, "--resume")
    assert [record["id"] for record in records(tmp_path)] == [line["id"] for line in lines]


def test_other_weights_are_refused(tmp_path, model):
    job = write_job(tmp_path, tmp_path / "model", LINES[:5])
    for seed in (0, 1):
        write_tiny(tmp_path / "model", seed=seed, vocab_size=VOCAB, bos_token_id=256, eos_token_id=257)
        write_bytes_tokenizer(tmp_path / "model")
        if seed == 0:
            run(job)
    os.truncate(tmp_path / "out.jsonl", 50)
    assert "the weights changed" in run(job, "--resume", code=1).stderr


@pytest.mark.parametrize("wrong", ["missing", "truncated", "architecture"])
def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path, wrong):
    folder = tmp_path / "model"
    if wrong != "missing":
        write_tiny(folder, vocab_size=VOCAB, **({"architectures": ["OtherForCausalLM"]} if wrong == "architecture" else {}))
        write_bytes_tokenizer(folder)
    if wrong == "truncated":
        os.truncate(folder / "model.safetensors", 5000)
    done = run(write_job(tmp_path, folder, LINES[:1]), code=1)
    announced, error = done.stderr.splitlines()
    assert announced.startswith("loading ") and error.startswith("error: ")
    assert {"missing": "model", "truncated": "safetensors", "architecture": "OtherForCausalLM"}[wrong] in error


def test_one_prompt_is_streamed(model):
    flags = ["--prompt", "hello", "--max-tokens", "6", "--temperature", "0", "--num-pages", "64", "--ignore-eos"]
    flags += ["--max-num-batched-tokens", "32", "--page-size", "4"]
    argv = ["generate", "--model", str(model), *flags]
    plain, chat = run_argv(*argv), run_argv(*argv, "--chat")
    assert plain.stdout.endswith("\n") and plain.stdout.strip() and plain.stdout != chat.stdout


def test_the_demo_job_is_well_formed():
    """32 lines that parse, of lengths from a few words to about 1,500 tokens, fourteen of them under one system prompt."""
    job = load_job(ROOT / "configs" / "demo.yaml")
    path = ROOT / job.input.path
    items = list(read_items(path, JsonlFormat(job)))
    assert detect_format(path) == "jsonl" and len(items) == 32 and all(isinstance(item, Item) for item in items)
    chats = [item.prompt["messages"] for item in items if isinstance(item.prompt, dict)]
    assert len({messages[0]["content"] for messages in chats if messages[0]["role"] == "system"}) == 1
    assert sum(messages[0]["role"] == "system" for messages in chats) == 14 and any(
        isinstance(item.prompt, str) for item in items
    )


@pytest.mark.parametrize("name", ["llama3_8b_gpu.yaml", "llama3_8b_tpu.yaml"])
def test_the_example_jobs_are_valid(name):
    assert load_job(ROOT / "configs" / name).engine.dtype == "bfloat16"
