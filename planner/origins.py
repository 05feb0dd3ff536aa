"""Host and origin checks for a planner without tokens: known host names only, no cross-origin changes.

Any web page can make a browser send requests to a planner on loopback or in the same network. It cannot read
the responses of another origin, unless its own host name is made to resolve to the planner (DNS rebinding):
then the browser treats both as one origin. The request still carries the page's host name. A literal IP
address cannot be rebound, so it is always accepted. With tokens none of this is needed: a page has none.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from planner.core.problems import ProblemError
from planner.http_errors import problem_response
from planner.middleware import RefusalListener, header
from rfork.settings import PlannerSettings

ANY: Final = "*"
READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
PORTS: Final = {"http": 80, "https": 443}
MAX_DISPLAYED: Final = 80
MAX_CACHED: Final = 256
"""`Host` headers that are not checked again: callers use few."""


class KnownHosts:
    """The host names under which callers may reach the planner."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._is_known = lru_cache(MAX_CACHED)(self._check)

    @classmethod
    def of(cls, settings: PlannerSettings) -> KnownHosts:
        """Return the names of this machine, of the bound address, and of the settings."""
        return cls((settings.bind, socket.gethostname(), *settings.allowed_hosts))

    def contains(self, host: str | None) -> bool:
        """Return True if a `Host` header names a known host; a request without one is not from a browser."""
        return self._is_known(host)

    def _check(self, host: str | None) -> bool:
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
    """Return True if a browser sent the request for a page of an origin other than the planner's own."""
    if fetch_site is not None:
        return fetch_site not in ("same-origin", "none")
    if origin is None:
        return False  # browsers send it with every request that changes something
    try:
        parts = urlsplit(origin)
        origin_host = parts.hostname, parts.port or PORTS.get(parts.scheme)
        own = urlsplit(f"//{host or ''}")
        return origin_host != (own.hostname, own.port or PORTS.get(parts.scheme))
    except ValueError:
        return True


class OriginGuard:
    """Rejects requests to unknown hosts, and changes requested by pages of other origins."""

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
                f"host {displayed} is not allowed while the planner has no token: add it to"
                " RFORK_PLANNER_ALLOWED_HOSTS, or set RFORK_PLANNER_TOKEN"
            )
            return ProblemError(403, "unknown-host", detail)
        origin, site = _text(header(scope, b"origin")), _text(header(scope, b"sec-fetch-site"))
        if scope["method"] not in READING and is_foreign(origin, site, host):
            detail = (
                "cross-origin pages may not change anything while the planner has no token: set RFORK_PLANNER_TOKEN"
            )
            return ProblemError(403, "cross-origin", detail)
        return None


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _name_of(host: str) -> str | None:
    """Return the name in a `Host` header without its port, or None if it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        valid = parts.netloc == host and "@" not in host and (parts.port is None or parts.port >= 0)
    except ValueError:
        return None
    name = parts.hostname
    return name.rstrip(".") if valid and name else None
