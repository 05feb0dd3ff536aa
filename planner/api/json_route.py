"""Route that parses its body and writes its response by pydantic alone.

FastAPI's own path (exit stacks, parse to a dict, resolve dependencies, validate the response again) costs a third of a
plan. It still serves every request that is not a valid one, so that errors and the OpenAPI document are FastAPI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.middleware import header

JSON: Final = "application/json"
JSON_HEADER: Final = JSON.encode()
CONTENT_TYPE: Final = b"content-type"


class JsonRoute(APIRoute):
    """Route whose only parameters are those of its path, one model as its body, and the request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dependant, bodies = self.dependant, self.dependant.body_params
        others = (dependant.query_params, dependant.header_params, dependant.cookie_params, dependant.dependencies)
        model = bodies[0].field_info.annotation if len(bodies) == 1 else None
        if isinstance(model, type) and issubclass(model, BaseModel) and not any(others):
            self.app = self._json_app(model, self.app)

    def _json_app(self, model: type[BaseModel], general: ASGIApp) -> ASGIApp:
        """Return an application that serves valid requests; the others go to FastAPI's own, `general`."""
        dependant, status = self.dependant, self.status_code or 200
        endpoint: Any = dependant.call
        body_name, request_name = dependant.body_params[0].name, dependant.request_param_name

        def arguments(path_params: Mapping[str, Any], body: bytes) -> dict[str, Any] | None:
            """Return the endpoint's arguments from the path and the body; None if they are not valid."""
            found: dict[str, Any] = {}
            for field in dependant.path_params:
                found[field.name], errors = field.validate(path_params[field.name], {}, loc=("path", field.name))
                if errors:
                    return None
            try:
                found[body_name] = model.model_validate_json(body)
            except ValidationError:
                return None
            return found

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if header(scope, CONTENT_TYPE) != JSON_HEADER:
                await general(scope, receive, send)
                return
            body: bytes = (await receive()).get("body", b"")  # all of it: `BodyLimit` has read the body
            found = arguments(scope["path_params"], body)
            if found is None:
                await general(scope, _replay(body, receive), send)
                return
            if request_name is not None:
                found[request_name] = Request(scope)
            result = await endpoint(**found)
            if result is None:
                response = Response(status_code=status)
            else:
                response = Response(result.model_dump_json(), status, media_type=JSON)
            await response(scope, receive, send)

        return serve


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives the body, which was already read, and then what follows it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
