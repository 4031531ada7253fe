"""A real server in a child process: start, signals, drain, slow and rude clients, and OpenAI's own client."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

CHILD = Path(__file__).with_name("child.py")
SCORING = {"query": "Food? ", "items": ["soup", "tyre"], "label_token_ids": [65, 66]}


class Child:
    """A server process and its log lines."""

    def __init__(self, **options: Any):
        command = [sys.executable, str(CHILD), json.dumps({"port": 0, **options})]
        paths = os.pathsep.join([str(CHILD.parents[1]), str(CHILD.parents[2])])
        environ = {**os.environ, "PYTHONPATH": paths}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        self.lines: list[str] = []
        self._client = httpx.Client(timeout=20)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += iter(self.process.stderr.readline, "")

    def wait_for(self, pattern: str, timeout_s: float = 20) -> re.Match[str]:
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            assert self.process.poll() is None or self._reader.is_alive() or self.lines, "no output"
            time.sleep(0.01)
        raise AssertionError(f"no {pattern!r} in {self.lines}")

    @property
    def url(self) -> str:
        return self.wait_for(r"listening on (http://\S+),").group(1)

    @property
    def ready_url(self) -> str:
        return self.wait_for(r"Jprefill is ready: (http://\S+?)[\"\s]").group(1)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def num_open(self) -> float:
        text = self._client.get(f"{self.url}/metrics").text
        found = re.search(r"^jprefill_requests_open (\S+)", text, re.MULTILINE)
        assert found is not None
        return float(found.group(1)) - 1  # the scrape itself is open

    def post_in_background(self, count: int) -> list[Future[Any]]:
        """Sends `count` requests and returns when each is inside the server or answered."""
        pool = ThreadPoolExecutor(count)
        url = f"{self.ready_url}/v1/score"
        futures = [pool.submit(self._client.post, url, json=SCORING) for _ in range(count)]
        pool.shutdown(wait=False)
        give_up_s = time.monotonic() + 10
        # Done first: one that ends in between is then counted in neither, not in both.
        while sum(future.done() for future in futures) + self.num_open() < count:
            assert time.monotonic() < give_up_s
        return futures

    def exit_code(self, timeout_s: float = 10) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._client.close()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def run(**options: Any) -> Child:
        children.append(Child(**options))
        return children[-1]

    yield run
    for child in children:
        child.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Child]:
    """One server with short limits for all tests of rude clients."""
    limits = {"header_timeout_s": 0.5, "body_timeout_s": 0.5, "linger_s": 0.5, "max_headers": 20}
    limits |= {"max_header_bytes": 8192, "write_timeout_s": 1.0}
    child = Child(limits=limits, delay_s=0.05, max_body_bytes=200_000)
    assert child.ready_url
    yield child
    child.stop()


@pytest.fixture
def good(shared: Child) -> Iterator[Child]:
    """After each test: every request is answered, and a good one still works."""
    yield shared
    reply = httpx.post(f"{shared.url}/v1/score", json=SCORING)
    assert reply.status_code == 200
    give_up_s = time.monotonic() + 5
    while shared.num_open() != 0:
        assert time.monotonic() < give_up_s


def closed_after_s(connection: socket.socket) -> float:
    """Seconds until the server closes; what it sends before is read."""
    started_s = time.monotonic()
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - started_s


def send_until_cut(connection: socket.socket, data: bytes, timeout_s: float) -> float:
    """Seconds until the server breaks the connection."""
    started_s = time.monotonic()
    try:
        while time.monotonic() - started_s < timeout_s:
            connection.sendall(data)
            time.sleep(0.02)
    except OSError:
        return time.monotonic() - started_s
    raise AssertionError("never cut")


def test_probes_answer_while_loading_and_the_ready_lines_follow(start: Any) -> None:
    child = start(load_s=0.5)
    url = child.url
    assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/ready").status_code == 503
    assert httpx.post(f"{url}/v1/score", json=SCORING).status_code == 503
    assert child.ready_url == url
    child.wait_for("The server is fired up and ready to roll!")
    assert httpx.get(f"{url}/ready").status_code == 200
    child.process.send_signal(signal.SIGINT)
    assert child.exit_code() == 0


def test_a_failed_load_exits_with_one_clear_line(start: Any) -> None:
    child = start(broken=True)
    assert child.exit_code() == 1
    errors = [line for line in child.lines if "ERROR" in line]
    assert len(errors) == 1
    assert "lm_head.weight" in errors[0]
    assert not any("Traceback" in line for line in child.lines)


def test_a_busy_port_exits_before_loading(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        child = start(port=port, load_s=30)
        assert child.exit_code() == 2
    assert len(child.lines) == 1
    assert f"port {port}" in child.lines[0]


def test_a_stop_while_loading_is_immediate(start: Any) -> None:
    child = start(load_s=30)
    assert httpx.get(f"{child.url}/ready").status_code == 503
    child.process.send_signal(signal.SIGTERM)
    assert child.exit_code(3) == 0


def test_sigterm_loses_no_accepted_request(start: Any) -> None:
    child = start(delay_s=0.2)
    url = child.ready_url
    futures = child.post_in_background(20)
    child.process.send_signal(signal.SIGTERM)
    child.wait_for("draining")
    assert httpx.get(f"{url}/ready").status_code == 503
    assert httpx.get(f"{url}/health").status_code == 200
    refused = httpx.post(f"{url}/v1/score", json=SCORING)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert [future.result(20).status_code for future in futures] == [200] * 20
    assert child.exit_code() == 0


def test_what_does_not_finish_in_time_gets_503(start: Any) -> None:
    child = start(delay_s=0.5, shutdown_timeout_s=0.1)
    futures = child.post_in_background(6)
    child.process.send_signal(signal.SIGTERM)
    statuses = sorted(future.result(20).status_code for future in futures)
    assert set(statuses) <= {200, 503}
    assert statuses.count(503) >= 4
    assert child.exit_code() == 0


def test_a_second_signal_leaves_at_once(start: Any) -> None:
    child = start(delay_s=5)
    futures = child.post_in_background(1)
    child.process.send_signal(signal.SIGTERM)
    child.wait_for("draining")
    started_s = time.monotonic()
    child.process.send_signal(signal.SIGTERM)
    assert child.exit_code() == 128 + signal.SIGTERM
    assert time.monotonic() - started_s < 1
    assert isinstance(futures[0].exception(10), httpx.HTTPError)


def test_json_logs_are_json_from_the_first_line(start: Any) -> None:
    child = start(log_format="json")
    httpx.post(f"{child.ready_url}/v1/score", json=SCORING, headers={"x-request-id": "me"})
    child.wait_for('"request_id":"me"')
    child.process.send_signal(signal.SIGTERM)
    assert child.exit_code() == 0
    events = [json.loads(line) for line in child.lines]
    access = next(event for event in events if event.get("request_id") == "me")
    assert (access["route"], access["status"], access["n_items"]) == ("/v1/score", 200, 2)


def test_a_silent_connection_is_closed(good: Child) -> None:
    with good.connect() as connection:
        assert closed_after_s(connection) < 2


def test_half_a_header_is_closed(good: Child) -> None:
    with good.connect() as connection:
        connection.sendall(b"POST /v1/score HTTP/1.1\r\nhost: x\r\n")
        assert closed_after_s(connection) < 2


def test_a_slow_header_on_a_kept_connection_is_closed(good: Child) -> None:
    with good.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        assert closed_after_s(connection) < 2


def test_half_a_body_gets_408(good: Child) -> None:
    with good.connect() as connection:
        connection.sendall(b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
        assert closed_after_s(connection) < 2


def test_a_body_after_an_early_answer_is_cut(good: Child) -> None:
    with good.connect() as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 404")
        assert send_until_cut(connection, b" ", 3) < 2


def test_a_too_large_body_is_answered_with_413(good: Child) -> None:
    reply = httpx.post(f"{good.url}/v1/score", content=b" " * 300_000)
    assert reply.status_code == 413
    reply = httpx.post(f"{good.url}/v1/score", content=iter([b" " * 50_000] * 6))
    assert reply.status_code == 413


@pytest.mark.parametrize(
    "head",
    [
        b"x: y\r\n" * 10_000,
        b"x: " + b"y" * 2**20 + b"\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"x\x00y: z\r\n",
    ],
    ids=["10,000 headers", "1 MiB header", "two lengths", "bad chunk size", "NUL in a name"],
)
def test_malformed_http_is_a_4xx_and_a_closed_connection(good: Child, head: bytes) -> None:
    with good.connect() as connection:
        try:
            connection.sendall(b"POST /v1/score HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
            answer = connection.recv(65536)
        except ConnectionError:
            answer = b""  # closed while we were still sending
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
        assert closed_after_s(connection) < 2


def test_large_bodies_in_few_chunks_are_no_headers(good: Child) -> None:
    body = json.dumps({**SCORING, "query": "x" * 50_000})
    with httpx.Client() as client:
        for _ in range(3):
            assert client.post(f"{good.url}/v1/score", content=body).status_code == 200


def test_clients_that_reset_leave_nothing_behind(good: Child) -> None:
    body = json.dumps(SCORING).encode()
    head = b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    for sent in (head, head + body[:5], head + body, head + body, head + body):
        with good.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(sent)
            time.sleep(0.01)
    good.wait_for("status=499")


def test_a_client_that_never_reads_is_cut(good: Child) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = good.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.settimeout(10)
        request = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"
        send_until_cut(connection, request * 20, 8)


def test_pipelined_requests_are_all_answered(good: Child) -> None:
    with good.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 3:
            answer += connection.recv(65536)


def test_the_openai_client_reads_decisions(good: Child) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{good.url}/v1", api_key="none", max_retries=0) as client:
        questions = [
            {"type": "predicate", "name": "urgent", "instructions": "It is urgent."},
            {"type": "choice", "instructions": "Who?", "choices": [{"value": "a"}, {"value": True}]},
            {"type": "score", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high"}]},
        ]
        if not hasattr(client, "decisions"):
            pytest.skip("this openai package has no decisions")
        decision = client.decisions.create(model="fake", input="The parcel is late.", questions=questions)
        assert [answer.type for answer in decision.answers] == ["predicate", "choice", "score"]
        assert decision.answers[1].probabilities[1].value is True
        assert decision.usage.input_tokens_details.cached_tokens > 0  # the input, for two of three questions
        assert decision.usage.input_tokens_details.cache_write_tokens == 0
        text = {"type": "input_text", "text": "A parcel of ours", "prompt_cache_breakpoint": {"mode": "explicit"}}
        hinted = client.decisions.create(
            model="fake",
            input=[{"role": "user", "content": [text]}],
            questions=questions,
            prompt_cache_key="tenant",
            prompt_cache_options={"mode": "explicit", "ttl": "30m"},
            extra_body={"cache_salt": "s"},
        )
        assert hinted.usage.input_tokens_details.cache_write_tokens == 2 + len("A parcel of")
        assert decision.answers[0].label_mass > 0
        assert [model.id for model in client.models.list()] == ["fake"]
        with pytest.raises(openai.BadRequestError) as caught:
            client.decisions.create(model="fake", input="x", questions=[{"type": "box", "instructions": "y"}])
        assert caught.value.param == "questions[0].type"
        assert caught.value.code == "unsupported_feature"
        assert caught.value.request_id
        with pytest.raises(openai.NotFoundError):
            client.decisions.create(model="other", input="x", questions=questions)


def test_the_openai_client_comes_back_after_429(start: Any) -> None:
    openai = pytest.importorskip("openai")
    child = start(full=2)
    with openai.OpenAI(base_url=child.ready_url, api_key="none", max_retries=2) as client:
        started_s = time.monotonic()
        reply = client.post("/v1/score", body=SCORING, cast_to=object)
        assert len(reply["scores"]) == 2
        assert 0.4 <= time.monotonic() - started_s < 3  # it waited as it was told, 0.2 s twice
    assert sum("status=429" in line for line in child.lines) == 2
