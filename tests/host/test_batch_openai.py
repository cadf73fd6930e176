"""OpenAI batch lines: the full response object for a good body, status 400 naming the field for a wrong one."""

import pytest

from jaxpaged.batch.items import BadLine
from jaxpaged.batch.openai_lines import OpenAIFormat
from tests.host.batch_kit import make_job, records, run

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(name="a", **body):
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": "m", "messages": HELLO, **body}}


def completion(name="a", **body):
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": {"model": "m", "prompt": "hello", **body}}


def parse(tmp_path, line, **sections):
    return OpenAIFormat(make_job(tmp_path, [line], **sections), created=0).parse(1, line)


def test_a_chat_completion_in_full(tmp_path):
    job = make_job(tmp_path, [chat("c-1", max_tokens=3, seed=1, n=2, user="u", metadata={"k": "v"})])
    (tmp_path / "in.jsonl").touch()
    run(job)
    (record,) = records(job)
    assert record["custom_id"] == "c-1" and record["error"] is None and record["id"].startswith("batch_req_")
    response = record["response"]
    assert response["status_code"] == 200 and response["request_id"]
    body = response["body"]
    assert body.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert (body["object"], body["model"]) == ("chat.completion", "m") and body["id"].startswith("chatcmpl-")
    assert body["created"] == int((tmp_path / "in.jsonl").stat().st_mtime)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    message = body["choices"][0]["message"]
    assert message["role"] == "assistant" and message["content"] and body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]


def test_a_text_completion_with_logprobs(tmp_path):
    job = make_job(tmp_path, [completion(max_tokens=3, logprobs=2), completion("b", prompt=[5, 6], max_tokens=2)])
    run(job)
    first, second = (record["response"]["body"] for record in records(job))
    assert first["object"] == "text_completion" and first["id"].startswith("cmpl-")
    logprobs = first["choices"][0]["logprobs"]
    assert (
        len(logprobs["tokens"])
        == len(logprobs["token_logprobs"])
        == len(logprobs["top_logprobs"])
        == len(logprobs["text_offset"])
    )
    assert logprobs["text_offset"][0] == 0 and list(logprobs["top_logprobs"][0]) == ["t1", "t2"]
    assert second["usage"]["prompt_tokens"] == 2 and second["choices"][0]["logprobs"] is None


def test_chat_logprobs(tmp_path):
    job = make_job(
        tmp_path, [chat(max_tokens=3, logprobs=True, top_logprobs=2), chat("b", logprobs=True), chat("c", logprobs=False)]
    )
    run(job)
    contents = [record["response"]["body"]["choices"][0]["logprobs"] for record in records(job)]
    assert [top["token"] for top in contents[0]["content"][0]["top_logprobs"]] == ["t1", "t2"]
    assert contents[0]["content"][0]["top_logprobs"][0]["bytes"] == [116, 49]
    assert contents[1]["content"][0]["top_logprobs"] == [] and contents[2] is None


@pytest.mark.parametrize(
    ("body", "name", "wants"),
    [
        ({"max_tokens": 7}, "max_tokens", 7),
        ({"max_completion_tokens": 8}, "max_tokens", 8),
        ({"max_tokens": None}, "max_tokens", None),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 3}, "top_k", 3),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"n": 2}, "n", 2),
        ({"seed": 9}, "seed", 9),
        ({"stop_token_ids": [4]}, "stop_token_ids", (4,)),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 4}, "logprobs", 4),
    ],
)
def test_fields_reach_the_sampling_parameters(tmp_path, body, name, wants):
    assert getattr(parse(tmp_path, chat(**body)).params, name) == wants


def test_defaults_of_the_two_endpoints_and_the_jobs_own(tmp_path):
    assert parse(tmp_path, chat()).params.max_tokens is None
    assert parse(tmp_path, completion()).params.max_tokens == 16
    assert parse(tmp_path, completion(max_tokens=None)).params.max_tokens is None
    assert parse(tmp_path, chat(), sampling={"max_tokens": 9}).params.max_tokens == 9


@pytest.mark.parametrize(
    ("line", "param", "says"),
    [
        (chat(stop=["\n"]), "stop", "not supported"),
        (chat(stream=True), "stream", "not supported"),
        (chat(presence_penalty=0.5), "presence_penalty", "not supported"),
        (chat(tools=[{"type": "function"}]), "tools", "not supported"),
        (chat(response_format={"type": "json_object"}), "response_format", "not supported"),
        (chat(temprature=1), "temprature", "did you mean 'temperature'"),
        (chat(temperature=-1), "temperature", "got -1"),
        (chat(max_tokens=0), "max_tokens", "got 0"),
        (chat(max_tokens=3, max_completion_tokens=4), "max_completion_tokens", "differs"),
        (chat(top_logprobs=3), "top_logprobs", "logprobs: true"),
        (chat(logprobs=3), "logprobs", "true or false"),
        (chat(messages=[]), "messages", "non-empty"),
        (chat(messages=None), "messages", "non-empty"),
        (chat(model=3), "model", "wants a string"),
        (chat(prompt="a"), "prompt", "unknown field"),
        (completion(prompt=["a", "b"]), "prompt", "got 2 prompts"),
        (completion(prompt=[]), "prompt", "at least one"),
        (completion(prompt=None), "prompt", "wants a string"),
        (completion(messages=HELLO), "messages", "unknown field"),
        (completion(echo=True), "echo", "not supported"),
        (completion(prompt="x" * 300), "prompt", "max_model_len"),
    ],
)
def test_a_body_that_cannot_be_served_is_a_400_naming_the_field(tmp_path, line, param, says):
    job = make_job(tmp_path, [line, chat("next", max_tokens=2)])
    summary = run(job)
    bad, good = records(job)
    assert (bad["custom_id"], bad["error"], bad["response"]["status_code"]) == ("a", None, 400)
    fault = bad["response"]["body"]["error"]
    assert (fault["type"], fault["param"], fault["line"]) == ("invalid_request_error", param, 1) and says in fault["message"]
    assert good["response"]["status_code"] == 200 and summary.errors.total() == 1


@pytest.mark.parametrize(
    "body",
    [
        {"stop": None, "stream": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": []},
        {"response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "temperature": None, "stop": []},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(tmp_path, body):
    assert not isinstance(parse(tmp_path, chat(**body)), BadLine)


def test_one_prompt_in_a_list_is_one_prompt(tmp_path):
    assert parse(tmp_path, completion(prompt=["a"])).prompt == "a"
    assert parse(tmp_path, completion(prompt=[[1, 2]])).prompt == {"prompt_token_ids": [1, 2]}


def test_lines_that_are_wrong_themselves(tmp_path):
    lines = [
        {"custom_id": "x", "method": "GET", "url": CHAT, "body": {}},
        {"custom_id": "y", "method": "POST", "url": "/v1/embeddings", "body": {}},
        {"custom_id": "z", "method": "POST", "url": CHAT, "body": []},
        {"method": "POST", "url": CHAT, "body": {}},
        {"custom_id": "w", "method": "POST", "url": CHAT, "body": {}, "extra": 1},
        chat("x"),
    ]
    job = make_job(tmp_path, lines, input={"format": "openai"})
    run(job)
    found = [(r["custom_id"], r["response"], r["error"]["code"], r["error"]["line"]) for r in records(job)]
    assert found == [
        ("x", None, "invalid_request", 1),
        ("y", None, "invalid_request", 2),
        ("z", None, "invalid_request", 3),
        (None, None, "invalid_request", 4),
        ("w", None, "invalid_request", 5),
        ("x", None, "duplicate_id", 6),
    ]


def test_a_failure_while_generating_is_a_500(tmp_path):
    job = make_job(tmp_path, [completion(prompt="FAIL please")])
    run(job)
    (record,) = records(job)
    assert record["response"]["status_code"] == 500 and record["response"]["body"]["error"]["type"] == "server_error"


def test_resume_writes_the_same_bytes_even_if_the_input_was_touched(tmp_path):
    job = make_job(
        tmp_path, [chat(f"c{i}", messages=[{"role": "user", "content": "x" * i}]) for i in range(1, 20)] + [chat("bad", n=0)]
    )
    run(job)
    whole = (tmp_path / "out.jsonl").read_bytes()
    for size in (1, len(whole) // 2, len(whole) - 2):
        with open(job.output.path, "r+b") as file:
            file.truncate(size)
        (tmp_path / "in.jsonl").touch()
        assert run(job, resume=True).complete
        assert (tmp_path / "out.jsonl").read_bytes() == whole
