"""Checks of a planner without tokens: callers name it by a known host, and no foreign page changes it.

Any web page can have a browser send requests to a planner on loopback or in the same network. It cannot read
the answers of another origin, unless its own host name is made to resolve to the planner (DNS rebinding):
then the browser takes both for one origin. Such a request still shows the page's host name. A literal IP
address cannot be rebound, so it is always known. With tokens none of this is needed: a page has none.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from planner.http_errors import ProblemError, problem_response
from planner.middleware import RefusalListener, header
from rfork.settings import PlannerSettings

ANY: Final = "*"
READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
PORTS: Final = {"http": 80, "https": 443}
MAX_DISPLAYED: Final = 80


class KnownHosts:
    """The host names under which callers may reach the planner."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)

    @classmethod
    def of(cls, settings: PlannerSettings) -> KnownHosts:
        """Those of this machine, of the address that is bound, and of the settings."""
        return cls((settings.bind, socket.gethostname(), *settings.allowed_hosts))

    def contains(self, host: str | None) -> bool:
        """True for a `SimHost` header of a known host; a request without one comes from no browser."""
        if host is None or ANY in self._names:
            return True
        name = _name_of(host)
        if name is None:
            return False
        if name == "localhost" or name.endswith(".localhost") or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def is_foreign(origin: str | None, fetch_site: str | None, host: str | None) -> bool:
    """True where a browser sent the request for a page of another origin than the planner's own."""
    if fetch_site is not None:
        return fetch_site not in ("same-origin", "none")
    if origin is None:
        return False  # no browser leaves it out of a request that changes something
    try:
        parts = urlsplit(origin)
        origin_host = parts.hostname, parts.port or PORTS.get(parts.scheme)
        own = urlsplit(f"//{host or ''}")
        return origin_host != (own.hostname, own.port or PORTS.get(parts.scheme))
    except ValueError:
        return True


class OriginGuard:
    """Refuses requests to unknown hosts, and changes on behalf of foreign web pages."""

    def __init__(self, app: ASGIApp, hosts: KnownHosts, on_refused: RefusalListener) -> None:
        self._app = app
        self._hosts = hosts
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        self._on_refused(problem.slug)
        await problem_response(problem, scope["path"])(scope, receive, send)

    def _problem(self, scope: Scope) -> ProblemError | None:
        host = _text(header(scope, b"host"))
        if not self._hosts.contains(host):
            displayed = ascii(host)[:MAX_DISPLAYED]
            detail = (
                f"this planner has no token and does not know the host {displayed}: name it in"
                " RFORK_PLANNER_ALLOWED_HOSTS, or set RFORK_PLANNER_TOKEN"
            )
            return ProblemError(403, "unknown-host", detail)
        origin, site = _text(header(scope, b"origin")), _text(header(scope, b"sec-fetch-site"))
        if scope["method"] not in READING and is_foreign(origin, site, host):
            detail = "a web page of another origin may not change anything here: set RFORK_PLANNER_TOKEN"
            return ProblemError(403, "cross-origin", detail)
        return None


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _name_of(host: str) -> str | None:
    """The name in a `SimHost` header, without its port; None where it has no such form."""
    try:
        parts = urlsplit(f"//{host}")
        valid = parts.netloc == host and "@" not in host and (parts.port is None or parts.port >= 0)
    except ValueError:
        return None
    name = parts.hostname
    return name.rstrip(".") if valid and name else None
