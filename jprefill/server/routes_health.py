"""Liveness, readiness, version and metrics: what load balancers and monitors ask."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import jprefill
from jprefill.server.metrics import CONTENT_TYPE
from jprefill.server.replies import json_response
from jprefill.server.state import state_of

router = APIRouter(tags=["operations"])


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while the engine is up, also while draining; 503 before and after."""
    return Response(status_code=200 if state_of(request).is_alive else 503)


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 while requests are welcome; 503 while loading or draining."""
    return Response(status_code=200 if state_of(request).is_ready else 503)


@router.get("/ping")
@router.head("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    """Readiness under SageMaker's name."""
    return await ready(request)


@router.get("/version")
async def get_version() -> Response:
    """The installed version of jprefill."""
    return json_response({"version": jprefill.__version__})


@router.get("/metrics")
@router.head("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(state_of(request).metrics.render(), media_type=CONTENT_TYPE)
