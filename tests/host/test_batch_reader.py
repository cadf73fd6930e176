"""Input lines: every one that is not blank yields one entry, with its true line number."""

import json

import pytest

from jaxpaged.batch.formats import JsonlFormat
from jaxpaged.batch.items import BadLine, Item, derive_seed
from jaxpaged.batch.reader import detect_format, read_items, survey
from jaxpaged.errors import ConfigError
from jaxpaged.sampling_params import SamplingParams
from tests.host.batch_kit import make_job


def entries(tmp_path, lines, *, name="in.jsonl", wants_json=True, **sections):
    job = make_job(tmp_path, lines, name=name, **sections)
    return list(read_items(job.input.path, JsonlFormat(job, wants_json=wants_json)))


def one(tmp_path, raw, **sections):
    return entries(tmp_path, raw, **sections)[0]


@pytest.mark.parametrize(
    ("raw", "kind", "says"),
    [
        (b"[1,2]", "not_an_object", "a list"),
        (b"null", "not_an_object", "null"),
        (b"3", "not_an_object", "a number"),
        (b'"text"', "not_an_object", "a string"),
        (b"true", "not_an_object", "a boolean"),
        (b'{"id": "a", "prompt": ', "invalid_json", "column"),
        (b'{"prompt": "a"} trailing', "invalid_json", "Extra data"),
        (b'{"prompt": "\xff"}', "invalid_utf8", "byte 13"),
        (b'{"prompt": "a", "prompt": "b"}', "invalid_json", "'prompt' is given twice"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN"),
        (b'{"prompt": "\\ud800"}', "invalid_json", "other half"),
        (b"[" * 100_000, "invalid_json", "deeply"),
        (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "invalid_json", "not JSON"),
        (b"{}", "invalid_request", "exactly one of prompt, messages, prompt_token_ids"),
        (b'{"prompt": "a", "messages": []}', "invalid_request", "prompt and messages"),
        (b'{"prompt": 3}', "invalid_request", "prompt: got int, wants a string"),
        (b'{"prompt_token_ids": []}', "invalid_request", "at least one"),
        (b'{"prompt_token_ids": [1, "a"]}', "invalid_request", "list of token ids"),
        (b'{"messages": []}', "invalid_request", "messages: got []"),
        (b'{"messages": [{"role": "user"}]}', "invalid_request", "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "invalid_request", "messages[0].name"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "invalid_request", "only text"),
        (b'{"prompt": "a", "temprature": 1}', "invalid_request", "did you mean 'temperature'"),
        (b'{"prompt": "a", "temperature": -1}', "invalid_request", "temperature: got -1"),
        (b'{"prompt": "a", "max_tokens": 0}', "invalid_request", "max_tokens: got 0"),
        (b'{"prompt": "a", "id": ""}', "invalid_request", "id: got ''"),
        (b'{"prompt": "a", "id": 1.5}', "invalid_request", "id: got 1.5"),
        (b'{"prompt": "a", "priority": 2}', "invalid_request", "scheduling_policy"),
        (b'{"prompt": "a", "cache_salt": 1}', "invalid_request", "cache_salt"),
        (b'{"prompt": "a", "beam_width": 2, "temperature": 1}', "invalid_request", "beam search"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_fault(tmp_path, raw, kind, says):
    first, second = entries(tmp_path, b'\n{"prompt": "good"}\n' + raw + b"\n")
    assert isinstance(first, Item) and first.line == 2
    assert isinstance(second, BadLine) and (second.line, second.kind) == (3, kind)
    assert says in second.message


def test_blank_lines_windows_ends_a_byte_order_mark_and_a_missing_last_newline(tmp_path):
    found = entries(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n\t\n{"prompt": "b"}')
    assert [(entry.line, entry.prompt) for entry in found] == [(1, "a"), (5, "b")]


def test_text_lines_are_prompts_with_line_numbers_as_ids(tmp_path):
    found = entries(tmp_path, b"hello\r\n\n  two words \n" + b"\xff\n", name="in.txt", wants_json=False)
    assert [(e.id, getattr(e, "prompt", None)) for e in found] == [
        ("line-1", "hello"),
        ("line-3", "  two words "),
        (None, None),
    ]
    assert found[2].kind == "invalid_utf8"


def test_a_line_overrides_the_jobs_sampling_and_inherits_the_rest(tmp_path):
    item = one(
        tmp_path, [{"prompt": "a", "temperature": 0.5, "stop_token_ids": [7], "max_tokens": None}], sampling={"top_p": 0.9}
    )
    assert (item.params.temperature, item.params.top_p, item.params.stop_token_ids, item.params.max_tokens) == (
        0.5,
        0.9,
        (7,),
        None,
    )


def test_unseeded_lines_get_a_seed_from_the_job_seed_and_line_number_only(tmp_path):
    lines = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "seed": 5}]
    found = entries(tmp_path, lines, engine={"seed": 3})
    assert [item.params.seed for item in found] == [derive_seed(3, 1), derive_seed(3, 2), 5]
    assert len({derive_seed(seed, line) for seed in range(20) for line in range(50)}) == 1000


def test_beam_search_lines(tmp_path):
    item = one(tmp_path, [{"prompt": "a", "beam_width": 3, "length_penalty": 2.0, "max_tokens": 5}])
    assert (item.params.beam_width, item.params.length_penalty, item.params.max_tokens) == (3, 2.0, 5)


def test_a_line_may_ask_for_beams_where_the_job_samples_and_the_reverse(tmp_path):
    """Of the job's parameters it takes those that mean something to it; its own are as strict as ever."""
    line = {"prompt": "a", "beam_width": 3}
    item = one(tmp_path, [line], sampling={"temperature": 0.7, "max_tokens": 9})
    assert (item.params.beam_width, item.params.max_tokens) == (3, 9)
    bad = one(tmp_path, [line | {"temperature": 0.5}], sampling={"temperature": 0.7})
    assert isinstance(bad, BadLine) and "sampling.temperature: not a parameter of beam search" in bad.message
    item = one(
        tmp_path, [{"prompt": "a", "beam_width": None}], sampling={"beam_width": 2, "length_penalty": 2.0, "max_tokens": 9}
    )
    assert isinstance(item.params, SamplingParams) and item.params.max_tokens == 9


def test_what_other_engines_have_is_refused_without_a_guess(tmp_path):
    bad = one(tmp_path, [{"prompt": "a", "stop": ["."]}])
    assert bad.message == "stop: not supported; stop_token_ids ends at a token"


def test_content_in_text_parts_is_joined(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    item = one(tmp_path, [{"messages": [{"role": "user", "content": parts}]}])
    assert item.prompt == {"messages": [{"role": "user", "content": "a\nb"}]}


def test_of_two_lines_with_one_id_the_first_is_served_and_the_second_names_it(tmp_path):
    found = entries(
        tmp_path, [{"id": "a", "prompt": "x"}, {"id": 1, "prompt": "y"}, {"id": "a", "prompt": "z"}, {"id": "1", "prompt": "w"}]
    )
    assert [type(entry) for entry in found] == [Item, Item, BadLine, BadLine]
    assert (found[2].kind, found[2].id) == ("duplicate_id", "a") and "line 1" in found[2].message
    assert "line 2" in found[3].message


@pytest.mark.parametrize(
    ("name", "raw", "wants"),
    [
        ("a.jsonl", b'{"id": 1, "prompt": "x"}\n', "jsonl"),
        ("a.jsonl", b'\n[1]\nbroken\n{"custom_id": "x"}\n', "openai"),
        ("a.batch", b'{"url": "/v1/completions", "body": {}}\n', "openai"),
        ("a.batch", b'{"prompt": \n', "jsonl"),
        ("a.txt", b"Once upon a time\n", "text"),
        ("a.txt", b'Once\n{"custom_id": 1}\n', "text"),
        ("a.jsonl", b"", "jsonl"),
        ("a.jsonl", b"broken\n", "jsonl"),
        ("a.txt", b"[1, 2]\n", "text"),
    ],
)
def test_the_format_is_told_by_the_first_line(tmp_path, name, raw, wants):
    (tmp_path / name).write_bytes(raw)
    assert detect_format(tmp_path / name) == wants


def test_survey_counts_what_will_get_a_record(tmp_path):
    raw = b'\xef\xbb\xbf\n{"prompt": "a"}\n  \nbroken\n\xff\nlast'
    job = make_job(tmp_path, raw)
    count, digest = survey(job.input.path)
    assert count == 4 == len(list(read_items(job.input.path, JsonlFormat(job)))) and len(digest) == 64


def test_a_missing_input_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"input\.path: .*nope\.jsonl' does not exist"):
        survey(tmp_path / "nope.jsonl")


def test_ids_survive_as_written(tmp_path):
    found = entries(
        tmp_path, json.dumps({"id": "ключ 🔑", "prompt": "a"}) + "\n" + json.dumps({"id": 12, "prompt": "a"}) + "\n"
    )
    assert [entry.id for entry in found] == ["ключ 🔑", 12]


def test_deep_nesting_is_one_bad_line(tmp_path):
    """At depths that the JSON reader takes and a message about them cannot walk, too."""
    for depth in (5, 200, 900, 985, 990, 995, 1000, 5000):
        deep = "[" * depth + "]" * depth
        lines = f'{{"prompt": "a", "temperature": {deep}}}\n{{"prompt": "a", "stop_token_ids": {deep}}}\n{{"prompt": "b"}}\n'
        bad, other, good = entries(tmp_path, lines.encode())
        assert isinstance(bad, BadLine) and isinstance(other, BadLine) and isinstance(good, Item)
