"""`POST /tokenize` and `/detokenize`, in vLLM's shape."""

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jprefill.errors import InvalidRequestError, UnsupportedFeatureError
from jprefill.scorer import Scorer
from jprefill.server.body import parse
from jprefill.server.openapi import json_body
from jprefill.server.prompts import check_fits
from jprefill.server.replies import json_response
from jprefill.server.schemas import DetokenizeBody, TokenizeBody, is_sent
from jprefill.server.state import ServerState, state_of
from jprefill.server.work import read_request_body, run_in_pool, until_gone
from jprefill.tokenization.checks import check_token_ids

router = APIRouter(tags=["tokenizer"])
_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


@router.post("/tokenize", openapi_extra=json_body(TokenizeBody, {"prompt": "The sky"}))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, as scoring would see them."""
    return await _reply(request, _tokenize)


@router.post("/detokenize", openapi_extra=json_body(DetokenizeBody, {"tokens": [464, 6766]}))
async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    return await _reply(request, _detokenize)


async def _reply(request: Request, function: Callable[[ServerState, Scorer, bytes], Any]) -> Response:
    state = state_of(request)
    scorer = state.scorer()  # not ready: say so before the body is read
    body = await read_request_body(request)
    with state.holding(len(body)):
        work = run_in_pool(state, function, state, scorer, body)
        return json_response(await until_gone(request.receive, work))


def _tokenize(state: ServerState, scorer: Scorer, body: bytes) -> dict[str, Any]:
    sent = parse(_tokenize_decoder, body)
    if is_sent(sent.messages):
        raise UnsupportedFeatureError("messages is not served: send prompt", param="messages")
    if sent.prompt is None:
        raise InvalidRequestError("prompt is required", param="prompt")
    if sent.model:
        state.check_model(sent.model)
    check_fits(len(sent.prompt), scorer.engine.max_model_len, state.limits, "prompt")
    add_bos = scorer.tokenizer.adds_bos and sent.add_special_tokens is not False
    token_ids = scorer.tokenizer.encode(sent.prompt, add_bos=add_bos)
    texts = [scorer.tokenizer.token_text(i) for i in token_ids] if sent.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": scorer.engine.max_model_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


def _detokenize(state: ServerState, scorer: Scorer, body: bytes) -> dict[str, Any]:
    sent = parse(_detokenize_decoder, body)
    if sent.model:
        state.check_model(sent.model)
    tokenizer = scorer.tokenizer
    if not sent.tokens:
        return {"prompt": ""}
    token_ids = check_token_ids(sent.tokens, tokenizer.vocab_size, "tokens")
    return {"prompt": tokenizer.decode([int(i) for i in token_ids])}
