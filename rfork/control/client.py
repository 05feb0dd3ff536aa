"""A typed client of the planner's REST interface, for instances and for the command line.

Runs inside an inference instance, beside the engine: synchronous, thread-safe, one connection pool.
Every call is idempotent at the planner, so a call whose pooled connection turns out dead (a planner
that restarted) is sent once more on a fresh one.
"""

from __future__ import annotations

import ssl
import time
from types import TracebackType
from typing import Final, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from rfork.errors import PlannerRefused, PlannerUnreachable, SettingsError
from rfork.settings import TlsSettings
from rfork.wire import (
    ForkFinish,
    ForkProgress,
    ForkRequest,
    ForkState,
    ForkView,
    InstanceAck,
    InstanceReport,
    InstanceState,
    InstanceView,
    ModelView,
    Plan,
    Problem,
    ProgressAck,
)

Answer = TypeVar("Answer")

INSTANCES: Final = TypeAdapter(list[InstanceView])
FORKS: Final = TypeAdapter(list[ForkView])
MODELS: Final = TypeAdapter(list[ModelView])
DEAD_CONNECTION: Final = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError)


class PlannerClient:
    """Speaks to one planner.

    Every method raises PlannerUnreachable when the planner does not answer within `timeout_s`, and
    PlannerRefused when it answers with a problem document or with something that is not an answer.
    The constructor raises SettingsError for a URL or TLS files that cannot be used; it connects to nothing.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        tls: TlsSettings | None = None,
        timeout_s: float = 5.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`transport` replaces the sockets, for tests."""
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        headers = {"Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise _bad_url(url, str(error)) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise _bad_url(url, "it does not begin with http:// or https:// and a host")
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout_s,
                verify=_ssl_context(tls),
                transport=transport,
                trust_env=False,  # the settings module alone reads the environment; proxies do not apply
            )
        except UnicodeEncodeError:
            raise SettingsError("the planner token has characters that cannot stand in a header") from None

    def report(self, report: InstanceReport) -> InstanceAck:
        """Register an instance, or send its heartbeat: one call does both."""
        path = f"/v1/instances/{_part(report.instance_id)}"
        return self._parsed(TypeAdapter(InstanceAck), "PUT", path, report)

    def drain(self, instance_id: str) -> InstanceView:
        """Give the instance no new readers from now on."""
        return self._parsed(TypeAdapter(InstanceView), "POST", f"/v1/instances/{_part(instance_id)}/drain")

    def remove(self, instance_id: str) -> None:
        """Forget the instance; one that is not known is no error."""
        self._call("DELETE", f"/v1/instances/{_part(instance_id)}")

    def ask(self, request: ForkRequest) -> Plan:
        """Ask for a plan, or for a new one under the same fork_id."""
        return self._parsed(TypeAdapter(Plan), "POST", "/v1/forks", request)

    def progress(self, fork_id: str, progress: ForkProgress) -> ProgressAck:
        """Report progress and get the leases of the current routes renewed.

        PlannerRefused with problem `unknown-fork` means that the planner restarted: `ask` again.
        """
        path = f"/v1/forks/{_part(fork_id)}/progress"
        return self._parsed(TypeAdapter(ProgressAck), "POST", path, progress)

    def finish(self, fork_id: str, finish: ForkFinish) -> None:
        """Report how a fork ended; its leases are released."""
        self._call("POST", f"/v1/forks/{_part(fork_id)}/finish", finish)

    def instances(
        self, *, model: str | None = None, state: InstanceState | None = None
    ) -> list[InstanceView]:
        """The instances the planner knows."""
        return self._parsed(INSTANCES, "GET", "/v1/instances", query={"model": model, "state": state})

    def instance(self, instance_id: str) -> InstanceView:
        """One instance; PlannerRefused with problem `unknown-instance` where there is none."""
        return self._parsed(TypeAdapter(InstanceView), "GET", f"/v1/instances/{_part(instance_id)}")

    def forks(self, *, model: str | None = None, state: ForkState | None = None) -> list[ForkView]:
        """The forks under way and the last finished ones."""
        return self._parsed(FORKS, "GET", "/v1/forks", query={"model": model, "state": state})

    def fork(self, fork_id: str) -> ForkView:
        """One fork; PlannerRefused with problem `unknown-fork` where there is none."""
        return self._parsed(TypeAdapter(ForkView), "GET", f"/v1/forks/{_part(fork_id)}")

    def models(self) -> list[ModelView]:
        """What the fleet holds, one row for each model, rank, layout and weights."""
        return self._parsed(MODELS, "GET", "/v1/models")

    def ready(self) -> bool:
        """Whether the planner is ready to answer; raises PlannerUnreachable where nothing answers."""
        try:
            self._call("GET", "/readyz")
        except PlannerRefused as error:
            if error.status == httpx.codes.SERVICE_UNAVAILABLE:
                return False
            raise
        return True

    def close(self) -> None:
        """Close the pooled connections; the client cannot be used again."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _parsed(
        self,
        answer: TypeAdapter[Answer],
        method: str,
        path: str,
        body: BaseModel | None = None,
        query: dict[str, str | None] | None = None,
    ) -> Answer:
        status, content = self._call(method, path, body, query)
        try:
            return answer.validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise self._not_a_planner(method, path, status, f"{where}: {first['msg']}") from None

    def _call(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        query: dict[str, str | None] | None = None,
    ) -> tuple[int, bytes]:
        """Send one request; returns the status and body of a 2xx answer."""
        deadline = time.monotonic() + self._timeout_s
        request = self._http.build_request(
            method,
            path,
            params={name: value for name, value in (query or {}).items() if value is not None},
            content=None if body is None else body.model_dump_json(),
            headers=None if body is None else {"Content-Type": "application/json"},
        )
        response = self._send(request, deadline)
        if response.is_success:
            return response.status_code, response.content
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            raise self._not_a_planner(method, path, response.status_code, "not a problem document") from None
        raise PlannerRefused(
            f"planner {self.url} refused {method} {path}: {problem.detail}",
            status=response.status_code,
            problem=problem.type.rsplit("/", 1)[-1],
            hint="set RFORK_TOKEN to the planner's token" if response.status_code in (401, 403) else "",
        )

    def _send(self, request: httpx.Request, deadline: float) -> httpx.Response:
        """Send, once more if the pooled connection was dead, and read the body within `deadline`."""
        try:
            try:
                return self._read(request, deadline)
            except DEAD_CONNECTION:
                return self._read(request, deadline)
        except httpx.RequestError as error:
            raise self._unreachable(error) from error
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
        return httpx.Response(response.status_code, content=bytes(content), request=request)

    def _unreachable(self, error: httpx.RequestError) -> PlannerUnreachable:
        if isinstance(error, httpx.TimeoutException):
            reason = f"no answer within {self._timeout_s:g} s"
        else:
            reason = str(error) or type(error).__name__
        message = f"planner {self.url} cannot be reached: {reason}"
        return PlannerUnreachable(message, hint="check RFORK_PLANNER")

    def _not_a_planner(self, method: str, path: str, status: int, reason: str) -> PlannerRefused:
        return PlannerRefused(
            f"{self.url} gave no planner's answer to {method} {path} (status {status}): {reason}",
            status=status,
            problem="not-a-planner",
            hint="check that RFORK_PLANNER names an rfork planner of this release",
        )


def _part(identifier: str) -> str:
    return quote(identifier, safe=":")


def _bad_url(url: str, reason: str) -> SettingsError:
    return SettingsError(f"planner URL {url!r} cannot be used: {reason}", hint="e.g. http://127.0.0.1:8700")


def _ssl_context(tls: TlsSettings | None) -> ssl.SSLContext:
    """Trust `tls.ca` (else this machine's authorities) and show `tls.certificate` if there is one."""
    try:
        context = ssl.create_default_context(cafile=tls.ca if tls else None)
        if tls and tls.certificate and tls.key:
            context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"the TLS files of the planner client cannot be used: {error}") from error
    return context
