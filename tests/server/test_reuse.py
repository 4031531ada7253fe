"""What clients may say about the prefix store, and what they are told about it."""

import json
from typing import Any

import pytest
from fakes import FakeEngine

from jprefill.server.salts import join_salts
from jprefill.types import ScoreRequest

RULE = "must have 1 to 128 characters, none of @ / \\ NUL"
BAD_SALTS = ["", "a" * 129, "a@b", "a/b", "a\\b", "a\0b", "@", "a\n/"]
KEYS = ("first-key", "second-key")


class Bench:
    """A server, its engine, and one good body per route."""

    def __init__(self, serve: Any, scorer_of: Any, bodies: dict[str, dict[str, Any]], **config: Any):
        self.engine = FakeEngine()
        self.client = serve(scorer_of(self.engine), **config)
        self.bodies = bodies

    def ask(self, path: str, key: str | None = None, **fields: Any) -> Any:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.client.post(path, json={**self.bodies[path], **fields}, headers=headers)

    def seen(self, path: str, key: str | None = None, **fields: Any) -> ScoreRequest:
        reply = self.ask(path, key, **fields)
        assert reply.status_code == 200, reply.text
        return self.engine.requests[-1]


@pytest.fixture
def bench(serve: Any, scorer_of: Any, decision: Any, scoring: Any) -> Any:
    bodies = {"/v1/decisions": decision, "/v1/score": scoring, "/score": scoring}
    return lambda **config: Bench(serve, scorer_of, bodies, **config)


paths = pytest.mark.parametrize("path", ["/v1/decisions", "/v1/score", "/score"])


# ---- salts


@paths
def test_each_pair_of_salt_and_key_has_a_partition_of_its_own(bench: Any, path: str) -> None:
    pairs: list[dict[str, str | None]] = [
        {},
        {"cache_salt": "a"},
        {"prompt_cache_key": "a"},
        {"cache_salt": "a", "prompt_cache_key": "a"},
        {"cache_salt": "a", "prompt_cache_key": "b"},
        {"cache_salt": "b", "prompt_cache_key": "a"},
        {"cache_salt": "ab"},
    ]
    server = bench()
    salts = [server.seen(path, **pair).salt for pair in pairs]
    assert len(set(salts)) == len(pairs)
    assert salts == [server.seen(path, **pair).salt for pair in pairs]
    assert server.seen(path, cache_salt=None, prompt_cache_key=None).salt == salts[0] == ""


@paths
def test_neither_length_nor_content_of_a_salt_reaches_the_engine(bench: Any, path: str) -> None:
    server = bench()
    short, long = (server.seen(path, cache_salt=salt).salt for salt in ("secret", "secret" * 21))
    assert "secret" not in short + long
    assert len(short) == len(long)


@paths
@pytest.mark.parametrize("field", ["cache_salt", "prompt_cache_key"])
@pytest.mark.parametrize("salt", BAD_SALTS)
def test_a_bad_salt_is_named_with_what_is_allowed(bench: Any, path: str, field: str, salt: str) -> None:
    server = bench()
    reply = server.ask(path, **{field: salt})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["message"], error["code"]) == (field, f"{field} {RULE}", "invalid_value")
    assert server.engine.requests == []
    assert server.ask(path, **{field: 5}).json()["error"]["param"] == field


@paths
def test_any_other_character_may_be_in_a_salt(bench: Any, path: str) -> None:
    server = bench()
    salts = ["a", "a" * 128, "ä" * 128, "a b\n", "日本", "a:b|c"]
    assert len({server.seen(path, cache_salt=salt).salt for salt in salts}) == len(salts)


@paths
def test_api_keys_separate_callers_if_the_server_says_so(bench: Any, path: str) -> None:
    server = bench(api_keys=KEYS, default_salt_per_api_key=True)
    first, second = (server.seen(path, key).salt for key in KEYS)
    assert first
    assert first != second
    assert first == server.seen(path, KEYS[0]).salt
    named = {
        server.seen(path, key, **{field: "a"}).salt for key in KEYS for field in ("cache_salt", "prompt_cache_key")
    }
    assert len(named | {first, second}) == 6
    assert not any(key in salt for key in KEYS for salt in named | {first, second})


@paths
def test_api_keys_share_prefixes_by_default(bench: Any, path: str) -> None:
    server = bench(api_keys=KEYS)
    assert {server.seen(path, key).salt for key in KEYS} == {""}
    assert len({server.seen(path, key, cache_salt="a").salt for key in KEYS}) == 1


def test_a_caller_cannot_name_the_salt_of_an_api_key(bench: Any) -> None:
    server = bench(default_salt_per_api_key=True)
    of_key = server.seen("/v1/score", KEYS[0]).salt
    guesses = [KEYS[0], of_key, join_salts(KEYS[0])]
    for guess in guesses:
        assert server.seen("/v1/score", cache_salt=guess).salt != of_key
        assert server.seen("/v1/score", "other", prompt_cache_key=guess).salt != of_key


def test_request_ids_and_safety_identifiers_are_no_salt(bench: Any, decision: Any) -> None:
    server = bench()
    headers = {"x-request-id": "me"}
    assert server.client.post("/v1/decisions", json=decision, headers=headers).status_code == 200
    assert server.engine.requests[-1].salt == ""
    assert server.seen("/v1/decisions", safety_identifier="me").salt == ""


# ---- what is kept


@paths
def test_a_cache_key_marks_what_will_come_again(bench: Any, path: str) -> None:
    server = bench()
    body = {"query": "Is it hot food? "} if "score" in path else {}
    expected = "<s>Is it hot" if "score" in path else "<s><|user|>Order 1042 is five days late.\n\n"
    assert server.seen(path, **body).num_marked_tokens == 0
    assert server.seen(path, **body, cache_salt="a").num_marked_tokens == 0
    request = server.seen(path, **body, prompt_cache_key="a")
    assert request.num_marked_tokens == len(server.client.state.scorer().tokenizer.encode(expected, add_bos=False))


def part(text: str, is_marked: bool) -> dict[str, Any]:
    hint = {"prompt_cache_breakpoint": {"mode": "explicit"}} if is_marked else {}
    return {"type": "input_text", "text": text, **hint}


def test_breakpoints_and_modes_of_decisions(bench: Any) -> None:
    server = bench()
    explicit = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}
    marked = [{"role": "user", "content": [part("Rules of the shop", True), part("Order 7", False)]}]
    plain = [{"role": "user", "content": [part("Rules of the shop", False), part("Order 7", False)]}]
    assert server.seen("/v1/decisions").uses_store
    assert not server.seen("/v1/decisions", **explicit).uses_store
    assert not server.seen("/v1/decisions", **explicit, prompt_cache_key="a", input=plain).uses_store
    for options in ({}, explicit, {"prompt_cache_options": {}}, {"prompt_cache_options": {"mode": "implicit"}}):
        request = server.seen("/v1/decisions", **options, input=marked)
        assert request.uses_store
        assert request.num_marked_tokens == 2 + len("Rules of the")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"size": 1}}, "prompt_cache_options.size"),
        ({"prompt_cache_options": "explicit"}, "prompt_cache_options"),
    ],
)
def test_bad_cache_options_are_named(bench: Any, fields: dict[str, Any], param: str) -> None:
    reply = bench().ask("/v1/decisions", **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


# ---- what is told


def test_usage_tells_what_was_cached_and_kept(bench: Any) -> None:
    server = bench()
    reply = server.ask("/v1/decisions", prompt_cache_key="a")
    shared = server.engine.requests[-1]
    details = reply.json()["usage"]["input_tokens_details"]
    assert details == {"cached_tokens": 2 * len(shared.prefix), "cache_write_tokens": shared.num_marked_tokens}
    assert details["cache_write_tokens"] > 0
    assert reply.headers["x-cached-tokens"] == str(2 * len(shared.prefix))
    reply = server.ask("/v1/score")
    num_cached = len(server.engine.requests[-1].prefix)
    assert reply.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": num_cached}
    assert reply.headers["x-cached-tokens"] == str(num_cached) != "0"


def test_a_server_may_keep_it_to_itself(bench: Any, caplog: Any) -> None:
    server = bench(report_cached_tokens=False)
    reply = server.ask("/v1/decisions", prompt_cache_key="a")
    assert reply.json()["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert "x-cached-tokens" not in reply.headers
    reply = server.ask("/v1/score", prompt_cache_key="a")
    assert reply.json()["usage"].keys() == {"prompt_tokens", "total_tokens"}
    assert "x-cached-tokens" not in reply.headers
    metrics = server.client.get("/metrics").text
    assert f"jprefill_cached_tokens_total {float(server.engine.num_cached_tokens)}" in metrics  # the owner sees it


@pytest.mark.parametrize("field", ["cache_salt", "prompt_cache_key"])
@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/score"])
def test_a_salt_with_a_lone_surrogate_is_refused(bench: Any, path: str, field: str) -> None:
    server = bench()
    body = json.dumps({**server.bodies[path], field: "\ud800"}).encode()
    assert server.client.post_raw(path, body).status_code == 400


def test_the_rule_for_salts_is_documented(client: Any) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for body in ("DecisionsBody", "ScoreBody"):
        for field in ("cache_salt", "prompt_cache_key"):
            assert "1 to 128 characters" in json.dumps(schemas[body]["properties"][field])
