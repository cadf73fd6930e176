"""Job files are strict: a wrong key or value is named with its path and, where there is one, the nearest valid name."""

import pytest

from jaxpaged.batch.config import load_job, parse_override
from jaxpaged.errors import ConfigError

GOOD = """\
model: ./llama
engine: {page_size: 16, max_num_seqs: 8}
sampling:
  temperature: 1e-3
  max_tokens: 20
input: {path: in.jsonl}
output: {path: out.jsonl}
"""


def load(tmp_path, text, overrides=None):
    (tmp_path / "job.yaml").write_text(text)
    return load_job(tmp_path / "job.yaml", overrides)


def test_a_whole_job(tmp_path):
    job = load(tmp_path, GOOD)
    assert (job.engine.model, job.engine.page_size, job.engine.max_num_seqs) == ("./llama", 16, 8)
    assert job.sampling == {"temperature": 0.001, "max_tokens": 20}
    assert (job.input.path, job.input.format, job.output.path, job.output.plot) == ("in.jsonl", "auto", "out.jsonl", True)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("engine:", "engin:", r"job\.engin: unknown key; did you mean 'engine'"),
        ("page_size", "pagesize", r"engine\.pagesize: unknown key; did you mean 'page_size'"),
        ("max_tokens", "max_token", r"sampling\.max_token: .*did you mean 'max_tokens'"),
        ("temperature: 1e-3", "temperature: -1", r"sampling\.temperature: got -1"),
        ("temperature: 1e-3", "beam_width: 2\n  temperature: 1", r"sampling\.temperature: not a parameter of beam search"),
        ("page_size: 16", "page_size: 0", r"page_size: got 0"),
        ("page_size: 16", "model: x", r"engine\.model: the model is named at the top level"),
        ("input: {path: in.jsonl}", "input: in.jsonl", r"input: got str, wants a mapping"),
        ("path: in.jsonl", "path: in.jsonl, format: jsnl", r"input\.format: got 'jsnl'.*did you mean 'jsonl'"),
        ("{path: out.jsonl}", "{path: out.jsonl, plto: false}", r"output\.plto: .*did you mean 'plot'"),
        ("{path: out.jsonl}", "{path: out.jsonl, plot: 3}", r"output\.plot: got 3"),
        ("{path: out.jsonl}", "{path: ''}", r"output\.path: got ''"),
        ("model: ./llama", "", r"job: missing model"),
        ("model: ./llama", "model: [a]", r"model: got \['a'\]"),
        ("max_tokens: 20", "max_tokens: 20\n  max_tokens: 30", r"'max_tokens' is given twice"),
        ("engine: {", "engine: [", r"not valid YAML"),
    ],
)
def test_wrong_jobs(tmp_path, old, new, says):
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize("text", ["", "- a\n", "3\n"])
def test_a_file_that_is_no_mapping(tmp_path, text):
    with pytest.raises(ConfigError, match="wants a mapping"):
        load(tmp_path, text)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nope\.yaml' does not exist"):
        load_job(tmp_path / "nope.yaml")


@pytest.mark.parametrize(
    ("text", "wants"),
    [
        ("engine.page_size=32", ("engine.page_size", 32)),
        ("model=a=b.gguf", ("model", "a=b.gguf")),
        ("sampling.temperature=1e-5", ("sampling.temperature", 1e-5)),
        ("sampling.stop_token_ids=[1, 2]", ("sampling.stop_token_ids", [1, 2])),
        ("engine.enable_prefix_caching=false", ("engine.enable_prefix_caching", False)),
        ("engine.num_pages=null", ("engine.num_pages", None)),
    ],
)
def test_overrides_are_yaml_values(text, wants):
    assert parse_override(text) == wants


@pytest.mark.parametrize("text", ["engine.page_size", "=3", "a.b.c=3", "a b=3", "x=[1"])
def test_wrong_overrides(text):
    with pytest.raises(ConfigError, match="--set"):
        parse_override(text)


def test_an_override_beats_the_file_and_is_as_strict(tmp_path):
    job = load(tmp_path, GOOD, {"engine.page_size": 64, "model": "other", "sampling.top_p": 0.5})
    assert (job.engine.page_size, job.engine.model, job.sampling["top_p"]) == (64, "other", 0.5)
    with pytest.raises(ConfigError, match=r"engine\.pagesize: unknown key; did you mean 'page_size'"):
        load(tmp_path, GOOD, {"engine.pagesize": 64})
    with pytest.raises(ConfigError, match=r"model is '\./llama', not a section"):
        load(tmp_path, GOOD, {"model.x": 64})


def test_what_may_change_on_resume(tmp_path):
    base = load(tmp_path, GOOD).tracked()
    assert load(tmp_path, GOOD, {"input.path": "moved", "output.plot": False, "engine.event_log": "log"}).tracked() == base
    for changed in ({"engine.page_size": 4}, {"sampling.seed": 1}, {"output.include_prompt": True}, {"model": "m"}):
        assert load(tmp_path, GOOD, changed).tracked() != base
