"""`jprefill bench serve`: open loop, honest latencies, every failure counted; with a fake server and the real app."""

import argparse
import asyncio
import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fakes import ByteTokenizer, FakeEngine

from jprefill.bench.serve import command
from jprefill.bench.serve.clients import BACKENDS, Language, read_reply, words
from jprefill.bench.serve.driver import OK, Answer, Outcome, drive
from jprefill.bench.serve.report import HEADER, Run, draw, row, summarise
from jprefill.config import ServerConfig
from jprefill.errors import ConfigError
from jprefill.scorer import Scorer
from jprefill.server.app import create_app

TRACE = Path(__file__).parent / "data" / "conversation_trace.jsonl"
SCORES = {"scores": [[0.5, 0.5]], "usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 25}}}
COMPLETION = {"choices": [{"text": " a"}], "usage": {"prompt_tokens": 100, "prompt_tokens_details": None}}
Reply = tuple[int, Any]
Handler = Callable[[int], Awaitable[Reply]]


class FakeServer:
    """Speaks just enough HTTP/1.1, in a thread. `handler` answers the n-th scoring request; None: the line drops.

    Attributes:
      bodies: of the scoring requests, in the order of arrival.
      headers: of the last request.
    """

    def __init__(self):
        self.bodies: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.handler: Handler = self._usual
        self.routes: dict[str, Reply] = {"/v1/models": (200, {"data": [{"id": "first"}, {"id": "second"}]})}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**24, backlog=1024))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _usual(self, number: int) -> Reply:
        return 200, SCORES | COMPLETION | {"usage": SCORES["usage"]}

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:  # the end of the test; a cancelled handler would be logged
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        self.headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
        body = await reader.readexactly(int(self.headers.get("content-length", 0)))
        status, reply = await self._route(head.split()[1], body)
        if status == 0:
            return False
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        writer.write(f"HTTP/1.1 {status} Said\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        return True

    async def _route(self, path: str, body: bytes) -> Reply:
        if path in self.routes:
            return self.routes[path]
        if path == "/tokenize":
            return 200, {"tokens": list(json.loads(body)["prompt"].encode())}
        assert path in ("/v1/score", "/v1/completions")
        self.bodies.append(json.loads(body) | {"path": path})
        return await self.handler(len(self.bodies) - 1)

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def bench(url: str, *argv: Any) -> int:
    """Runs the command with small prompts."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    small = ["--base-url", url, "--scale", "50", "--num-requests", "8"]
    return command.run(parser.parse_args([*small, *map(str, argv)]))


def records_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


# ---- the driver


def test_slow_answers_do_not_slow_the_sends(server: FakeServer, tmp_path: Path):
    """No answer before all requests are there: a client that waits, or pools too few connections, would hang."""
    num_requests, arrived = 150, asyncio.Event()

    async def all_or_nobody(number: int) -> Reply:
        if number == num_requests - 1:
            arrived.set()
        await arrived.wait()
        return 200, SCORES

    server.handler = all_or_nobody
    argv = ["--num-requests", num_requests, "--warm-up", 0, "--timeout-s", 60, "--json", tmp_path / "r.json"]
    assert bench(server.url, *argv) == 0
    [record] = records_of(tmp_path / "r.json")
    assert record["statuses"] == {"200": num_requests}


def test_latency_counts_from_the_intended_time():
    """The first send blocks the client; the second is late, and says so."""

    async def send(body: bytes) -> Answer:
        if body == b"blocks":
            time.sleep(0.2)
        return Answer(OK)

    first, second = asyncio.run(drive(send, [b"blocks", b""], [0.0, 0.01], 60.0))
    assert first.latency_s >= 0.2
    assert second.intended_s == 0.01
    assert second.lag_s >= 0.15
    assert second.latency_s >= second.lag_s


def test_nothing_is_sent_before_its_time_and_outcomes_keep_the_order():
    sent_s = {}

    async def send(body: bytes) -> Answer:
        sent_s[body] = time.monotonic()
        await asyncio.sleep(0.05 if body == b"0" else 0.0)
        return Answer(body.decode())

    started_s = time.monotonic()
    outcomes = asyncio.run(drive(send, [b"0", b"1", b"2"], [0.0, 0.02, 0.04], 60.0))
    assert [outcome.answer.status for outcome in outcomes] == ["0", "1", "2"]
    for body, at_s in ((b"0", 0.0), (b"1", 0.02), (b"2", 0.04)):
        assert sent_s[body] - started_s >= at_s - 0.001


def test_a_request_without_an_answer_is_given_up():
    async def send(body: bytes) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    [outcome] = asyncio.run(drive(send, [b""], [0.0], 0.05))
    assert outcome.answer == Answer("timeout")
    assert not outcome.is_ok
    assert outcome.latency_s >= 0.05


# ---- failures


def test_every_failure_is_counted_by_its_kind(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    replies: list[Reply] = [(200, SCORES), (429, {}), (429, {}), (503, {}), (500, b"oops"), (200, b"{"), (0, None)]

    async def in_turn(number: int) -> Reply:
        return replies[number] if number < len(replies) else (200, {"scores": []})

    server.handler = in_turn
    assert bench(server.url, "--warm-up", 0, "--goodput-slo-ms", 1e6, "--json", tmp_path / "r.json") == 0
    [record] = records_of(tmp_path / "r.json")
    dropped = {"RemoteProtocolError": 1}
    assert record["statuses"] == {"200": 1, "429": 2, "500": 1, "503": 1, "bad reply": 2} | dropped
    assert (record["num_requests"], record["num_ok"], record["goodput"]) == (8, 1, 1 / 8)
    assert "429: 2, 500: 1, 503: 1, RemoteProtocolError: 1, bad reply: 2" in capsys.readouterr().out


def test_nothing_but_timeouts_fails(server: FakeServer, tmp_path: Path):
    async def never(number: int) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    server.handler = never
    assert bench(server.url, "--warm-up", 0, "--timeout-s", 0.1, "--json", tmp_path / "r.json") == 1
    [record] = records_of(tmp_path / "r.json")
    assert record["statuses"] == {"timeout": 8}
    assert record["mean_s"] is record["p99_s"] is record["hit_rate"] is None
    assert record["achieved_qps"] == 0.0


def test_a_server_that_is_not_there_is_one_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"^--base-url {url}/?: no answer: "):
            bench(url)


def test_what_the_first_request_is_refused_for_is_shown(server: FakeServer):
    async def refuse(number: int) -> Reply:
        return 400, {"error": {"message": "prompt has 9 tokens, the limit is 8"}}

    server.handler = refuse
    with pytest.raises(ConfigError, match=r"/v1/score: 400: .*the limit is 8"):
        bench(server.url)
    server.handler = server._usual
    server.routes["/v1/score"] = 200, {"no": "scores"}
    with pytest.raises(ConfigError, match=r"/v1/score: bad reply: .*no"):
        bench(server.url)


def test_a_first_request_without_an_answer_is_given_up(server: FakeServer):
    async def never(number: int) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    server.handler = never
    with pytest.raises(ConfigError, match="no answer: ReadTimeout"):
        bench(server.url, "--timeout-s", 0.2)


@pytest.mark.parametrize(
    ("path", "reply", "wanted"),
    [
        ("/v1/models", (401, {}), "/v1/models: 401: give the right --api-key"),
        ("/v1/models", (200, {"data": []}), "/v1/models lists no model: name one with --model"),
        ("/v1/models", (503, b"loading"), "/v1/models: 503: loading$"),
        ("/tokenize", (404, b"what?"), r"/tokenize: 404: what\?; send text with --prompts text"),
        ("/tokenize", (200, {"tokens": [7]}), "/tokenize made 50 tokens of 200000 characters"),
        ("/tokenize", (200, {"ids": [1]}), "/tokenize: .*tokens.*; send text with --prompts text"),
    ],
)
def test_a_server_that_lacks_something_is_named(server: FakeServer, path: str, reply: Reply, wanted: str):
    server.routes[path] = reply
    with pytest.raises(ConfigError, match=wanted):
        bench(server.url)


# ---- what is sent


def test_prompts_of_both_backends_are_the_same_tokens(server: FakeServer):
    for backend in BACKENDS:
        bench(server.url, "--backend", backend, "--salt", 3, "--workload", "post_recommendation", "--warm-up", 0)
    ours, theirs = server.bodies[:8], server.bodies[8:]
    assert {body["path"] for body in ours} == {"/v1/score"}
    assert {body["path"] for body in theirs} == {"/v1/completions"}
    assert all(len(body["items"][0]) == 3 and body["label_token_ids"] == [0, 1] for body in ours)
    assert all((body["max_tokens"], body["logprobs"], body["temperature"]) == (1, 1, 0) for body in theirs)
    assert {body["model"] for body in server.bodies} == {"first"}
    assert sorted(body["query"] + body["items"][0] for body in ours) == sorted(body["prompt"] for body in theirs)


def test_text_needs_no_tokenizer_of_the_server(server: FakeServer):
    server.routes["/tokenize"] = 404, {}
    bench(server.url, "--prompts", "text", "--model", "mine", "--api-key", "secret", "--warm-up", 0)
    assert server.headers["authorization"] == "Bearer secret"
    assert {body["model"] for body in server.bodies} == {"mine"}
    [query] = {body["query"] for body in server.bodies}
    assert query.strip()
    assert len({body["items"][0] for body in server.bodies}) == 8


def test_no_run_sees_a_prompt_of_another_and_a_salt_repeats_them_all(server: FakeServer):
    for _ in range(2):
        bench(server.url, "--salt", 1, "--rates", "500,inf", "--seeds", "0,1", "--workload", "mixed", "--warm-up", 1)
    prompts = [tuple(body["items"][0]) for body in server.bodies]
    assert len(prompts) == 2 * 2 * 2 * 9
    first, second = Counter(prompts[:36]), Counter(prompts[36:])
    assert first == second
    assert set(first.values()) == {1}


def test_words_are_prose():
    language = words()
    assert language.words is not None
    text = language.spell(language.prose[:20])
    assert isinstance(text, str)
    assert len(text.split()) == 20
    assert Language(language.prose).spell(language.prose[:3]) == language.prose[:3].tolist()


@pytest.mark.parametrize("base", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_the_address_may_be_as_openai_has_it(server: FakeServer, base: str):
    assert bench(base.format(server.url), "--warm-up", 0) == 0


# ---- what is reported


def test_records_and_table(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, plot = tmp_path / "new" / "r.json", tmp_path / "plots" / "r.png"
    argv = ["--rates", "200,400,inf", "--seeds", "0,1", "--label", "fcfs", "--json", out, "--plot", plot]
    assert bench(server.url, *argv, "--api-key", "secret", "--goodput-slo-ms", 1e7) == 0
    records = records_of(out)
    assert [(record["qps"], record["seed"]) for record in records] == [
        (200.0, 0), (200.0, 1), (400.0, 0), (400.0, 1), (None, 0), (None, 1),
    ]  # fmt: skip
    for record in records:
        assert (record["policy"], record["workload"], record["num_ok"]) == ("fcfs", "short_labels", 8)
        assert (record["hit_rate"], record["goodput"], record["model"]) == (0.25, 1.0, "first")
        assert 0 < record["mean_s"] <= record["p99_s"]
        assert record["p50_s"] <= record["p90_s"] <= record["p99_s"]
        assert record["achieved_qps"] > 0
        assert record["max_lag_s"] >= 0
    assert "secret" not in out.read_text()
    output = capsys.readouterr().out
    assert HEADER in output
    lines = output.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["200.00", "400.00", "burst"]
    assert all(" 16 " in line for line in lines)  # both seeds together
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_key_is_hidden_wherever_it_stands(monkeypatch: pytest.MonkeyPatch, server: FakeServer, tmp_path: Path):
    monkeypatch.setattr("sys.argv", ["jprefill", "bench", "serve", "--api-key=secret"])
    bench(server.url, "--api-key", "secret", "--json", tmp_path / "r.json")
    assert records_of(tmp_path / "r.json")[0]["command"] == "jprefill bench serve ***"


def test_recorded_times_of_a_trace(server: FakeServer, tmp_path: Path):
    trace = tmp_path / "short.jsonl"
    lines = [{"timestamp": 20 * i, "input_length": 600, "hash_ids": [0, i + 1]} for i in range(3)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--workload", f"trace:{trace}", "--rates", "recorded,inf", "--num-requests", 3]
    assert bench(server.url, *argv, "--json", tmp_path / "r.json") == 0
    recorded, burst = records_of(tmp_path / "r.json")
    assert recorded["qps"] == pytest.approx(3 / 0.04)
    assert burst["qps"] is None
    assert {len(body["query"]) for body in server.bodies} == {10}


def _outcome(latency_s: float, answer: Answer, lag_s: float = 0.0, intended_s: float = 0.0) -> Outcome:
    return Outcome(intended_s, lag_s, latency_s, answer)


def test_the_arithmetic_of_a_record():
    good = [_outcome(float(i), Answer(OK, 100, i)) for i in range(1, 11)]
    bad = [_outcome(99.0, Answer("429"), lag_s=0.5), _outcome(10.0, Answer(OK), intended_s=90.0)]
    record = summarise("p", "w", [Run(3, 2.0, (*good, *bad))], slo_s=5.0)
    assert (record.seed, record.qps, record.num_requests, record.num_ok) == (3, 2.0, 12, 11)
    assert record.mean_s == pytest.approx((55 + 10) / 11)
    assert record.p50_s == 6.0
    assert record.hit_rate == pytest.approx(55 / 1000)  # one does not tell
    assert record.goodput == 5 / 12  # of all, not of the good ones
    assert record.achieved_qps == 11 / 100
    assert record.max_lag_s == 0.5
    assert record.statuses == {"200": 11, "429": 1}


def test_runs_of_one_rate_count_together():
    runs = [Run(seed, math.inf, (_outcome(2.0 + seed, Answer(OK)),)) for seed in (0, 1)]
    record = summarise("p", "w", runs, None)
    assert (record.seed, record.qps, record.num_requests) == (None, None, 2)
    assert record.mean_s == 2.5
    assert record.achieved_qps == 2 / 5
    assert row(record).split() == [
        "burst", "0.40", "2", "0", "2,500.0", "2,500.0", "2,900.0", "2,990.0", "-", "-", "0.0",
    ]  # fmt: skip


def test_a_rate_without_a_good_answer_is_drawn_as_a_gap(tmp_path: Path):
    runs = [Run(0, 1.0, (_outcome(1.0, Answer("429")),)), Run(0, 2.0, (_outcome(1.0, Answer(OK)),))]
    draw([summarise("p", "w", [one], None) for one in runs], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("content", [b"", b"[]", b"1", b"{}", b'{"choices": null}', b'{"choices": [1], "usage": 3}'])
def test_a_reply_that_is_none_is_bad(content: bytes):
    assert read_reply(BACKENDS["openai"], 200, content) == Answer("bad reply")


def test_usage_may_be_missing():
    for usage in ({}, {"usage": None}, {"usage": {"prompt_tokens_details": None}}):
        reply = json.dumps({"choices": [1]} | usage).encode()
        assert read_reply(BACKENDS["openai"], 200, reply) == Answer(OK)
    assert read_reply(BACKENDS["openai"], 200, json.dumps(COMPLETION).encode()) == Answer(OK, 100)


# ---- flags


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--rates", "recorded"], "--rates recorded: --workload short_labels has no times of its own"),
        (["--plot", "x.png"], "--plot: there is no finite rate"),
        (["--warm-up", "-1"], "--warm-up -1: must be at least 0"),
        (["--workload", "no"], "--workload: workload 'no': must be one of"),
        (["--workload", "trace:nowhere"], "--workload: trace nowhere: No such file"),
        (["--workload", "credit_verification", "--num-requests", "61"], "has 60 requests, not 61"),
        (["--base-url", "localhost:8000"], "--base-url localhost:8000: must start with http"),
        (["--base-url", "http://h:port"], "--base-url http://h:port: "),
    ],
)
def test_flags_that_cannot_be_used_are_refused(argv: list[str], wanted: str):
    with pytest.raises(ConfigError) as caught:
        bench("http://127.0.0.1:1", *argv)
    assert wanted in caught.value.message


@pytest.mark.parametrize(
    "argv",
    [
        ["--rates", "0"], ["--rates", "1,,2"], ["--rates", "nan"], ["--rates", "-1"], ["--seeds", "-1"],
        ["--seeds", "a"], ["--scale", "0"], ["--timeout-s", "inf"], ["--backend", "grpc"], ["--num-requests", "0"],
    ],
)  # fmt: skip
def test_flags_that_are_no_numbers_show_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench("http://127.0.0.1:1", *argv)
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize(("package", "argv"), [("httpx", []), ("matplotlib", ["--rates", "1", "--plot", "x.png"])])
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, package: str, argv: list[str]):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install 'jprefill\["):
        bench("http://127.0.0.1:1", *argv)


# ---- the real thing


@pytest.fixture
def app_url() -> Iterator[str]:
    """Our own server over a fake engine, on a port of its own."""
    with FakeEngine() as engine:
        app = create_app(lambda: Scorer(engine, ByteTokenizer(), None), ServerConfig())
        server = uvicorn.Server(uvicorn.Config(app, port=0, ws="none", lifespan="on", log_config=None))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        give_up_s = time.monotonic() + 30
        while not (server.started and app.state.server.is_ready):
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("prompts", ["ids", "text"])
def test_our_own_server_answers_all(app_url: str, prompts: str, tmp_path: Path):
    argv = ["--prompts", prompts, "--rates", "100", "--workload", "post_recommendation", "--json", tmp_path / "r.json"]
    assert bench(app_url, *argv) == 0
    [record] = records_of(tmp_path / "r.json")
    assert record["statuses"] == {"200": 8}
    assert record["model"] == "fake"
    assert record["hit_rate"] == 0.0


def test_a_trace_against_our_own_server(app_url: str, tmp_path: Path):
    argv = ["--workload", f"trace:{TRACE}", "--json", tmp_path / "r.json"]
    assert bench(app_url, *argv) == 0
    assert records_of(tmp_path / "r.json")[0]["statuses"] == {"200": 8}
