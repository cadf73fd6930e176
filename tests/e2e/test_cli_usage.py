"""The command line explains itself, and a user's mistake is one line that says what to do."""

import dataclasses
import os
import subprocess
import sys

import pytest

from jaxpaged.batch.summary import JobSummary
from jaxpaged.cli import build_parser, main
from jaxpaged.commands.flags import field_docs, given_flags
from jaxpaged.commands.generate import report
from jaxpaged.config import EngineConfig
from jaxpaged.sampling_params import SamplingParams

JOB = """\
model: {model}
input: {{path: {folder}/in.txt}}
output: {{path: {folder}/out.jsonl}}
"""


def fails(capsys, *argv):
    """Runs a command line that must fail; returns its exit code and its one line."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return code, err


def help_of(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        main([*argv, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_has_examples_exit_codes_and_a_flag_for_every_option(capsys):
    text = help_of(capsys, "generate")
    for word in ("examples:", "exit codes:", "--resume", "--overwrite", "--set", "input lines", "130"):
        assert word in text
    for cls in (EngineConfig, SamplingParams):
        for field in dataclasses.fields(cls):
            assert f"--{field.name.replace('_', '-')}" in text
            assert field_docs(cls)[field.name]  # every flag is explained
    assert "--no-enable-prefix-caching" in text and "tokens a page holds" in text


@pytest.mark.parametrize("command", [[], ["convert"], ["events"], ["events", "check"], ["events", "show"], ["info"]])
def test_every_command_has_help(capsys, command):
    assert "usage: jaxpaged" in help_of(capsys, *command)


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("jaxpaged 0.")


def test_flags_become_options_and_only_those_given():
    line = (
        "generate --page-size 32 --no-enable-prefix-caching --memory-fraction 0.5 --stop-token-ids 4 5 --top-p 0.9 --ignore-eos"
    )
    args = build_parser().parse_args(line.split())
    assert given_flags(args, "engine.") == {"page_size": 32, "enable_prefix_caching": False, "memory_fraction": 0.5}
    assert given_flags(args, "sampling.") == {"stop_token_ids": [4, 5], "top_p": 0.9, "ignore_eos": True}


@pytest.fixture
def job(tmp_path):
    (tmp_path / "in.txt").write_text("hello\n")
    (tmp_path / "job.yaml").write_text(JOB.format(model="nowhere", folder=tmp_path))
    return tmp_path / "job.yaml"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "wants --config FILE, or --model MODEL --prompt"),
        (("--config", "nope.yaml"), "'nope.yaml' does not exist"),
        (("--prompt", "a"), "--model: missing"),
        (("--prompt", "a", "--model", "m", "--set", "a=1"), "--set: belongs to --config"),
        (("--prompt", "a", "--model", "m", "--resume"), "--resume: belongs to --config"),
        (("--prompt", "a", "--model", "m", "--system", "s"), "--system: wants --chat"),
        (("--prompt", "a", "--model", "m", "--temperature", "-1"), "temperature: got -1.0"),
        (("--prompt", "a", "--model", "m", "--page-size", "0"), "page_size: got 0"),
    ],
)
def test_wrong_usage(capsys, argv, says):
    code, line = fails(capsys, "generate", *argv)
    assert code == 2 and says in line


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--set", "engine.page_sise=3"), "engine.page_sise: unknown key; did you mean 'page_size'"),
        (("--set", "sampling.temprature=3"), "did you mean 'temperature'"),
        (("--set", "page_size"), "wants KEY=VALUE"),
        (("--set", "input.path=/nope/x"), "'/nope/x' does not exist"),
        (("--max-num-seqs", "0"), "max_num_seqs: got 0"),
        (("--prompt", "a"), "--config and --prompt: give one of them"),
        (("--chat",), "--chat: belongs to --prompt"),
    ],
)
def test_wrong_job_options(capsys, job, argv, says):
    code, line = fails(capsys, "generate", "--config", str(job), *argv)
    assert code == 2 and says in line


def test_an_existing_output_and_a_file_for_a_folder_fail_before_anything_is_loaded(capsys, job, tmp_path):
    (tmp_path / "out.jsonl").write_text("{}\n")
    code, line = fails(capsys, "generate", "--config", str(job))
    assert code == 1 and "--resume goes on with it, --overwrite starts over" in line
    code, line = fails(capsys, "generate", "--config", str(job), "--set", f"output.path={tmp_path}/out.jsonl/deeper.jsonl")
    assert code == 1 and "output.path: cannot open" in line


def test_an_interrupted_overwrite_that_wrote_nothing_does_not_offer_to_resume(capsys):
    """The records on disk are still those of before: resuming would keep them."""
    summary = JobSummary(total=3, output="out.jsonl", interrupted=2)
    assert report(summary, overwrite=True) == 130
    assert "an earlier output is as it was, start over with --overwrite" in capsys.readouterr().err
    assert report(summary) == 130 and "after 0 of 3 records; go on with --resume" in capsys.readouterr().err


def test_a_job_that_lost_its_input_does_not_end_well(capsys):
    assert report(JobSummary(total=600, output="out.jsonl", written=300)) == 1
    assert "error: 300 of 600 records: the input file was changed" in capsys.readouterr().err


def test_logprobs_of_a_single_prompt_are_refused(capsys):
    code, line = fails(capsys, "generate", "--model", "m", "--prompt", "a", "--logprobs", "2")
    assert code == 2 and "--logprobs: belongs to --config" in line


def test_unknown_flags_and_half_flags_are_refused(capsys):
    for flag in ("--promt", "--max-tok"):
        with pytest.raises(SystemExit) as stop:
            main(["generate", flag, "3"])
        assert stop.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_the_command_line_starts_without_jax(tmp_path):
    """Help, version and config errors must not wait for JAX to load."""
    code = "import sys; from jaxpaged.cli import main; main(['generate', '--config', 'nope']); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert done.stdout.strip() == "False" and "does not exist" in done.stderr
