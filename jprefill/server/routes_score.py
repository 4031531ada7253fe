"""`POST /v1/score` and `/score`: label scoring in SGLang's shape."""

import math
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jprefill.errors import InvalidRequestError, UnsupportedFeatureError
from jprefill.scorer import Scorer
from jprefill.server.body import parse
from jprefill.server.openapi import json_body
from jprefill.server.prompts import check_all_fit
from jprefill.server.salts import check_salts
from jprefill.server.schemas import ScoreBody
from jprefill.server.state import ServerState
from jprefill.server.usage import score_usage
from jprefill.server.work import Plan, answer
from jprefill.tasks.score import LabelScores, score_job

router = APIRouter(tags=["score"])
_decoder = msgspec.json.Decoder(ScoreBody)
_PAIR_FIELDS = ("queries", "documents", "text_1", "text_2", "data_1", "data_2")
_EXAMPLE = {
    "query": "Is this about food? Answer yes or no.\n",
    "items": ["soup recipe\nAnswer:", "tyre change\nAnswer:"],
    "labels": [" yes", " no"],
    "apply_softmax": True,
}


@router.post("/v1/score", openapi_extra=json_body(ScoreBody, _EXAMPLE))
async def score(request: Request) -> Response:
    """How probable is each label as the next token after query and item?"""
    return await answer(request, build)


@router.post("/score", include_in_schema=False)
async def score_alias(request: Request) -> Response:
    """The same under SGLang's older path."""
    return await answer(request, build)


def build(state: ServerState, scorer: Scorer, body: bytes) -> Plan:
    """Turns a body into its job.

    Raises:
      InvalidRequestError: and its kinds; `param` names the field as the client wrote it.
    """
    sent = parse(_decoder, body)
    model = state.model_names()[0] if sent.model in (None, "", "default") else state.check_model(sent.model)
    query, items = _check_shape(sent)
    salts = check_salts(sent.cache_salt, sent.prompt_cache_key)
    engine = scorer.engine
    check_all_fit(len(query), [len(item) for item in items], engine.max_model_len, state.limits, "items")
    try:
        job = score_job(
            scorer.tokenizer,
            query,
            items,
            sent.labels,
            sent.label_token_ids,
            item_first=bool(sent.item_first),
            temperature=1.0 if sent.temperature is None else sent.temperature,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            mark_prefix=sent.prompt_cache_key is not None,
        )
    except InvalidRequestError as error:
        raise _in_wire_words(error) from error
    tells_cached = state.config.report_cached_tokens
    return Plan(job, lambda scores: _reply(sent, scores, model, tells_cached), model, salts, sent.priority)


def _check_shape(sent: ScoreBody) -> tuple[str | list[int], list[str | list[int]]]:
    """Query and items, if the body has the shape that is served."""
    if sent.label_token_ids is None and sent.labels is None:
        if field := sent.sent(*_PAIR_FIELDS):
            raise UnsupportedFeatureError(
                f"{field}: scoring pairs with a cross-encoder is not served; send query, items and "
                "label_token_ids or labels",
                param=field,
            )
        raise InvalidRequestError("label_token_ids (or labels, as texts) is required", param="label_token_ids")
    if sent.sent("score_extraction_token"):
        raise UnsupportedFeatureError(
            "score_extraction_token is not served: send one item per score", param="score_extraction_token"
        )
    if sent.temperature not in (None, 1.0) and not sent.apply_softmax:
        raise UnsupportedFeatureError(
            "temperature needs apply_softmax: without it a score is the plain probability",
            param="temperature",
        )
    if sent.query is None:
        raise InvalidRequestError("query is required", param="query")
    if sent.items is None:
        raise InvalidRequestError("items is required", param="items")
    return sent.query, [sent.items] if isinstance(sent.items, str) else sent.items


def _in_wire_words(error: InvalidRequestError) -> InvalidRequestError:
    """The Python API calls this field `label_ids`; a client knows it as `label_token_ids`."""
    message, param = error.message, error.param
    if param is not None and param.startswith("label_ids"):
        param = param.replace("label_ids", "label_token_ids", 1)
    return type(error)(message.replace("label_ids", "label_token_ids"), param=param)


def _reply(sent: ScoreBody, scores: LabelScores, model: str, tells_cached: bool) -> dict[str, Any]:
    """SGLang's reply, and `label_mass` per item besides."""
    if sent.apply_softmax:
        rows = [item.probabilities for item in scores.items]
    else:
        rows = [tuple(map(math.exp, item.logprobs)) for item in scores.items]
    return {
        "object": "scoring",
        "model": model,
        "scores": rows,
        "label_mass": [item.label_mass for item in scores.items],
        "token_logprobs": [item.logprobs for item in scores.items] if sent.return_token_logprobs else None,
        "usage": score_usage(scores.usage, tells_cached=tells_cached),
    }
