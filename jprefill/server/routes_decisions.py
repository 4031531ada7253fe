"""`POST /v1/decisions`: predicates, choices and ratings in OpenAI's shape."""

from collections.abc import Mapping
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
from jprefill.server.schemas import DecisionsBody
from jprefill.server.state import ServerState
from jprefill.server.usage import decisions_usage
from jprefill.server.work import Plan, answer
from jprefill.tasks.decide import Decisions, decide_job

router = APIRouter(tags=["decisions"])
_decoder = msgspec.json.Decoder(DecisionsBody)
# SGLang's questions: {"id", "question", "options"} with type yes_no, choice or score.
_SGLANG_KEYS = ("question", "options", "id")
_EXAMPLE = {
    "model": "MODEL",
    "input": "Order 1042 is five days late. The customer asks for a refund.",
    "questions": [
        {"type": "predicate", "name": "urgent", "instructions": "The message needs an answer today."},
        {
            "type": "choice",
            "name": "team",
            "instructions": "Which team should handle it?",
            "choices": [{"value": "billing", "description": "payments and refunds"}, {"value": "delivery"}],
        },
    ],
}


@router.post("/v1/decisions", openapi_extra=json_body(DecisionsBody, _EXAMPLE))
async def decide(request: Request) -> Response:
    """Answers every question about the input with probabilities, from one forward pass."""
    return await answer(request, build)


def build(state: ServerState, scorer: Scorer, body: bytes) -> Plan:
    """Turns a body into its job.

    Raises:
      InvalidRequestError: and its kinds; `param` names the field.
      ModelNotFoundError: another model is served here.
    """
    sent = parse(_decoder, body)
    model = state.check_model(sent.model)
    if sent.joint:
        raise UnsupportedFeatureError("joint is for diffusion models and is not served", param="joint")
    for i, question in enumerate(sent.questions):
        _check_openai_shape(question, i)
    salts = check_salts(sent.cache_salt, sent.prompt_cache_key)
    max_model_len = scorer.engine.max_model_len
    sizes = [_num_chars(question) for question in sent.questions]
    check_all_fit(_num_chars(sent.input), sizes, max_model_len, state.limits, "questions")
    job = decide_job(
        scorer.tokenizer,
        scorer.chat_template,
        sent.input,
        sent.questions,
        return_prompt_token_ids=bool(sent.return_prompt_token_ids),
        prompt_format_version=sent.prompt_format_version,
        max_questions=state.config.max_questions,
        max_model_len=max_model_len,
        mark_prefix=sent.prompt_cache_key is not None,
        cache_mode=(sent.prompt_cache_options and sent.prompt_cache_options.mode) or "implicit",
    )
    tells_cached = state.config.report_cached_tokens
    return Plan(job, lambda decisions: _reply(decisions, model, tells_cached), model, salts, sent.priority)


def _check_openai_shape(question: Mapping[str, Any], i: int) -> None:
    """SGLang serves another schema on this path; its users learn what differs."""
    key = next((key for key in _SGLANG_KEYS if key in question), None)
    if question.get("type") == "yes_no":
        key = "type"
    if key is not None:
        raise InvalidRequestError(
            f"questions[{i}].{key} belongs to SGLang's schema; this route takes OpenAI's: type predicate, "
            "choice or score, instructions instead of question, choices or levels instead of options, name "
            "instead of id",
            param=f"questions[{i}].{key}",
        )


def _num_chars(value: Any) -> int:
    """Characters of all texts in `value`. The parser bounds the depth."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list) else 0


def _reply(decisions: Decisions, model: str, tells_cached: bool) -> dict[str, Any]:
    """OpenAI's reply."""
    return {
        "model": model,
        "prompt_format_version": decisions.prompt_format_version,
        "answers": decisions.to_dicts(),
        "usage": decisions_usage(decisions.usage, len(decisions.answers), tells_cached=tells_cached),
    }
