"""An in-process client for the app, and the scorer that stands behind it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fakes import ByteTokenizer, FakeEngine

from jprefill.config import ServerConfig
from jprefill.scorer import Scorer
from jprefill.server.app import create_app
from jprefill.server.limits import Limits
from jprefill.server.state import ServerState
from jprefill.tokenization.chat import ChatTemplate


class AppClient:
    """Runs an app's lifespan in a loop thread; requests go through httpx's ASGI transport."""

    def __init__(self, app: Any):
        self.app = app
        self.state: ServerState = app.state.server
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._lifespan = app.router.lifespan_context(app)
        self.run(self._lifespan.__aenter__())
        transport = httpx.ASGITransport(app)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://test")

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=20)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.run(self._http.request(method, path, **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)

    def post_raw(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        named = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        return self.post(path, content=body, headers=named)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < give_up_s, "waited too long"
            time.sleep(0.005)

    def close(self) -> None:
        self.run(self._http.aclose())
        self.run(self._lifespan.__aexit__(None, None, None))
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def fake_scorer(engine: FakeEngine | None = None, tokenizer: ByteTokenizer | None = None) -> Scorer:
    tokenizer = tokenizer or ByteTokenizer()
    template = tokenizer.chat_template and ChatTemplate(tokenizer.chat_template, {"bos_token": "<s>"})
    return Scorer(engine or FakeEngine(), tokenizer, template)


Serve = Callable[..., AppClient]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts apps; afterwards every accepted request must have been answered."""
    clients: list[AppClient] = []

    def start(
        scorer: Scorer | None = None, *, limits: Limits | None = None, wait: bool = True, **config: Any
    ) -> AppClient:
        scorer = scorer or fake_scorer()
        client = AppClient(create_app(lambda: scorer, ServerConfig(**config), limits))
        clients.append(client)
        if wait:
            client.wait_until(lambda: client.state.is_ready)
        return client

    yield start
    for client in clients:
        client.wait_until(lambda client=client: client.state.num_open == 0)
        assert client.state.num_held_bytes == 0
        client.close()


@pytest.fixture
def client(serve: Serve) -> AppClient:
    return serve()


@pytest.fixture
def scorer_of() -> Callable[..., Scorer]:
    return fake_scorer


@pytest.fixture
def decision() -> dict[str, Any]:
    """A good body of `/v1/decisions` with all three kinds of questions."""
    return {
        "model": "fake",
        "input": "Order 1042 is five days late.",
        "questions": [
            {"type": "predicate", "name": "urgent", "instructions": "It is urgent."},
            {
                "type": "choice",
                "instructions": "Which team?",
                "choices": [{"value": "billing", "description": "payments"}, {"value": True}],
            },
            {
                "type": "score",
                "name": "tone",
                "instructions": "How upset?",
                "levels": [{"label": "calm"}, {"label": "annoyed"}, {"label": "angry"}],
            },
        ],
    }


@pytest.fixture
def scoring() -> dict[str, Any]:
    """A good body of `/v1/score`."""
    return {"query": "Food? ", "items": ["soup", "tyre"], "label_token_ids": [65, 66]}
