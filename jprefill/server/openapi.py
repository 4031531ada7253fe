"""OpenAPI pieces for routes that parse their bodies themselves."""

from typing import Any

import msgspec
from fastapi import FastAPI

from jprefill.server.schemas import BODIES

_REF = "#/components/schemas/{name}"


def json_body(body: type[msgspec.Struct], example: dict[str, Any]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes `body`."""
    schema = {"$ref": _REF.format(name=body.__name__)}
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def document_bodies(app: FastAPI) -> None:
    """Adds the schemas of all bodies to the app's OpenAPI document, which FastAPI makes on first use."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        _, schemas = msgspec.json.schema_components(BODIES, ref_template=_REF)
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi
