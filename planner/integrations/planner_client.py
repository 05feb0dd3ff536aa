"""The planner as hooks see it, over HTTP: `planner.integrations.planner_api.PlannerApi` with a pool of connections.

Runs in a hook's event loop, be that in the planner's own process or not. Everything that it asks may be asked
twice, so a call whose pooled connection turns out dead (a planner that restarted) is sent once more.
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
from rfork.errors import SettingsError
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
from rfork.settings import InstanceSettings, TlsSettings, redacted
from rfork.tracing import inject

PAGE: Final = 1000
"""Items that one request of a list asks for."""
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
    """Speaks to the planner that the settings name, with their token, TLS files and `planner_timeout_s`.

    Every call is answered within that time, all its pages together, or raises PlannerUnavailable. The constructor
    connects to nothing; it raises SettingsError where no planner is set, or where the URL, the token or the
    TLS files cannot be used. `transport` replaces the sockets, for tests.
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
            raise _invalid_url_error(self.url, "it does not begin with http:// or https:// and a host")
        basic: httpx.Auth | None = None
        if parsed.userinfo:
            # Sent as a header, and kept out of every URL that may be shown or logged.
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
                trust_env=False,  # the settings module alone reads the environment; proxies do not apply
            )
        except UnicodeEncodeError:
            raise SettingsError("the planner token has characters that cannot stand in a header") from None

    async def instances(self, *, model: str | None = None) -> tuple[InstanceInfo, ...]:
        """All instances, or those of one model, in the order of their ids."""
        async with self._with_timeout("GET /v1/instances"):
            pages = self._pages(INSTANCES, "/v1/instances", {"model": model})
            return tuple([item async for page in pages for item in page.items])

    async def forks(self) -> tuple[ForkInfo, ...]:
        """Forks under way and those that ended lately, in the order of their ids."""
        async with self._with_timeout("GET /v1/forks"):
            return tuple([item async for page in self._pages(FORKS, "/v1/forks", {}) for item in page.items])

    async def models(self) -> tuple[ModelInfo, ...]:
        """What the fleet holds of each model and rank."""
        async with self._with_timeout("GET /v1/models"):
            return await self._call_parsed(MODELS, "GET", "/v1/models")

    async def scaleups(self) -> tuple[ScaleUpInfo, ...]:
        """Scale-ups under way."""
        async with self._with_timeout("GET /v1/scaleups"):
            return await self._call_parsed(SCALEUPS, "GET", "/v1/scaleups")

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        """Say that replicas are about to start, or how many still are."""
        async with self._with_timeout("POST /v1/scaleups"):
            return await self._call_parsed(SCALEUP, "POST", "/v1/scaleups", scaleup)

    async def withdraw(self, scaleup_id: str) -> None:
        """They are not waited for any more; a scale-up that is not known is no error."""
        async with self._with_timeout("DELETE /v1/scaleups"):
            await self._call("DELETE", f"/v1/scaleups/{quote(scaleup_id, safe=':')}")

    async def remove(self, instance_id: str) -> None:
        """The instance is gone; one that is not known is no error."""
        async with self._with_timeout("DELETE /v1/instances"):
            await self._call("DELETE", f"/v1/instances/{quote(instance_id, safe=':')}")

    async def close(self) -> None:
        """Let go of connections; what is asked from then on is PlannerUnavailable."""
        await self._http.aclose()

    # -- requests -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _with_timeout(self, what: str) -> AsyncIterator[None]:
        """Bound a call, all its requests together, and say what became of it in PlannerUnavailable's words."""
        try:
            # httpx bounds each wait, not their sum: a planner that trickles would hold the caller.
            async with asyncio.timeout(self._timeout_s):
                yield
        except (TimeoutError, httpx.TimeoutException):
            raise self._unavailable_error(what, f"no answer within {self._timeout_s:g} s") from None
        except httpx.RequestError as error:
            raise self._unavailable_error(what, str(error) or type(error).__name__) from error

    async def _pages(
        self, page_adapter: TypeAdapter[Page], path: str, query: Mapping[str, str | None]
    ) -> AsyncIterator[Page]:
        after: str | None = None
        while True:
            page = await self._call_parsed(page_adapter, "GET", path, query={**query, "after": after, "limit": PAGE})
            yield page
            # Cursors only grow: a planner that goes round in circles must not hold the caller.
            if page.next is not None and after is not None and page.next <= after:
                raise self._timeout_error("GET", path, httpx.codes.OK, "its pages go in circles")
            if page.next is None:
                return
            after = page.next
            await asyncio.sleep(0)  # a page takes a while to parse: let the others of this loop go on

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
            raise self._timeout_error(method, path, response.status_code, reason) from None

    async def _call(
        self, method: str, path: str, body: BaseModel | None = None, query: Query | None = None
    ) -> httpx.Response:
        """A 2xx answer, read whole."""
        if self._http.is_closed:
            raise self._unavailable_error(f"{method} {path}", "its client was closed")
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
        return PlannerUnavailable(f"planner {self.url} did not answer {what}: {reason}")

    def _rejected_error(self, method: str, path: str, response: httpx.Response) -> PlannerUnavailable:
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            return self._timeout_error(method, path, response.status_code, "not a problem document")
        hint = ""
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            hint = "; set RFORK_TOKEN to an operator's token"
        slug = problem.type.rpartition("/")[2]
        return PlannerUnavailable(
            f"planner {self.url} refused {method} {path} ({response.status_code} {slug}): {problem.detail}{hint}"
        )

    def _timeout_error(self, method: str, path: str, status: int, reason: str) -> PlannerUnavailable:
        return PlannerUnavailable(
            f"{self.url} gave no planner's answer to {method} {path} (status {status}): {reason}; "
            "check that RFORK_PLANNER names an rfork planner of this release"
        )


def _invalid_url_error(url: str, reason: str) -> SettingsError:
    redacted_url = redacted(url)
    # The parser's reason may quote a part of the password.
    reason = reason if redacted_url == url else "malformed; quote special characters of the password (%40 for @)"
    return SettingsError(f"planner URL {redacted_url!r} cannot be used: {reason}", hint="e.g. http://127.0.0.1:8700")


def _ssl_context(tls: TlsSettings) -> ssl.SSLContext:
    """Trust `tls.ca` (else this machine's authorities) and show `tls.certificate` if there is one."""
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.certificate and tls.key:
            context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"the TLS files that the planner is asked with cannot be used: {error}",
            hint="mend RFORK_TLS_CA, RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY: each is a PEM file",
        ) from error
    return context
