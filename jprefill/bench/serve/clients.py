"""What the servers speak: the bodies of requests, what replies tell, and the connection itself."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jprefill.bench.prose import prose
from jprefill.bench.serve.driver import OK, Answer, Send
from jprefill.bench.workloads import Arrival, Workload, token_ids
from jprefill.errors import ConfigError
from jprefill.types import TokenIds

if TYPE_CHECKING:
    from httpx import AsyncClient, Response

_LABEL_IDS = (0, 1)  # any two: what is asked for does not change the time
_CHECK_TIMEOUT_S = 30.0
_KEEP_ALIVE_S = 2.0  # below what servers wait, so that none closes a connection just as it is used
_PROSE_CHARS, _PIECE_CHARS = 200_000, 4_000  # a piece is shorter than any model's longest prompt
_MESSAGE_CHARS = 300


@dataclass(frozen=True, eq=False, slots=True)
class Language:
    """What prompts are made of.

    Attributes:
      prose: tokens of the model, or places in `words`.
      words: set, prompts are sent as text, and a word stands where a workload says token.
    """

    prose: TokenIds
    words: tuple[str, ...] | None = None

    def spell(self, ids: TokenIds) -> str | list[int]:
        """The ids as a server takes them."""
        return ids.tolist() if self.words is None else "".join(self.words[i] for i in ids.tolist())


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to ask for a decision over HTTP.

    Attributes:
      body: from the model's name and the prompt in two pieces, all but its last part and that part.
      answers: the key of the reply that holds a list of answers.
    """

    path: str
    body: Callable[[str, TokenIds, TokenIds, Language], dict[str, Any]]
    answers: str


def _score_body(model: str, head: TokenIds, tail: TokenIds, language: Language) -> dict[str, Any]:
    items = [language.spell(tail)]
    return {"model": model, "query": language.spell(head), "items": items, "label_token_ids": _LABEL_IDS}


def _completion_body(model: str, head: TokenIds, tail: TokenIds, language: Language) -> dict[str, Any]:
    prompt = language.spell(np.concatenate([head, tail]))
    return {"model": model, "prompt": prompt, "max_tokens": 1, "logprobs": 1, "temperature": 0}


BACKENDS = {
    "jprefill": Backend("/v1/score", _score_body, "scores"),
    "openai": Backend("/v1/completions", _completion_body, "choices"),
}


def encode_body(
    backend: Backend, model: str, workload: Workload, arrival: Arrival, language: Language, salt: int | str
) -> bytes:
    """The JSON of one request."""
    ids = token_ids(workload, arrival, language.prose, salt)
    head, tail = np.split(ids, [len(ids) - arrival.prompt[-1].num_tokens])
    return msgspec.json.encode(backend.body(model, head, tail, language))


def read_reply(backend: Backend, status: int, content: bytes) -> Answer:
    """What a reply says; a 200 without answers is "bad reply"."""
    if str(status) != OK:
        return Answer(str(status))
    try:
        reply = msgspec.json.decode(content)
        if not reply[backend.answers]:
            return Answer("bad reply")
        usage = reply.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return Answer(OK, usage.get("prompt_tokens"), details.get("cached_tokens"))
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        return Answer("bad reply")


# ---- over the wire -----------------------------------------------------------------------------------------


@asynccontextmanager
async def connected(base_url: str, api_key: str | None) -> AsyncIterator["AsyncClient"]:
    """A client with as many connections as there are requests at a time: none waits here.

    Args:
      base_url: with or without the `/v1` that OpenAI's clients want.

    Raises:
      ConfigError: httpx is not installed, or the address is none.
    """
    try:
        import httpx  # here: it is no dependency of the server
    except ModuleNotFoundError:
        raise ConfigError("bench serve needs httpx: pip install 'jprefill[demo]'") from None
    if not re.match(r"https?://[^/\s]", base_url):
        raise ConfigError(f"--base-url {base_url}: must start with http:// or https:// and a host")
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S)
    try:
        root = httpx.URL(base_url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url {base_url}: {error}") from None
    async with httpx.AsyncClient(
        base_url=root, headers=headers, timeout=None, limits=limits, trust_env=False
    ) as client:  # no proxy in between
        yield client


def sender(client: "AsyncClient", backend: Backend) -> Send:
    """Posts bodies; a connection that fails is an answer with the name of the failure."""
    from httpx import RequestError

    async def send(body: bytes) -> Answer:
        try:
            reply = await client.post(backend.path, content=body)
        except RequestError as error:
            return Answer(type(error).__name__)
        return read_reply(backend, reply.status_code, reply.content)

    return send


async def first_model(client: "AsyncClient") -> str:
    """The model that the server names first.

    Raises:
      ConfigError: nobody is there, the key is refused, or there is no list of models.
    """
    reply = await _ask(client, "GET", "/v1/models")
    try:
        return str(msgspec.json.decode(reply.content)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise ConfigError(f"{reply.url} lists no model: name one with --model") from None


async def model_tokens(client: "AsyncClient", model: str) -> Language:
    """Prose in the tokens of the model, by the server's `/tokenize`.

    Raises:
      ConfigError: nobody is there, the key is refused, or the server has no such route.
    """
    ids: list[int] = []
    text = prose()[:_PROSE_CHARS]
    for start in range(0, len(text), _PIECE_CHARS):
        body = {"model": model, "prompt": text[start : start + _PIECE_CHARS], "add_special_tokens": False}
        reply = await _ask(client, "POST", "/tokenize", msgspec.json.encode(body), hint="send text with --prompts text")
        try:
            ids += msgspec.json.decode(reply.content, type=_Tokens).tokens
        except msgspec.DecodeError as error:
            raise ConfigError(f"{reply.url}: {error}; send text with --prompts text") from None
    if len(set(ids)) < 2:
        raise ConfigError(f"{client.base_url}: /tokenize made {len(ids)} tokens of {len(text)} characters")
    return Language(np.asarray(ids, np.int32))


class _Tokens(msgspec.Struct):
    tokens: list[int]


def words() -> Language:
    """Prose in words, each with the space after it."""
    pieces = re.findall(r"\S+\s+", prose())
    vocabulary, places = np.unique(pieces, return_inverse=True)
    return Language(places.astype(np.int32), tuple(vocabulary.tolist()))


async def try_out(client: "AsyncClient", backend: Backend, body: bytes, timeout_s: float) -> None:
    """Sends one request before anything is measured.

    Args:
      timeout_s: between two signs of life of the server.

    Raises:
      ConfigError: it is not answered; the message holds what the server says.
    """
    reply = await _ask(client, "POST", backend.path, body, timeout_s=timeout_s)
    if (answer := read_reply(backend, reply.status_code, reply.content)).status != OK:
        raise ConfigError(f"{reply.url}: {answer.status}: {reply.text[:_MESSAGE_CHARS]}")


async def _ask(
    client: "AsyncClient",
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    timeout_s: float = _CHECK_TIMEOUT_S,
    hint: str = "",
) -> "Response":
    """A good reply, or an error that a person can act on."""
    from httpx import RequestError

    try:
        reply = await client.request(method, path, content=body, timeout=timeout_s)
    except RequestError as error:
        raise ConfigError(f"--base-url {client.base_url}: no answer: {str(error) or type(error).__name__}") from None
    if reply.status_code in (401, 403):
        raise ConfigError(f"{reply.url}: {reply.status_code}: give the right --api-key")
    if reply.status_code != 200:
        said = f"{reply.url}: {reply.status_code}: {reply.text[:_MESSAGE_CHARS]}"
        raise ConfigError(f"{said}; {hint}" if hint else said)
    return reply
