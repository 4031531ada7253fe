"""Keys, ids, headers, overload, deadlines, disconnects, bugs, metrics and logs."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from fakes import ByteTokenizer, FakeEngine

from jprefill.config import ServerConfig
from jprefill.errors import CheckpointError, DeadlineExceededError, EngineError, QueueFullError
from jprefill.server.app import create_app
from jprefill.server.limits import Limits
from jprefill.server.logs import JsonFormatter, TextFormatter
from jprefill.server.state import ServerState
from jprefill.types import ScoreRequest, ScoreResult


class HeldEngine(FakeEngine):
    """Answers only after `release`, as a busy engine would."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[ScoreRequest, Future[ScoreResult]]] = []

    def submit(self, request: ScoreRequest) -> "Future[ScoreResult]":
        self.held.append((request, Future()))
        return self.held[-1][1]

    def release(self) -> None:
        for request, future in self.held:
            if future.set_running_or_notify_cancel():
                future.set_result(self._answer(request, 0.0))


@pytest.fixture
def access_lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    logger = logging.getLogger("jprefill")
    was_propagating, logger.propagate = logger.propagate, True
    caplog.set_level(logging.DEBUG, "jprefill")
    yield lambda: [r.fields for r in caplog.records if r.name == "jprefill.access"]
    logger.propagate = was_propagating


def code_of(reply: Any) -> str:
    return reply.json()["error"]["code"]


def test_without_keys_every_request_passes(client: Any, scoring: Any) -> None:
    for header in ({}, {"authorization": "Bearer "}, {"authorization": "Basic x"}):
        assert client.post("/v1/score", json=scoring, headers=header).status_code == 200


def test_with_keys_only_probes_are_open(serve: Any, scoring: Any) -> None:
    client = serve(api_keys=("first", "second"))
    for path in ("/health", "/ready", "/version", "/ping"):
        assert client.get(path).status_code == 200
    for path in ("/metrics", "/v1/models", "/docs", "/openapi.json", "/nowhere", "/health/", "//health"):
        reply = client.get(path)
        assert (reply.status_code, code_of(reply)) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/score", "/score", "/v1/decisions", "/tokenize", "/detokenize"):
        assert client.post(path, json=scoring).status_code == 401
        assert client.request("OPTIONS", path).status_code == 401


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("Bearer first", 200),
        ("bearer second", 200),
        ("Bearer  first ", 200),
        ("Bearer third", 401),
        ("Bearer ", 401),
        ("first", 401),
        ("Basic first", 401),
        ("Bearer first second", 401),
        ("Bearer fir\u00dft", 401),
    ],
)
def test_bearer_keys(serve: Any, scoring: Any, sent: str, status: int) -> None:
    client = serve(api_keys=("first", "second"))
    headers = {b"authorization": sent.encode("latin-1")}
    assert client.post("/v1/score", json=scoring, headers=headers).status_code == status


def test_a_forged_host_opens_nothing(serve: Any) -> None:
    client = serve(api_keys=("key",))
    assert client.get("/v1/models", headers={"host": "x/health?"}).status_code == 401


@pytest.mark.parametrize(
    ("sent", "echoed"), [("abc-1.2:3_x", "abc-1.2:3_x"), ("a b\t<c>", "abc"), ("a" * 500, "a" * 128)]
)
def test_request_id_is_cleaned_and_echoed(client: Any, sent: str, echoed: str) -> None:
    assert client.get("/health", headers={"x-request-id": sent}).headers["x-request-id"] == echoed


def test_request_id_is_made_where_none_is_sent(client: Any) -> None:
    ids = {client.get("/health", headers=h).headers["x-request-id"] for h in ({}, {}, {"x-request-id": "<>"})}
    assert len(ids) == 3
    assert all(len(made) == 32 for made in ids)


def test_one_request_id_for_many_requests_mixes_nothing(client: Any, scoring: Any) -> None:
    bodies = [{**scoring, "items": [f"item {i}"]} for i in range(20)]
    alone = [client.post("/v1/score", json=body).json()["scores"] for body in bodies]

    async def all_at_once() -> list[Any]:
        headers = {"x-request-id": "same"}
        posts = [client._http.post("/v1/score", json=body, headers=headers) for body in bodies]
        return [reply.json()["scores"] for reply in await asyncio.gather(*posts)]

    assert client.run(all_at_once()) == alone


def test_timing_headers_are_milliseconds(serve: Any, scorer_of: Any, scoring: Any) -> None:
    client = serve(scorer_of(FakeEngine(delay_s=0.05)))
    headers = client.post("/v1/score", json=scoring).headers
    assert float(headers["x-inference-time"]) == pytest.approx(50)
    assert float(headers["x-total-time"]) >= 50
    assert float(headers["x-queue-time"]) >= 0
    assert float(headers["x-tokenization-time"]) > 0
    assert headers["x-prompt-tokens"] == "22"
    assert int(headers["x-cached-tokens"]) > 0


@pytest.mark.parametrize(("retry_after_s", "whole"), [(0.2, "1"), (1.0, "1"), (2.5, "3")])
def test_a_full_queue_is_429_and_says_when_to_come_back(
    serve: Any, scorer_of: Any, scoring: Any, retry_after_s: float, whole: str
) -> None:
    full = QueueFullError("the queue is full", retry_after_s=retry_after_s)
    reply = serve(scorer_of(FakeEngine(submit_error=full))).post("/v1/score", json=scoring)
    assert (reply.status_code, code_of(reply)) == (429, "queue_full")
    assert reply.headers["retry-after"] == whole
    assert int(reply.headers["retry-after-ms"]) == retry_after_s * 1000


def test_too_many_open_requests_are_refused_but_probes_pass(serve: Any, scorer_of: Any, scoring: Any) -> None:
    engine = HeldEngine()
    client = serve(scorer_of(engine), limits=Limits(max_open_requests=1))
    first = asyncio.run_coroutine_threadsafe(client._http.post("/v1/score", json=scoring), client.loop)
    client.wait_until(lambda: len(engine.held) == 1)
    assert client.post("/v1/score", json=scoring).status_code == 429
    assert client.get("/ready").status_code == 200
    engine.release()
    assert first.result(10).status_code == 200
    assert client.state.num_open == 0


def test_held_bodies_are_bounded_in_bytes(serve: Any, scorer_of: Any, scoring: Any) -> None:
    engine = HeldEngine()
    client = serve(scorer_of(engine), limits=Limits(max_held_bytes=100))
    first = asyncio.run_coroutine_threadsafe(client._http.post("/v1/score", json=scoring), client.loop)
    client.wait_until(lambda: len(engine.held) == 1)
    assert client.post("/v1/score", json=scoring).status_code == 429
    engine.release()
    assert first.result(10).status_code == 200


def test_deadline_comes_from_the_header_else_from_the_setting(serve: Any, scorer_of: Any, scoring: Any) -> None:
    engine = FakeEngine()
    serve(scorer_of(engine)).post("/v1/score", json=scoring)
    client = serve(scorer_of(engine), request_timeout_s=100.0)
    client.post("/v1/score", json=scoring)
    client.post("/v1/score", json=scoring, headers={"x-request-timeout-ms": "5000.5"})
    none, setting, sent = (request.deadline_s for request in engine.requests)
    assert none is None
    assert setting - sent == pytest.approx(95, abs=1)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DeadlineExceededError("too late"), 408, "deadline_exceeded"),
        (EngineError("the device failed"), 500, "engine_error"),
        (RuntimeError("secret prompt text /root/x 0x7f"), 500, "engine_error"),
    ],
)
def test_errors_of_the_engine_become_the_envelope(
    serve: Any, scorer_of: Any, scoring: Any, error: Exception, status: int, code: str, caplog: Any
) -> None:
    engine = FakeEngine(raise_error=error)
    client = serve(scorer_of(engine))
    reply = client.post("/v1/score", json=scoring)
    assert (reply.status_code, code_of(reply)) == (status, code)
    assert "secret" not in reply.text
    assert "secret" not in caplog.text
    engine.raise_error = None
    assert client.post("/v1/score", json=scoring).status_code == 200


class PanicTokenizer(ByteTokenizer):
    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        if "panic" in text:
            raise GeneratorExit("as a Rust panic: no Exception")
        return super().encode(text, add_bos=add_bos)


def test_a_panic_in_the_tokenizer_costs_one_request(serve: Any, scorer_of: Any, scoring: Any) -> None:
    client = serve(scorer_of(tokenizer=PanicTokenizer()))
    assert client.post("/v1/score", json={**scoring, "query": "panic"}).status_code == 500
    assert client.post("/v1/score", json=scoring).status_code == 200


def test_a_client_that_leaves_drops_its_queued_request(
    serve: Any, scorer_of: Any, scoring: Any, access_lines: Any
) -> None:
    engine = HeldEngine()
    client = serve(scorer_of(engine))
    left = threading.Event()
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not sent:
            sent.append(1)
            return {"type": "http.request", "body": json.dumps(scoring).encode(), "more_body": False}
        while not left.is_set():
            await asyncio.sleep(0.005)
        return {"type": "http.disconnect"}

    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/score",
        "raw_path": b"/v1/score",
        "query_string": b"",
        "root_path": "",
        "headers": [],
    }
    done = asyncio.run_coroutine_threadsafe(client.app(scope, receive, send), client.loop)
    client.wait_until(lambda: len(engine.held) == 1)
    left.set()
    done.result(10)
    assert engine.held[0][1].cancelled()
    assert answers == []
    assert access_lines()[-1]["status"] == 499
    assert client.state.num_open == 0


def test_not_ready_while_loading(scoring: Any, scorer_of: Any, serve: Any) -> None:
    client = serve(wait=False)  # a stand-in whose phase is set back
    client.wait_until(lambda: client.state.is_ready)
    client.state.phase, scorer, client.state._scorer = "loading", client.state._scorer, None
    assert client.get("/ready").status_code == client.get("/health").status_code == 503
    for reply in (client.post("/v1/score", json=scoring), client.get("/v1/models")):
        assert (reply.status_code, code_of(reply)) == (503, "not_ready")
        assert int(reply.headers["retry-after"]) >= 1
    assert client.get("/metrics").status_code == client.get("/version").status_code == 200
    client.state.phase, client.state._scorer = "ready", scorer


def test_draining_is_alive_but_not_ready(client: Any, scoring: Any) -> None:
    client.state.start_draining()
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == client.get("/ping").status_code == 503
    assert client.post("/v1/score", json=scoring).status_code == 503
    assert client.get("/v1/models").status_code == 200


def test_closing_twice_closes_the_engine_once(scorer_of: Any) -> None:
    class Counted(FakeEngine):
        num_closed = 0

        def close(self, timeout_s: float = 0.0) -> None:
            self.num_closed += 1
            super().close(timeout_s)

    engine = Counted()
    state = ServerState(ServerConfig(), Limits())
    state.loaded(scorer_of(engine))
    state.close(0.0)
    state.close(0.0)
    assert engine.num_closed == 1


def test_a_dead_engine_is_neither_alive_nor_ready(serve: Any, scorer_of: Any, scoring: Any) -> None:
    engine = FakeEngine()
    client = serve(scorer_of(engine))
    engine.is_alive = False
    assert client.get("/health").status_code == client.get("/ready").status_code == 503
    assert client.post("/v1/score", json=scoring).status_code == 503


@pytest.mark.parametrize("error", [CheckpointError("model.safetensors: no tensor x"), ValueError("bug")])
def test_a_failed_load_is_kept_as_one_line(error: Exception) -> None:
    def load() -> Any:
        raise error

    app = create_app(load, ServerConfig())

    async def run() -> None:
        async with app.router.lifespan_context(app):
            while app.state.server.phase == "loading":
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert app.state.server.phase == "failed"
    assert str(error) in app.state.server.load_error


def test_an_engine_that_drops_a_request_gives_503(serve: Any, scorer_of: Any, scoring: Any) -> None:
    engine = HeldEngine()
    client = serve(scorer_of(engine))
    reply = asyncio.run_coroutine_threadsafe(client._http.post("/v1/score", json=scoring), client.loop)
    client.wait_until(lambda: len(engine.held) == 1)
    engine.held[0][1].cancel()
    assert reply.result(10).status_code == 503


def test_metrics_have_native_names_and_survive_head(client: Any, scoring: Any) -> None:
    client.post("/v1/score", json=scoring)
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        "jprefill_compiles_after_start_total 0.0",
        "jprefill_requests_finished_total 1.0",
        'jprefill_http_requests_total{route="/v1/score",status="200"} 1.0',
        'jprefill_request_prompt_tokens_count{route="/v1/score"} 1.0',
    ):
        assert line in reply.text
    assert client.request("HEAD", "/metrics").status_code == 200


def test_metric_series_are_bounded(client: Any, scoring: Any) -> None:
    def probe(i: int) -> None:
        client.get(f"/path/{i}", headers={"x-request-id": f"id{i}"})
        client.request(f"METHOD{i}", "/v1/score")
        client.get(f"/v1/models/model{i}")
        client.post("/v1/score", json={**scoring, "model": f"model{i}"})

    def num_series() -> int:
        return len([line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")])

    probe(0)
    num_series()  # the first scrape is itself a series in the second
    before = num_series()
    for i in range(1, 30):
        probe(i)
    assert num_series() == before


def test_access_line_has_the_documented_keys_and_no_prompt(
    client: Any, scoring: Any, access_lines: Any, caplog: Any
) -> None:
    client.post("/v1/score", json={**scoring, "query": "secret"}, headers={"x-request-id": "me"})
    client.post("/v1/score", json={**scoring, "query": "secret", "items": []})
    good, bad = access_lines()[-2:]
    assert good.keys() >= {"request_id", "route", "status", "n_prompt", "n_cached", "n_items"}
    assert (good["n_cached"], good["n_kept"]) == (len("<secret"), 0)
    assert good.keys() >= {"queue_ms", "tok_ms", "device_ms", "total_ms", "reason", "model"}
    assert (good["request_id"], good["route"], good["status"], good["n_items"]) == ("me", "/v1/score", 200, 2)
    assert (bad["status"], bad["reason"]) == (400, "invalid_value")
    lines = [TextFormatter().format(r) + JsonFormatter().format(r) for r in caplog.records]
    assert not any("secret" in line for line in lines)


def test_json_lines_are_single_json_objects() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("jprefill.server", logging.ERROR, "f", 1, "what %s", ("ever",), info)
    record.fields = {"request_id": "r", "total_ms": 1.5}
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["level"], line["event"], line["request_id"]) == ("error", "what ever", "r")
    assert line["ts"].endswith("+00:00")
    assert "total_ms=1.5" in TextFormatter().format(record)
