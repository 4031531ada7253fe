"""What each route answers to good requests."""

import math
from typing import Any

import pytest
from fakes import ByteTokenizer

USAGE_KEYS = {
    "input_tokens",
    "input_tokens_details",
    "output_tokens",
    "output_tokens_details",
    "total_tokens",
}


def test_decisions_has_the_shape_of_openai(client: Any, decision: dict[str, Any]) -> None:
    reply = client.post("/v1/decisions", json=decision)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["model"] == "fake"
    assert body["prompt_format_version"] == 1
    predicate, choice, score = body["answers"]
    assert predicate.keys() == {"type", "name", "probability", "label_mass"}
    assert (predicate["type"], predicate["name"]) == ("predicate", "urgent")
    assert choice["name"] is None
    assert [p["value"] for p in choice["probabilities"]] == ["billing", True]
    assert sum(p["probability"] for p in choice["probabilities"]) == pytest.approx(1)
    assert [(p["value"], p["label"]) for p in score["probabilities"]] == [
        (0, "calm"),
        (1, "annoyed"),
        (2, "angry"),
    ]
    assert 0 <= score["score"] <= 2
    usage = body["usage"]
    assert usage.keys() == USAGE_KEYS
    assert usage["output_tokens"] == 3
    assert usage["total_tokens"] == usage["input_tokens"] + 3
    assert usage["input_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens"}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_decisions_accepts_nulls_messages_and_cache_hints(client: Any, decision: dict[str, Any]) -> None:
    part = {"type": "input_text", "text": decision["input"], "prompt_cache_breakpoint": {"mode": "explicit"}}
    plain = client.post("/v1/decisions", json=decision).json()
    for question in decision["questions"]:
        question.setdefault("name", None)
    body = {
        **decision,
        "input": [{"role": "user", "type": "message", "content": [part]}],
        "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
        "safety_identifier": None,
        "prompt_cache_key": None,
        "cache_salt": None,
        "joint": False,
        "prompt_format_version": 1,
        "return_prompt_token_ids": None,
    }
    reply = client.post("/v1/decisions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["answers"] == plain["answers"]


def test_decisions_echoes_token_ids_for_replay_through_score(client: Any, decision: dict[str, Any]) -> None:
    body = {**decision, "return_prompt_token_ids": True}
    for answer in client.post("/v1/decisions", json=body).json()["answers"]:
        replay = {
            "query": answer["prompt_token_ids"],
            "items": [[]],
            "label_token_ids": answer["label_token_ids"],
        }
        scored = client.post("/v1/score", json=replay).json()
        assert scored["label_mass"][0] == pytest.approx(answer["label_mass"])


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_score_has_the_shape_of_sglang(client: Any, scoring: dict[str, Any], path: str) -> None:
    reply = client.post(path, json={**scoring, "return_token_logprobs": True})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["object"] == "scoring"
    assert body["model"] == "fake"
    assert len(body["scores"]) == 2
    for row, logprobs, mass in zip(body["scores"], body["token_logprobs"], body["label_mass"], strict=True):
        assert row == pytest.approx([math.exp(value) for value in logprobs])
        assert sum(row) == pytest.approx(mass)
    num_tokens = 2 * len("<Food? soup")  # BOS counts one
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == num_tokens


def test_score_softmax_sums_to_one_and_temperature_flattens(client: Any, scoring: dict[str, Any]) -> None:
    sharp = client.post("/v1/score", json={**scoring, "apply_softmax": True}).json()
    flat = client.post("/v1/score", json={**scoring, "apply_softmax": True, "temperature": 100}).json()
    assert sharp["token_logprobs"] is None
    for row, flat_row in zip(sharp["scores"], flat["scores"], strict=True):
        assert sum(row) == pytest.approx(1)
        assert flat_row == pytest.approx([0.5, 0.5], abs=0.02)


def test_score_takes_labels_as_texts(client: Any, scoring: dict[str, Any]) -> None:
    by_ids = client.post("/v1/score", json=scoring).json()
    texts = {key: value for key, value in scoring.items() if key != "label_token_ids"}
    assert client.post("/v1/score", json={**texts, "labels": ["A", "B"]}).json() == by_ids


def test_score_takes_one_item_one_list_per_item_and_unknown_fields(client: Any, scoring: dict[str, Any]) -> None:
    one = client.post("/v1/score", json={**scoring, "items": "soup", "rid": 7, "model": "default"})
    assert len(one.json()["scores"]) == 1
    both = client.post("/v1/score", json={**scoring, "label_token_ids": [[65, 66], [65, 66]], "model": ""})
    assert both.json()["scores"] == client.post("/v1/score", json=scoring).json()["scores"]


def test_score_item_first_puts_the_item_before_the_query(client: Any, scoring: dict[str, Any]) -> None:
    swapped = {**scoring, "query": "soup", "items": ["Food? "], "item_first": True}
    expected = client.post("/v1/score", json={**scoring, "items": ["soup"]}).json()["scores"]
    assert client.post("/v1/score", json=swapped).json()["scores"] == expected


def test_models_reply_serves_all_clients(serve: Any) -> None:
    client = serve(served_model_names=("org/name", "alias"))
    body = client.get("/v1/models").json()
    assert [entry["id"] for entry in body["data"]] == ["org/name", "alias"]
    assert [entry["name"] for entry in body["models"]] == ["org/name", "alias"]
    assert client.get("/v1/models/org/name").json() == body["data"][0]
    assert client.get("/v1/models/other").status_code == 404


def test_served_names_replace_the_checkpoints_name(serve: Any, decision: dict[str, Any]) -> None:
    client = serve(served_model_names=("one", "two"))
    assert client.post("/v1/decisions", json={**decision, "model": "two"}).json()["model"] == "one"
    assert client.post("/v1/decisions", json=decision).status_code == 404


def test_tokenize_and_detokenize_are_inverse(client: Any) -> None:
    body = client.post("/tokenize", json={"prompt": "The sky", "add_special_tokens": False}).json()
    assert body == {"count": 7, "max_model_len": 100_000, "tokens": list(b"The sky"), "token_strs": None}
    assert client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "The sky"}
    with_bos = client.post("/tokenize", json={"prompt": "a", "return_token_strs": True}).json()
    assert with_bos["token_strs"] == ["<s>", "a"]
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_tokenizing_matches_scoring(client: Any, scoring: dict[str, Any]) -> None:
    query = client.post("/tokenize", json={"prompt": scoring["query"]}).json()["tokens"]
    item = client.post("/tokenize", json={"prompt": "soup", "add_special_tokens": False}).json()["tokens"]
    by_ids = {"query": query, "items": [item], "label_token_ids": [65, 66]}
    by_text = {**scoring, "items": ["soup"]}
    replies = [client.post("/v1/score", json=body).json()["scores"] for body in (by_ids, by_text)]
    assert replies[0] == replies[1]


def test_openapi_document_describes_bodies(client: Any) -> None:
    document = client.get("/openapi.json").json()
    schema = document["paths"]["/v1/decisions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/DecisionsBody"}
    assert "questions" in document["components"]["schemas"]["DecisionsBody"]["properties"]
    assert client.get("/docs").status_code == 200


def test_decisions_without_a_chat_template_says_what_to_do(
    serve: Any, scorer_of: Any, decision: dict[str, Any]
) -> None:
    client = serve(scorer_of(tokenizer=ByteTokenizer(chat_template=None)))
    reply = client.post("/v1/decisions", json=decision)
    assert reply.status_code == 400
    assert "chat_template" in reply.json()["error"]["message"]
