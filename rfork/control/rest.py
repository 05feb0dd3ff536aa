"""Requests to the planner and what may come of them: answers, problems, or nothing within the time.

Runs inside an inference instance: synchronous, thread-safe, one connection pool.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping
from typing import Final, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from rfork.control.ownership import OWNER_HEADER
from rfork.errors import PlannerRefused, PlannerUnreachable, SettingsError
from rfork.settings import TlsSettings, redacted
from rfork.tracing import carrier
from rfork.wire import Problem

Answer = TypeVar("Answer")

DEAD_CONNECTION: Final = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError)
BUSY: Final = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
"""Statuses after which the same request may be answered a little later."""

Query = Mapping[str, str | int | bool | None]


class RestClient:
    """Speaks to one planner; see `PlannerClient` for its errors."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        tls: TlsSettings | None,
        timeout_s: float,
        transport: httpx.BaseTransport | None,
        owner: str = "",
    ) -> None:
        """`owner`: sent with each request that changes something."""
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._closed = threading.Event()
        self._owner = {OWNER_HEADER: owner} if owner else {}
        headers = {"Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise _bad_url(url, str(error)) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise _bad_url(url, "it does not begin with http:// or https:// and a host")
        basic: httpx.Auth | None = None
        if parsed.userinfo:
            # Sent as a header, and kept out of every URL that may be shown or logged.
            basic = httpx.BasicAuth(parsed.username, parsed.password)
            self.url = str(parsed.copy_with(username=None, password=None)).rstrip("/")
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                auth=basic,
                timeout=timeout_s,
                verify=_ssl_context(tls) if parsed.scheme == "https" else _nobody(),
                transport=transport,
                trust_env=False,  # the settings module alone reads the environment; proxies do not apply
            )
        except UnicodeEncodeError:
            raise SettingsError("the planner token has characters that cannot stand in a header") from None

    def parsed(
        self,
        answer: TypeAdapter[Answer],
        method: str,
        path: str,
        body: BaseModel | None = None,
        query: Query | None = None,
        *,
        patient: bool = False,
    ) -> Answer:
        """Send one request; returns the body of its answer, as `answer` has it."""
        response = self.call(method, path, body, query, patient=patient)
        try:
            return answer.validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise self.not_a_planner(method, path, response.status_code, f"{where}: {first['msg']}") from None

    def call(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        query: Query | None = None,
        *,
        patient: bool = False,
    ) -> httpx.Response:
        """Send one request; returns a 2xx answer. `patient`: where the planner says that it would answer
        later, and within `timeout_s`, wait and send it once more.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            response = self._send(self._request(method, path, body, query, deadline), deadline)
            if response.is_success:
                return response
            wait_s = _retry_after(response)
            if not patient or wait_s is None or time.monotonic() + wait_s >= deadline:
                raise self.refused(response)
            patient = False
            self._closed.wait(wait_s)

    def stream(self, path: str, query: Query, silence_s: float) -> httpx.Response:
        """The open answer to a GET: 2xx, its body yet to be read. `silence_s` bounds each wait for a part."""
        deadline = time.monotonic() + self.timeout_s
        request = self._request("GET", path, None, query, deadline)
        request.headers["Accept"] = "text/event-stream"
        request.extensions["timeout"] = httpx.Timeout(self.timeout_s, read=silence_s).as_dict()
        try:
            response = self._http.send(request, stream=True)
            if not response.is_success:
                try:
                    response.read()
                finally:
                    response.close()
        except httpx.RequestError as error:
            raise self.unreachable(error) from error
        except RuntimeError as error:  # httpx: the client has been closed
            raise PlannerUnreachable(f"planner {self.url} was not asked: {error}") from error
        if not response.is_success:
            raise self.refused(response)
        return response

    def close(self) -> None:
        """Close the pooled connections; a request that waits is sent no more."""
        self._closed.set()
        self._http.close()

    def refused(self, response: httpx.Response) -> PlannerRefused:
        """The error of an answer that is no success."""
        method, path = response.request.method, response.request.url.path
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            return self.not_a_planner(method, path, response.status_code, "not a problem document")
        hint, wait_s = "", _retry_after(response)
        if problem.type.endswith("/not-owner"):
            hint = "call it where the instance runs, with its RFORK_OWNER_SECRET, or with an operator's token"
        elif problem.type.endswith(("/unknown-host", "/cross-origin")):
            hint = "reach the planner by its address, or set RFORK_PLANNER_ALLOWED_HOSTS there"
        elif response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            hint = "set RFORK_TOKEN to the planner's token"
        elif wait_s is not None:
            hint = f"ask again in {wait_s:g} s"
        return PlannerRefused(
            f"planner {self.url} refused {method} {path}: {problem.detail}",
            status=response.status_code,
            problem=problem.type.rsplit("/", 1)[-1],
            hint=hint,
        )

    def unreachable(self, error: httpx.RequestError, within_s: float | None = None) -> PlannerUnreachable:
        """The error of a request that was not answered, or not within a time (`timeout_s`, unless given)."""
        if isinstance(error, httpx.TimeoutException):
            reason = f"no answer within {within_s or self.timeout_s:g} s"
        else:
            reason = str(error) or type(error).__name__
        message = f"planner {self.url} cannot be reached: {reason}"
        hint = "start it (`rfork planner`), or correct RFORK_PLANNER"
        return PlannerUnreachable(message, hint=hint, silent=isinstance(error, httpx.ReadTimeout))

    def not_a_planner(self, method: str, path: str, status: int, reason: str) -> PlannerRefused:
        """The error of an answer that no planner gives."""
        return PlannerRefused(
            f"{self.url} gave no planner's answer to {method} {path} (status {status}): {reason}",
            status=status,
            problem="not-a-planner",
            hint="check that RFORK_PLANNER names an rfork planner of this release",
        )

    def _request(
        self, method: str, path: str, body: BaseModel | None, query: Query | None, deadline: float
    ) -> httpx.Request:
        return self._http.build_request(
            method,
            path,
            params={name: value for name, value in (query or {}).items() if value is not None},
            content=None if body is None else body.model_dump_json(),
            headers=carrier()
            | ({} if method == "GET" else self._owner)
            | ({} if body is None else {"Content-Type": "application/json"}),
            timeout=max(0.001, deadline - time.monotonic()),
        )

    def _send(self, request: httpx.Request, deadline: float) -> httpx.Response:
        """Send, once more if the pooled connection was dead, and read the body within `deadline`."""
        try:
            try:
                return self._read(request, deadline)
            except DEAD_CONNECTION:
                return self._read(request, deadline)
        except httpx.RequestError as error:
            raise self.unreachable(error) from error
        except RuntimeError as error:  # httpx: the client has been closed
            raise PlannerUnreachable(f"planner {self.url} was not asked: {error}") from error

    def _read(self, request: httpx.Request, deadline: float) -> httpx.Response:
        response = self._http.send(request, stream=True)
        try:
            content = bytearray()
            for piece in response.iter_bytes():
                content += piece
                # httpx bounds each wait, not their sum: a server that trickles would hold the caller.
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer trickled in too slowly", request=request)
        finally:
            response.close()
        kept = {name: value for name, value in response.headers.items() if name == "retry-after"}
        return httpx.Response(response.status_code, headers=kept, content=bytes(content), request=request)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds after which a busy planner would answer, if it says so (RFC 9110, section 10.2.3)."""
    if response.status_code not in BUSY:
        return None
    shown = response.headers.get("Retry-After", "")
    # A date, its other form, is never sent by a planner.
    return float(shown) if shown.isascii() and shown.isdigit() else None


def _bad_url(url: str, reason: str) -> SettingsError:
    shown = redacted(url)
    # The parser's reason may quote a part of the password.
    reason = reason if shown == url else "malformed; quote special characters of the password (%40 for @)"
    return SettingsError(f"planner URL {shown!r} cannot be used: {reason}", hint="e.g. http://127.0.0.1:8700")


def _nobody() -> ssl.SSLContext:
    """Trusts nobody: plain HTTP needs none, and to read this machine's authorities takes 20 ms."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _ssl_context(tls: TlsSettings | None) -> ssl.SSLContext:
    """Trust `tls.ca` (else this machine's authorities) and show `tls.certificate` if there is one."""
    try:
        context = ssl.create_default_context(cafile=tls.ca if tls else None)
        if tls and tls.certificate and tls.key:
            context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"the TLS files of the planner client cannot be used: {error}") from error
    return context
