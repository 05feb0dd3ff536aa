"""HTTP client for the planner, with pooled connections: implements `planner.integrations.planner_api`.

Runs in the integration's event loop, in the planner's process or its own. All requests are idempotent, so a
request on a pooled connection that turns out closed (after a restart of the planner) is sent once more.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from planner.integrations.planner_api import PlannerUnavailable
from rfork.addresses import redacted
from rfork.errors import SettingsError, reason_of
from rfork.schema import (
    ForkInfo,
    ForkPage,
    InstanceInfo,
    InstancePage,
    ModelInfo,
    Problem,
    ScaleUp,
    ScaleUpInfo,
)
from rfork.settings import InstanceSettings, TlsSettings
from rfork.tracing import inject

PAGE: Final = 1000
"""Page size of a list request."""
DEAD_CONNECTION: Final = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError)

INSTANCES: Final = TypeAdapter(InstancePage)
FORKS: Final = TypeAdapter(ForkPage)
MODELS: Final = TypeAdapter(tuple[ModelInfo, ...])
SCALEUPS: Final = TypeAdapter(tuple[ScaleUpInfo, ...])
SCALEUP: Final = TypeAdapter(ScaleUpInfo)

ParsedT = TypeVar("ParsedT")
Page = TypeVar("Page", InstancePage, ForkPage)
Query = Mapping[str, str | int | None]


class PlannerRestClient:
    """Calls the configured planner with its token, TLS files and `planner_timeout_s`.

    Every call, including all its pages, completes within that time or raises PlannerUnavailable. The
    constructor does not connect. It raises SettingsError if no planner is set, or if the URL, the token or
    the TLS files are unusable. `transport` replaces the network in tests.
    """

    def __init__(self, settings: InstanceSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        if settings.planner is None:
            raise SettingsError("no planner is set", hint="set RFORK_PLANNER to the planner's URL")
        self.url = settings.planner.rstrip("/")
        self._timeout_s = settings.planner_timeout_s
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise _invalid_url_error(self.url, str(error)) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise _invalid_url_error(self.url, "it must begin with http:// or https:// and a host")
        basic: httpx.Auth | None = None
        if parsed.userinfo:
            # Sent as a header, so it appears in no URL that may be shown or logged.
            basic = httpx.BasicAuth(parsed.username, parsed.password)
            self.url = str(parsed.copy_with(username=None, password=None)).rstrip("/")
        headers = {"Accept": "application/json"}
        if token := settings.bearer:
            headers["Authorization"] = f"Bearer {token}"
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                auth=basic,
                timeout=self._timeout_s,
                verify=_ssl_context(settings.tls),
                transport=transport,
                trust_env=False,  # only the settings module reads the environment; proxies do not apply
            )
        except UnicodeEncodeError:
            raise SettingsError(
                "the planner token contains characters that are not allowed in an HTTP header",
                hint="correct RFORK_TOKEN: visible ASCII characters only",
            ) from None

    async def instances(self, *, model: str | None = None) -> tuple[InstanceInfo, ...]:
        """Return all instances, or those of one model, sorted by id."""
        async with self._with_timeout("GET /v1/instances"):
            pages = self._pages(INSTANCES, "/v1/instances", {"model": model})
            return tuple([item async for page in pages for item in page.items])

    async def forks(self) -> tuple[ForkInfo, ...]:
        """Return active and recently finished forks, sorted by id."""
        async with self._with_timeout("GET /v1/forks"):
            return tuple([item async for page in self._pages(FORKS, "/v1/forks", {}) for item in page.items])

    async def models(self) -> tuple[ModelInfo, ...]:
        """Return the fleet's state of each model and rank."""
        async with self._with_timeout("GET /v1/models"):
            return await self._call_parsed(MODELS, "GET", "/v1/models")

    async def scaleups(self) -> tuple[ScaleUpInfo, ...]:
        """Return active scale-ups."""
        async with self._with_timeout("GET /v1/scaleups"):
            return await self._call_parsed(SCALEUPS, "GET", "/v1/scaleups")

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        """Announce that replicas will start, or update how many."""
        async with self._with_timeout("POST /v1/scaleups"):
            return await self._call_parsed(SCALEUP, "POST", "/v1/scaleups", scaleup)

    async def withdraw(self, scaleup_id: str) -> None:
        """Withdraw a scale-up. An unknown one is no error."""
        async with self._with_timeout("DELETE /v1/scaleups"):
            await self._call("DELETE", f"/v1/scaleups/{quote(scaleup_id, safe=':')}")

    async def remove(self, instance_id: str) -> None:
        """Remove an instance. An unknown one is no error."""
        async with self._with_timeout("DELETE /v1/instances"):
            await self._call("DELETE", f"/v1/instances/{quote(instance_id, safe=':')}")

    async def close(self) -> None:
        """Close all connections. Later calls raise PlannerUnavailable."""
        await self._http.aclose()

    # -- requests -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _with_timeout(self, what: str) -> AsyncIterator[None]:
        """Limit the time of a call, over all its requests, and convert errors to PlannerUnavailable."""
        try:
            # httpx limits each wait, not their sum: a planner that sends slowly would block the caller.
            async with asyncio.timeout(self._timeout_s):
                yield
        except (TimeoutError, httpx.TimeoutException):
            raise self._unavailable_error(what, f"no response within {self._timeout_s:g} s") from None
        except httpx.RequestError as error:
            raise self._unavailable_error(what, reason_of(error)) from error

    async def _pages(
        self, page_adapter: TypeAdapter[Page], path: str, query: Mapping[str, str | None]
    ) -> AsyncIterator[Page]:
        after: str | None = None
        while True:
            page = await self._call_parsed(page_adapter, "GET", path, query={**query, "after": after, "limit": PAGE})
            yield page
            # Cursors must increase: a planner that repeats pages must not block the caller.
            if page.next is not None and after is not None and page.next <= after:
                raise self._invalid_response_error("GET", path, httpx.codes.OK, "its pages repeat")
            if page.next is None:
                return
            after = page.next
            await asyncio.sleep(0)  # parsing a page takes a while: let other tasks of this loop run

    async def _call_parsed(
        self,
        adapter: TypeAdapter[ParsedT],
        method: str,
        path: str,
        body: BaseModel | None = None,
        query: Query | None = None,
    ) -> ParsedT:
        response = await self._call(method, path, body, query)
        try:
            return adapter.validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(str(part) for part in first["loc"]) or "body"
            reason = f"{location}: {first['msg']}"
            raise self._invalid_response_error(method, path, response.status_code, reason) from None

    async def _call(
        self, method: str, path: str, body: BaseModel | None = None, query: Query | None = None
    ) -> httpx.Response:
        """Send one request and return the complete 2xx response."""
        if self._http.is_closed:
            raise self._unavailable_error(f"{method} {path}", "the client is closed")
        request = self._http.build_request(
            method,
            path,
            params={name: value for name, value in (query or {}).items() if value is not None},
            content=None if body is None else body.model_dump_json(),
            headers=inject() | ({} if body is None else {"Content-Type": "application/json"}),
        )
        try:
            response = await self._http.send(request)
        except DEAD_CONNECTION:
            response = await self._http.send(request)
        if not response.is_success:
            raise self._rejected_error(method, path, response)
        return response

    # -- errors ---------------------------------------------------------------------------------------

    def _unavailable_error(self, what: str, reason: str) -> PlannerUnavailable:
        return PlannerUnavailable(f"planner {self.url} did not respond to {what}: {reason}")

    def _rejected_error(self, method: str, path: str, response: httpx.Response) -> PlannerUnavailable:
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            return self._invalid_response_error(method, path, response.status_code, "not a problem document")
        hint = ""
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            hint = "; set RFORK_TOKEN to an operator token"
        slug = problem.type.rpartition("/")[2]
        return PlannerUnavailable(
            f"planner {self.url} refused {method} {path} ({response.status_code} {slug}): {problem.detail}{hint}"
        )

    def _invalid_response_error(self, method: str, path: str, status: int, reason: str) -> PlannerUnavailable:
        return PlannerUnavailable(
            f"unexpected response from {self.url} to {method} {path} (status {status}): {reason}; "
            "check that RFORK_PLANNER is the URL of an rfork planner of this release"
        )


def _invalid_url_error(url: str, reason: str) -> SettingsError:
    redacted_url = redacted(url)
    # The parser's reason may contain a part of the password.
    if redacted_url != url:
        reason = "malformed; percent-encode special characters of the password (%40 for @)"
    return SettingsError(f"invalid planner URL {redacted_url!r}: {reason}", hint="e.g. http://127.0.0.1:8700")


def _ssl_context(tls: TlsSettings) -> ssl.SSLContext:
    """Trust `tls.ca` (else the system's CAs), and use `tls.certificate` if there is one."""
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.certificate and tls.key:
            context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"invalid TLS files of the planner client: {reason_of(error)}",
            hint="check RFORK_TLS_CA, RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY: each must be a PEM file",
        ) from error
    return context
