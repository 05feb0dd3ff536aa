"""The files of the page, as they lie beside this module: open to all, for they tell nothing of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER: Final = Path(__file__).parent
HEADERS: Final[Mapping[str, str]] = {
    # Scripts and styles of these files alone, data of this planner alone; no HTML made of texts, by anybody.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked for again each time, and answered with 304: a page never runs with scripts of another release.
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    """A folder of the page, with the headers that every file of it has."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file; raises HTTPException 404 where there is none."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    """`/ui/`, what it loads, and the ways to it. All links are relative: it may stand below any prefix."""

    async def page(_: object) -> Response:
        return FileResponse(FOLDER / "page" / "index.html", headers=dict(HEADERS))

    async def to_page(_: object) -> Response:
        return RedirectResponse("ui/")

    return [
        Route("/", to_page, include_in_schema=False),
        Route("/ui", to_page, include_in_schema=False),
        Route("/ui/", page, include_in_schema=False),
        Mount("/ui/page", PageFiles(directory=FOLDER / "page")),
        Mount("/ui/vendor", PageFiles(directory=FOLDER / "vendor")),
    ]
