"""Static files of the pages: served without a token, because they contain no data of the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import fastapi_offline
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER: Final = Path(__file__).parent
SWAGGER: Final = Path(fastapi_offline.__file__).parent / "static"
"""Swagger UI as vendored there; FastAPI itself would load it from the internet."""
HEADERS: Final[Mapping[str, str]] = {
    # Only scripts and styles from these files, only data from this planner; no HTML from strings.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Revalidated on each load, answered with 304: a page never runs with scripts of another release.
    "Cache-Control": "no-cache",
}
API_HEADERS: Final[Mapping[str, str]] = {
    **HEADERS,
    # Swagger UI creates HTML from strings, with styles and images: those of the planner's own document.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


class PageFiles(StaticFiles):
    """A folder of the page, with the headers required for all its files."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return the file; raises HTTPException 404 if there is none."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    """Return the routes `/ui/` and `/docs`, their files, and redirects. All links are relative, for any URL
    prefix.
    """

    async def page(_: object) -> Response:
        return FileResponse(FOLDER / "page" / "index.html", headers=dict(HEADERS))

    async def api(_: object) -> Response:
        return FileResponse(FOLDER / "page" / "api.html", headers=dict(API_HEADERS))

    async def redirect_to_page(_: object) -> Response:
        return RedirectResponse("ui/")

    return [
        Route("/", redirect_to_page, include_in_schema=False),
        Route("/ui", redirect_to_page, include_in_schema=False),
        Route("/ui/", page, include_in_schema=False),
        Route("/docs", api, include_in_schema=False),
        Mount("/ui/page", PageFiles(directory=FOLDER / "page")),
        Mount("/ui/vendor", PageFiles(directory=FOLDER / "vendor")),
        Mount("/ui/swagger", PageFiles(directory=SWAGGER)),
    ]
