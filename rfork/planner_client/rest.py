"""HTTP requests to the planner, with deadlines, one retry, and typed errors.

Runs in inference processes: synchronous, thread-safe, one connection pool.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping
from typing import Final, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from rfork import __version__
from rfork.addresses import redacted
from rfork.errors import PlannerRejected, PlannerUnreachable, SettingsError, reason_of
from rfork.net.tls import CurrentContext, client_context
from rfork.planner_client.deadline_transport import DEADLINE, DeadlineTransport
from rfork.planner_client.ownership import OWNER_HEADER
from rfork.planner_client.token_file import TokenFile
from rfork.schema import VERSION_HEADER, Problem
from rfork.settings import TlsSettings
from rfork.tracing import inject

ResponseT = TypeVar("ResponseT")

STALE_CONNECTION_ERRORS: Final = (
    httpx.RemoteProtocolError,
    httpx.ReadError,
    httpx.WriteError,
    httpx.CloseError,
)
RETRYABLE_STATUSES: Final = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
"""Statuses after which the same request may succeed later."""
KEPT_HEADERS: Final = ("retry-after", VERSION_HEADER.lower())
"""Response headers that are used."""
REJECTED: Final = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
"""Statuses of a rejected token."""
MAX_RESPONSE_BYTES: Final = 32 << 20
"""Several times the largest page of a planner: 1,000 forks of a few KiB each."""

Query = Mapping[str, str | int | bool | None]


class RestClient:
    """HTTP client of one planner; see `PlannerClient` for its errors."""

    def __init__(
        self,
        url: str,
        *,
        token: str | TokenFile | None,
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
        # No compression, so that the limit on a response also limits its memory.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        self._token_file = token if isinstance(token, TokenFile) else None
        if isinstance(token, str) and token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise _bad_url(url, str(error)) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise _bad_url(url, "it must begin with http:// or https:// and a host")
        basic: httpx.Auth | None = None
        if parsed.userinfo:
            # Sent as a header, and removed from every URL that may be displayed or logged.
            basic = httpx.BasicAuth(parsed.username, parsed.password)
            self.url = str(parsed.copy_with(username=None, password=None)).rstrip("/")
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                auth=basic,
                timeout=timeout_s,
                transport=transport or _transport(parsed.scheme, tls),
                trust_env=False,  # only the settings module reads the environment; no proxies
            )
        except UnicodeEncodeError:
            raise SettingsError(
                "the planner token contains characters that are not allowed in an HTTP header",
                hint="correct RFORK_TOKEN: visible ASCII characters only",
            ) from None

    def parsed(
        self,
        adapter: TypeAdapter[ResponseT],
        method: str,
        path: str,
        body: BaseModel | None = None,
        query: Query | None = None,
        *,
        patient: bool = False,
        deadline: float | None = None,
    ) -> ResponseT:
        """Send a request and return the body of its response, parsed by `adapter`. Parameters as in `call`."""
        response = self.call(method, path, body, query, patient=patient, deadline=deadline)
        try:
            return adapter.validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            reason = f"{where}: {first['msg']}"
            raise self.unexpected_response_error(
                method, path, response.status_code, reason, _skew_hint(response)
            ) from None

    def call(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        query: Query | None = None,
        *,
        patient: bool = False,
        deadline: float | None = None,
    ) -> httpx.Response:
        """Send a request and return its response with a 2xx status.

        `patient`: if the planner is busy and names a retry time before the deadline, wait and retry once. The
        deadline is `timeout_s` from now, or `deadline` (`time.monotonic()` value) if that is earlier.
        """
        latest = time.monotonic() + self.timeout_s
        deadline = latest if deadline is None else min(deadline, latest)
        while True:
            response = self._send(self._request(method, path, body, query, deadline), deadline)
            if response.is_success:
                return response
            if response.status_code in REJECTED and self._has_new_token(response.request):
                continue
            wait_s = _retry_after(response)
            if not patient or wait_s is None or time.monotonic() + wait_s >= deadline:
                raise self.rejected_error(response)
            patient = False
            self._closed.wait(wait_s)

    def stream(self, path: str, query: Query, silence_s: float) -> httpx.Response:
        """Send a GET request and return its open response. `silence_s` limits each wait for data."""
        deadline = time.monotonic() + self.timeout_s
        request = self._request("GET", path, None, query, deadline)
        request.headers["Accept"] = "text/event-stream"
        request.extensions["timeout"] = httpx.Timeout(self.timeout_s, read=silence_s).as_dict()
        try:
            response = self._http.send(request, stream=True)
            if not response.is_success:
                response = self._complete(request, response, deadline)
        except httpx.RequestError as error:
            raise self.unreachable_error(error) from error
        except RuntimeError as error:  # httpx: the client is closed
            raise PlannerUnreachable(f"request to planner {self.url} not sent: {error}") from error
        if not response.is_success:
            raise self.rejected_error(response)
        try:
            self._check_plain(request, response)
        except PlannerRejected:
            response.close()
            raise
        del request.extensions[DEADLINE]  # the stream of events has no deadline
        return response

    def close(self) -> None:
        """Close the connections: requests in progress fail, and waiting ones are not sent."""
        self._closed.set()
        self._http.close()

    def rejected_error(self, response: httpx.Response) -> PlannerRejected:
        """Return the error for a response without success."""
        method, path = response.request.method, response.request.url.path
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            return self.unexpected_response_error(
                method, path, response.status_code, "not a problem document", _skew_hint(response)
            )
        hint, wait_s = "", _retry_after(response)
        if problem.type.endswith("/not-owner"):
            hint = "run the command where the instance runs, with its RFORK_OWNER_SECRET, or use an operator's token"
        elif problem.type.endswith(("/unknown-host", "/cross-origin")):
            hint = "use the planner's own address, or set RFORK_PLANNER_ALLOWED_HOSTS on the planner"
        elif response.status_code in REJECTED:
            hint = "set RFORK_TOKEN, or the file RFORK_TOKEN_FILE, to one of the planner's tokens"
        elif wait_s is not None:
            hint = f"retry in {wait_s:g} s"
        elif response.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            hint = _skew_hint(response)
        return PlannerRejected(
            f"planner {self.url} refused {method} {path}: {problem.detail}",
            status=response.status_code,
            problem=problem.type.rsplit("/", 1)[-1],
            hint=hint,
        )

    def unreachable_error(self, error: httpx.RequestError, within_s: float | None = None) -> PlannerUnreachable:
        """Return the error for a request without response, or without one in time (default: `timeout_s`)."""
        return unreachable_error(self.url, error, self.timeout_s if within_s is None else within_s)

    def unexpected_response_error(
        self, method: str, path: str, status: int, reason: str, hint: str = ""
    ) -> PlannerRejected:
        """Return the error for a response that no planner sends."""
        return PlannerRejected(
            f"unexpected response from {self.url} to {method} {path} (status {status}): {reason}",
            status=status,
            problem="not-a-planner",
            hint=hint or "check that RFORK_PLANNER is the URL of an rfork planner of this release",
        )

    def _has_new_token(self, rejected_error: httpx.Request) -> bool:
        """Return whether the token file now contains another token than the rejected one."""
        if self._token_file is None:
            return False
        return f"Bearer {self._token_file.reread()}" != str(rejected_error.headers.get("Authorization"))

    def _request(
        self, method: str, path: str, body: BaseModel | None, query: Query | None, deadline: float
    ) -> httpx.Request:
        headers = inject() | ({} if body is None else {"Content-Type": "application/json"})
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {self._token_file.token}"
        return self._http.build_request(
            method,
            path,
            params={name: value for name, value in (query or {}).items() if value is not None},
            content=None if body is None else body.model_dump_json(),
            headers=headers | ({} if method == "GET" else self._owner),
            timeout=max(0.001, deadline - time.monotonic()),
            extensions={DEADLINE: deadline},
        )

    def _send(self, request: httpx.Request, deadline: float) -> httpx.Response:
        """Send the request and read the body. Retry once if the pooled connection was stale."""
        within_s = max(0.0, deadline - time.monotonic())
        try:
            try:
                return self._read(request, deadline)
            except STALE_CONNECTION_ERRORS:
                return self._read(request, deadline)
        except httpx.RequestError as error:
            raise self.unreachable_error(error, within_s) from error
        except RuntimeError as error:  # httpx: the client is closed
            raise PlannerUnreachable(f"request to planner {self.url} not sent: {error}") from error

    def _read(self, request: httpx.Request, deadline: float) -> httpx.Response:
        return self._complete(request, self._http.send(request, stream=True), deadline)

    def _complete(self, request: httpx.Request, response: httpx.Response, deadline: float) -> httpx.Response:
        """Return the response with its body, which is limited in time and size."""
        try:
            self._check_plain(request, response)
            content = bytearray()
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MAX_RESPONSE_BYTES:
                    raise self._unusable(request, response, f"it is larger than {MAX_RESPONSE_BYTES >> 20} MiB")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the response was too slow", request=request)
        finally:
            response.close()
        kept = {name: value for name, value in response.headers.items() if name in KEPT_HEADERS}
        return httpx.Response(response.status_code, headers=kept, content=bytes(content), request=request)

    def _check_plain(self, request: httpx.Request, response: httpx.Response) -> None:
        """Raise PlannerRejected for a compressed body, which could use much more memory than its size."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise self._unusable(request, response, f"its body is encoded ({encoding[:20]!r})")

    def _unusable(self, request: httpx.Request, response: httpx.Response, reason: str) -> PlannerRejected:
        return self.unexpected_response_error(request.method, request.url.path, response.status_code, reason)


def unreachable_error(url: str, error: httpx.RequestError, timeout_s: float) -> PlannerUnreachable:
    """Return the error for a request to the planner at `url` that failed without a response."""
    if isinstance(error, httpx.TimeoutException):
        reason = f"no response within {round(timeout_s, 1):g} s"
    else:
        reason = reason_of(error)
    hint = _tls_hint(reason) or "start it (`rfork planner`), or correct RFORK_PLANNER"
    if "WRONG_VERSION_NUMBER" in reason:
        hint = f"a server without TLS responded: use http://{httpx.URL(url).netloc.decode()}"
    elif isinstance(error, httpx.RemoteProtocolError):
        reason = f"the server there closed the connection or does not use HTTP ({reason.rstrip('.')})"
        hint = "check that RFORK_PLANNER is the URL of an rfork planner, with https:// if the planner uses TLS"
    return PlannerUnreachable(
        f"planner {url} is unreachable: {reason}", hint=hint, silent=isinstance(error, httpx.ReadTimeout)
    )


def _retry_after(response: httpx.Response) -> float | None:
    """Return the Retry-After seconds of a busy planner, if any (RFC 9110, section 10.2.3)."""
    if response.status_code not in RETRYABLE_STATUSES:
        return None
    header = response.headers.get("Retry-After", "")
    # The planner never sends the other form, a date.
    return float(header) if header.isascii() and header.isdigit() else None


def _skew_hint(response: httpx.Response) -> str:
    """Return a hint if the two sides run different releases, else an empty text."""
    theirs = response.headers.get(VERSION_HEADER)
    if theirs in (None, __version__):
        return ""
    return f"this is rfork {__version__}, the planner runs {theirs[:40]}: upgrade the planner first, then instances"


def _tls_hint(reason: str) -> str:
    """Return a hint for a failed certificate check in a handshake, else an empty text."""
    if "certificate has expired" in reason:
        return "renew the planner's certificate (its RFORK_TLS_CERTIFICATE), or correct this host's clock"
    if "ALERT_CERTIFICATE_EXPIRED" in reason.upper().replace(" ", "_"):
        return "renew this process's certificate (RFORK_TLS_CERTIFICATE), or correct the planner's clock"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return (
            "set RFORK_TLS_CA to the authority of its certificate, and use a name from the certificate in RFORK_PLANNER"
        )
    return ""


def _bad_url(url: str, reason: str) -> SettingsError:
    redacted_url = redacted(url)
    # The parser's reason may contain part of the password.
    if redacted_url != url:
        reason = "malformed; percent-encode special characters of the password (%40 for @)"
    return SettingsError(f"invalid planner URL {redacted_url!r}: {reason}", hint="e.g. http://127.0.0.1:8700")


def _transport(scheme: str, tls: TlsSettings | None) -> DeadlineTransport:
    if scheme != "https":  # loading this machine's authorities takes 20 ms
        return DeadlineTransport(lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    try:
        # Reloaded for a new connection if the files have changed.
        return DeadlineTransport(CurrentContext(tls or TlsSettings(), client_context))
    except SettingsError as error:
        raise SettingsError(
            f"invalid TLS files of the planner client: {error}",
            hint="check RFORK_TLS_CA, RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY: each must be a PEM file",
        ) from error
