"""Route that parses its body and writes its response by pydantic alone.

FastAPI's own path (parse to a dict, resolve dependencies, validate the response again) costs a third of a plan. It
still serves every request that is not a valid one, so that errors and the OpenAPI document are FastAPI's.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from planner.middleware import header

JSON: Final = "application/json"
JSON_HEADER: Final = JSON.encode()
CONTENT_TYPE: Final = b"content-type"
RouteHandler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """Route whose only parameters are those of its path, one model as its body, and the request."""

    def get_route_handler(self) -> RouteHandler:
        """Return the handler of a request; FastAPI's own for a route with other parameters."""
        general = super().get_route_handler()
        dependant, models = self.dependant, self.dependant.body_params
        others = (dependant.query_params, dependant.header_params, dependant.cookie_params, dependant.dependencies)
        model = models[0].field_info.annotation if len(models) == 1 else None
        if any(others) or not (isinstance(model, type) and issubclass(model, BaseModel)):
            return general
        endpoint: Any = dependant.call
        body_name, request_name, path_params = models[0].name, dependant.request_param_name, dependant.path_params
        status = self.status_code or 200

        async def handle(request: Request) -> Response:
            if header(request.scope, CONTENT_TYPE) != JSON_HEADER:
                return await general(request)
            values: dict[str, Any] = {}
            for field in path_params:
                values[field.name], errors = field.validate(
                    request.path_params[field.name], {}, loc=("path", field.name)
                )
                if errors:
                    return await general(request)
            try:
                values[body_name] = model.model_validate_json(await request.body())
            except ValidationError:
                return await general(request)
            if request_name is not None:
                values[request_name] = request
            result = await endpoint(**values)
            if result is None:
                return Response(status_code=status)
            return Response(result.model_dump_json(), status, media_type=JSON)

        return handle
