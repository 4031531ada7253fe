"""Every bad input gets one 4xx in the one envelope, names its field, and leaves the server as it was."""

import gzip
import json
import zlib
from typing import Any

import pytest
import zstandard
from fakes import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jprefill.server.limits import Limits

CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
PREDICATE = {"type": "predicate", "instructions": "True?"}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}


def assert_error(reply: Any, status: int, param: str | None = None, code: str | None = None) -> str:
    assert reply.status_code == status, reply.text
    assert reply.json().keys() == {"error"}
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code
    assert reply.headers["x-request-id"]
    return error["message"]


def question(**changes: Any) -> dict[str, Any]:
    return {"questions": [{**CHOICE, **changes}]}


DECISIONS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": None}, 400, "model"),
    ({"model": "other"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"input": ""}, 400, "input"),
    ({"input": 5}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": [5]}, 400, "input[0]"),
    ({"input": [IMAGE]}, 400, "input[0].content[0].type"),
    ({"input": [{"role": "assistant", "content": "x"}]}, 400, "input[0].role"),
    ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input[0].type"),
    ({"input": [{"role": "user", "content": None}]}, 400, "input[0].content"),
    ({"questions": []}, 400, "questions"),
    ({"questions": "x"}, 400, "questions"),
    ({"questions": [[]]}, 400, "questions[0]"),
    ({"questions": [PREDICATE, {}]}, 400, "questions[1].type"),
    ({"questions": [PREDICATE] * 401}, 400, "questions"),
    (question(type="box"), 400, "questions[0].type"),
    (question(type=3), 400, "questions[0].type"),
    (question(instructions=None), 400, "questions[0].instructions"),
    (question(instructions=" "), 400, "questions[0].instructions"),
    (question(name=5), 400, "questions[0].name"),
    (question(choices=[{"value": "a"}]), 400, "questions[0].choices"),
    (question(choices=[{"value": "a"}, {"value": "a"}]), 400, "questions[0].choices"),
    (question(choices=[{"value": "a"}, {"value": 1}]), 400, "questions[0].choices[1].value"),
    (question(surprise=1), 400, "questions[0].surprise"),
    ({"questions": [{"type": "yes_no", "question": "Late?"}]}, 400, "questions[0].type"),
    (question(options=["a", "b"]), 400, "questions[0].options"),
    ({"joint": True}, 400, "joint"),
    ({"joint": "yes"}, 400, "joint"),
    ({"surprise": 1}, 400, "surprise"),
    ({"prompt_format_version": 2}, 400, "prompt_format_version"),
    ({"prompt_format_version": True}, 400, "prompt_format_version"),
    ({"return_prompt_token_ids": 1}, 400, "return_prompt_token_ids"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"cache_salt": "a" * 129}, 400, "cache_salt"),
    ({"cache_salt": "a@b"}, 400, "cache_salt"),
    ({"cache_salt": "a/b"}, 400, "cache_salt"),
    ({"cache_salt": "a\n/"}, 400, "cache_salt"),
    ({"priority": "high"}, 400, "priority"),
    ({"priority": 2**31}, 400, "priority"),
    ({"prompt_cache_key": "a\\b"}, 400, "prompt_cache_key"),
    ({"prompt_cache_key": "a\0b"}, 400, "prompt_cache_key"),
    ({"prompt_cache_options": {"mode": "never"}}, 400, "prompt_cache_options.mode"),
    ({"safety_identifier": "a" * 129}, 400, "safety_identifier"),
]
SCORES: list[tuple[dict[str, Any], int, str | None]] = [
    ({"label_token_ids": None}, 400, "label_token_ids"),
    ({"label_token_ids": []}, 400, "label_token_ids"),
    ({"label_token_ids": [-1]}, 400, "label_token_ids[0]"),
    ({"label_token_ids": [0, 264]}, 400, "label_token_ids[1]"),
    ({"label_token_ids": [2**31]}, 400, "label_token_ids[0]"),
    ({"label_token_ids": [2**70]}, 400, "label_token_ids[0]"),
    ({"label_token_ids": [True]}, 400, "label_token_ids[0]"),
    ({"label_token_ids": [65, 65]}, 400, "label_token_ids"),
    ({"label_token_ids": [[65], [66], [67]]}, 400, "label_token_ids"),
    ({"label_token_ids": [65.5]}, 400, "label_token_ids[0]"),
    ({"labels": ["A"]}, 400, "label_token_ids"),
    ({"label_token_ids": None, "labels": ["two"]}, 400, "labels[0]"),
    ({"label_token_ids": None, "labels": []}, 400, "labels"),
    ({"query": None}, 400, "query"),
    ({"query": 5}, 400, "query"),
    ({"query": [1, 2]}, 400, "items[0]"),
    ({"query": "", "items": [""]}, 400, "items[0]"),
    ({"items": None}, 400, "items"),
    ({"items": []}, 400, "items"),
    ({"items": [5]}, 400, "items[0]"),
    ({"query": [1], "items": [[999]]}, 400, "items[0][0]"),
    ({"temperature": 0, "apply_softmax": True}, 400, "temperature"),
    ({"temperature": -1, "apply_softmax": True}, 400, "temperature"),
    ({"temperature": 2.0}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"apply_softmax": "yes"}, 400, "apply_softmax"),
    ({"score_extraction_token": 5}, 400, "score_extraction_token"),
    ({"model": "other"}, 404, "model"),
    ({"label_token_ids": None, "text_1": "a", "text_2": ["b"]}, 400, "text_1"),
    ({"label_token_ids": None, "queries": "a", "documents": ["b"]}, 400, "queries"),
    ({"cache_salt": "a@b"}, 400, "cache_salt"),
]


@pytest.mark.parametrize(("changes", "status", "param"), DECISIONS)
def test_decisions_names_the_field(
    client: Any, decision: dict[str, Any], changes: dict[str, Any], status: int, param: str | None
) -> None:
    assert_error(client.post("/v1/decisions", json={**decision, **changes}), status, param)
    assert client.post("/v1/decisions", json=decision).status_code == 200


@pytest.mark.parametrize(("changes", "status", "param"), SCORES)
def test_score_names_the_field(
    client: Any, scoring: dict[str, Any], changes: dict[str, Any], status: int, param: str | None
) -> None:
    message = assert_error(client.post("/v1/score", json={**scoring, **changes}), status, param)
    assert "label_ids" not in message.replace("label_token_ids", "")
    assert client.post("/v1/score", json=scoring).status_code == 200


@pytest.mark.parametrize("field", ["model", "input", "questions"])
def test_a_missing_field_is_named(client: Any, decision: dict[str, Any], field: str) -> None:
    del decision[field]
    assert_error(client.post("/v1/decisions", json=decision), 400, field)


RAW_BODIES = {
    "empty": b"",
    "blank": b"  \n",
    "null": b"null",
    "list": b"[]",
    "number": b"5",
    "half": b'{"query": "a',
    "NaN": b'{"query": "a", "temperature": NaN}',
    "infinity": b'{"query": "a", "temperature": 1e999}',
    "surrogate": b'{"query": "\\ud800", "items": ["a"], "label_token_ids": [1]}',
    "bad UTF-8": b'{"query": "\xff", "items": ["a"], "label_token_ids": [1]}',
    "deep": b'{"query": ' + b"[" * 100_000,
    "deep in an unknown field": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "5,000 digits": b'{"query": "a", "items": ["a"], "label_token_ids": [' + b"9" * 5000 + b"]}",
    "trailing": b"{} {}",
}


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/score", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", RAW_BODIES)
def test_what_is_no_json_object_is_refused(client: Any, path: str, name: str, scoring: Any) -> None:
    reply = client.post_raw(path, RAW_BODIES[name])
    assert_error(reply, 400, reply.json()["error"]["param"])
    assert client.post("/v1/score", json=scoring).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/score/", 404, "not_found"),
        ("GET", "/v1/score", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_routes_and_methods_that_are_not_there(client: Any, method: str, path: str, status: int, code: str) -> None:
    reply = client.request(method, path)
    assert_error(reply, status, "model" if code == "model_not_found" else None, code)
    if status == 405:
        assert reply.headers["allow"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_another_content_type_is_415(client: Any, content_type: str) -> None:
    assert_error(client.post_raw("/v1/score", b"{}", content_type=content_type), 415)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/vnd.x+json"])
def test_json_content_types_are_taken(client: Any, scoring: Any, content_type: str) -> None:
    body = json.dumps(scoring).encode()
    assert client.post_raw("/v1/score", body, content_type=content_type).status_code == 200
    assert client.post("/v1/score", content=body).status_code == 200  # none at all


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate), ("identity", bytes)],
)
def test_encoded_bodies_are_decoded(client: Any, scoring: Any, encoding: str, pack: Any) -> None:
    body = pack(json.dumps(scoring).encode())
    assert client.post_raw("/v1/score", body, content_encoding=encoding).status_code == 200


def test_zstd_bodies_are_decoded(client: Any, scoring: Any) -> None:
    packed = zstandard.compress(json.dumps(scoring).encode())
    assert client.post_raw("/v1/score", packed, content_encoding="zstd").status_code == 200
    assert_error(client.post_raw("/v1/score", b"no zstd", content_encoding="zstd"), 400)
    bomb = zstandard.compress(b" " * (33 * 2**20))
    assert_error(client.post_raw("/v1/score", bomb, content_encoding="zstd"), 413)


def test_broken_and_unknown_encodings_are_refused(client: Any, scoring: Any) -> None:
    packed = gzip.compress(json.dumps(scoring).encode())
    assert_error(client.post_raw("/v1/score", packed[:-12], content_encoding="gzip"), 400)
    assert_error(client.post_raw("/v1/score", b"no gzip", content_encoding="gzip"), 400)
    assert_error(client.post_raw("/v1/score", packed, content_encoding="br"), 415)
    assert_error(client.post_raw("/v1/score", packed, content_encoding="gzip, gzip"), 415)


def test_the_body_limit_counts_decoded_bytes(serve: Any) -> None:
    client = serve(max_body_bytes=1000)
    bomb = gzip.compress(b" " * 100_000)
    assert len(bomb) < 1000
    assert_error(client.post_raw("/v1/score", bomb, content_encoding="gzip"), 413, None, "payload_too_large")
    assert_error(client.post_raw("/v1/score", b" " * 1001), 413)


def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_long(serve: Any) -> None:
    client = serve(max_body_bytes=1000)
    num_chunks = 0

    async def chunks() -> Any:
        nonlocal num_chunks
        for _ in range(100):
            num_chunks += 1
            yield b" " * 100

    assert_error(client.post("/v1/score", content=chunks()), 413)
    assert num_chunks < 20


def test_texts_that_cannot_fit_are_refused_before_tokenising(serve: Any, scorer_of: Any) -> None:
    engine = FakeEngine(max_model_len=100)
    client = serve(scorer_of(engine), limits=Limits(max_prompt_chars=5000))
    body = {"model": "fake", "input": "x" * 2000, "questions": [PREDICATE]}
    message = assert_error(client.post("/v1/decisions", json=body), 400, "questions[0]", "context_length_exceeded")
    assert "100 tokens" in message
    assert "1600 characters" in message
    score = {"query": "x" * 90, "items": ["y"] * 60, "label_token_ids": [1]}
    assert_error(client.post("/v1/score", json=score), 400, "items", "invalid_value")
    assert_error(client.post("/tokenize", json={"prompt": "x" * 1601}), 400, "prompt", "context_length_exceeded")
    many = {"query": "", "items": [""] * 70_000, "label_token_ids": [1]}
    assert_error(client.post("/v1/score", json=many), 400, "items", "invalid_value")
    assert engine.requests == []


def test_a_prompt_of_too_many_tokens_names_both_numbers(serve: Any, scorer_of: Any) -> None:
    client = serve(scorer_of(FakeEngine(max_model_len=100)))
    body = {"query": "x" * 150, "items": ["y"], "label_token_ids": [1]}
    message = assert_error(client.post("/v1/score", json=body), 400, "items[0]", "context_length_exceeded")
    assert "152" in message
    assert "100" in message


@pytest.mark.parametrize("value", ["abc", "0", "-5", "nan", "inf", "1e30", ""])
def test_a_bad_timeout_header_is_400(client: Any, scoring: Any, value: str) -> None:
    reply = client.post("/v1/score", json=scoring, headers={"x-request-timeout-ms": value})
    assert_error(reply, 400, "X-Request-Timeout-Ms")


def test_long_names_are_cut_in_error_messages(client: Any, decision: Any) -> None:
    reply = client.post("/v1/decisions", json={**decision, "x" * 100_000: 1})
    assert reply.status_code == 400
    assert len(reply.content) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture
def fuzz_bodies(decision: Any, scoring: Any) -> dict[str, Any]:
    return {
        "/v1/decisions": decision,
        "/v1/score": scoring,
        "/tokenize": {"prompt": "a", "model": "fake"},
        "/detokenize": {"tokens": [65]},
    }


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_json_body_makes_a_5xx(client: Any, fuzz_bodies: dict[str, Any], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(fuzz_bodies)))
    body: Any = json.loads(json.dumps(fuzz_bodies[path]))
    for _ in range(data.draw(st.integers(1, 2))):
        spot = body
        while True:
            key = data.draw(st.sampled_from(list(spot) if isinstance(spot, dict) else range(len(spot))))
            if not (isinstance(spot[key], dict | list) and spot[key]) or data.draw(st.booleans()):
                break
            spot = spot[key]
        spot[key] = data.draw(JSON)
    reply = client.post(path, json=body)
    assert reply.status_code < 500, (reply.text, body)
    assert reply.status_code == 200 or reply.json()["error"].keys() == {"message", "type", "param", "code"}
