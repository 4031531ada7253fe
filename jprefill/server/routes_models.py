"""`GET /v1/models` and `/v1/models/{id}`: one reply that OpenAI's, TypeSafe's and router clients can read."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jprefill.server.replies import json_response
from jprefill.server.state import ServerState, state_of

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Every name under which the model is served."""
    state = state_of(request)
    names = state.model_names()
    return json_response(
        {
            "object": "list",
            "data": [_entry(state, name) for name in names],
            "models": [_short_entry(state, name) for name in names],
        }
    )


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    """One entry of the list; names may hold slashes."""
    state = state_of(request)
    state.check_model(model_id)
    return json_response(_entry(state, model_id))


def _entry(state: ServerState, name: str) -> dict[str, Any]:
    engine = state.loaded_scorer().engine
    return {
        "id": name,
        "object": "model",
        "created": state.created_s,
        "owned_by": "jprefill",
        "root": engine.model_name,
        "parent": None,
        "max_model_len": engine.max_model_len,
        "permission": [],
    }


def _short_entry(state: ServerState, name: str) -> dict[str, Any]:
    date = datetime.fromtimestamp(state.created_s, UTC).date().isoformat()
    return {"name": name, "description": f"{name}, served by jprefill", "release_date": date}
