"""Typed client of the planner's REST interface, for instances, the command line and integrations.

Runs in inference processes: synchronous, thread-safe, one connection pool. All calls are idempotent at the
planner, so a request that fails on a stale pooled connection (after a planner restart) is repeated once on a
new one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final, TypeVar
from urllib.parse import quote
from weakref import WeakSet

import httpx
from pydantic import TypeAdapter
from typing_extensions import Self

from rfork.errors import PlannerRejected, SettingsError
from rfork.planner_client.events import IDLE_TIMEOUT_S, PlannerEventStream
from rfork.planner_client.ownership import owner_secret, process_secret
from rfork.planner_client.rest import RestClient
from rfork.planner_client.token_file import TokenFile
from rfork.schema import (
    ExitCheck,
    ForkInfo,
    ForkPage,
    ForkProgress,
    ForkRequest,
    ForkResult,
    ForkState,
    HolderAck,
    HolderInfo,
    HolderPage,
    HolderReport,
    InstanceAck,
    InstanceInfo,
    InstancePage,
    InstanceReport,
    InstanceState,
    ModelInfo,
    Plan,
    PreviewPage,
    PreviewRequest,
    ProgressAck,
    ScaleUp,
    ScaleUpInfo,
)
from rfork.settings import InstanceSettings, TlsSettings

ACK: Final = TypeAdapter(InstanceAck)
PLAN: Final = TypeAdapter(Plan)
PROGRESS_ACK: Final = TypeAdapter(ProgressAck)
INSTANCE: Final = TypeAdapter(InstanceInfo)
INSTANCE_PAGE: Final = TypeAdapter(InstancePage)
EXIT: Final = TypeAdapter(ExitCheck)
FORK: Final = TypeAdapter(ForkInfo)
FORK_PAGE: Final = TypeAdapter(ForkPage)
MODELS: Final = TypeAdapter(list[ModelInfo])
PREVIEWS: Final = TypeAdapter(PreviewPage)
SCALEUP: Final = TypeAdapter(ScaleUpInfo)
SCALEUPS: Final = TypeAdapter(list[ScaleUpInfo])
HOLDER_ACK: Final = TypeAdapter(HolderAck)
HOLDER_PAGE: Final = TypeAdapter(HolderPage)

PAGE: Final = 1000
"""Page size of `instances`, `forks` and `holders`."""

Page = TypeVar("Page", InstancePage, ForkPage, HolderPage)


class PlannerClient:
    """Client of one planner.

    Every method raises PlannerUnreachable if the planner does not respond within `timeout_s`, and
    PlannerRejected for problem documents and unexpected responses. If the planner is busy, reports and
    `request_plan` retry once, within `timeout_s`. A `deadline` (`time.monotonic()` value) limits a call
    further. Both limits hold even for slow or endless responses. Responses of more than 32 MiB are rejected.
    The constructor raises SettingsError for an unusable URL or unusable files; it does not connect.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | TokenFile | None = None,
        owner: str | None = None,
        tls: TlsSettings | None = None,
        timeout_s: float = 5.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`owner`: secret that proves ownership of records; None: that of this process.

        `transport` replaces the network, for tests.
        """
        self._rest = RestClient(
            url,
            token=token,
            tls=tls,
            timeout_s=timeout_s,
            transport=transport,
            owner=owner or process_secret(),
        )
        self.url = self._rest.url
        self._streams: WeakSet[PlannerEventStream] = WeakSet()

    @classmethod
    def of(cls, settings: InstanceSettings, transport: httpx.BaseTransport | None = None) -> Self:
        """Return a client of the planner in the settings. Raises SettingsError if there is none."""
        if settings.planner is None:
            raise SettingsError("no planner is set", hint="pass --planner URL or set RFORK_PLANNER")
        token: str | TokenFile | None = None
        if settings.token_file is not None:
            token = TokenFile(settings.token_file)
        elif settings.token is not None:
            token = settings.token.get_secret_value()
        return cls(
            settings.planner, token=token, owner=owner_secret(settings), tls=settings.tls,
            timeout_s=settings.planner_timeout_s, transport=transport,
        )  # fmt: skip

    # -- instances --------------------------------------------------------------------------------

    def report(self, report: InstanceReport) -> InstanceAck:
        """Register an instance, or send its heartbeat: one call does both."""
        return self._rest.parsed(ACK, "PUT", _instance(report.instance_id), report, patient=True)

    def drain(self, instance_id: str, *, force: bool = False) -> InstanceInfo:
        """Assign no new readers to the instance from now on.

        Raises PlannerRejected with problem `last-seed` if it is the last instance with its weights, unless
        forced.
        """
        query = {"force": "true"} if force else None
        return self._rest.parsed(INSTANCE, "POST", f"{_instance(instance_id)}/drain", query=query)

    def can_exit(self, instance_id: str) -> ExitCheck:
        """Return whether the instance may exit now; an unknown instance may."""
        return self._rest.parsed(EXIT, "GET", f"{_instance(instance_id)}/exit")

    def remove(self, instance_id: str, *, deadline: float | None = None) -> None:
        """Remove the instance; an unknown instance is not an error."""
        self._rest.call("DELETE", _instance(instance_id), deadline=deadline)

    def instance(self, instance_id: str) -> InstanceInfo:
        """Return an instance. Raises PlannerRejected with problem `unknown-instance` if there is none."""
        return self._rest.parsed(INSTANCE, "GET", _instance(instance_id))

    def instances(
        self,
        *,
        model: str | None = None,
        state: InstanceState | None = None,
        host: str | None = None,
        replica: str | None = None,
        deadline: float | None = None,
    ) -> list[InstanceInfo]:
        """Return all instances, sorted by id, fetched page by page; `deadline` limits all pages together.

        `replica`: only the ranks of one replica. An older planner ignores this filter and returns all instances.
        """
        pages = self._pages(
            lambda after: self.instance_page(
                model=model, state=state, host=host, replica=replica, after=after, limit=PAGE, deadline=deadline
            )
        )
        return [item for page in pages for item in page.items]

    def instance_page(
        self,
        *,
        model: str | None = None,
        state: InstanceState | None = None,
        host: str | None = None,
        replica: str | None = None,
        after: str | None = None,
        limit: int | None = None,
        deadline: float | None = None,
    ) -> InstancePage:
        """Return a page of at most `limit` instances after the cursor `after`."""
        query = {
            "model": model, "state": state, "host": host, "replica": replica, "after": after, "limit": limit,
        }  # fmt: skip
        return self._rest.parsed(INSTANCE_PAGE, "GET", "/v1/instances", query=query, deadline=deadline)

    # -- forks ------------------------------------------------------------------------------------

    def request_plan(self, request: ForkRequest, *, deadline: float | None = None) -> Plan:
        """Request a plan, or a replan with the same fork_id."""
        return self._rest.parsed(PLAN, "POST", "/v1/forks", request, patient=True, deadline=deadline)

    def progress(self, fork_id: str, progress: ForkProgress) -> ProgressAck:
        """Report progress and renew the leases of the current routes.

        PlannerRejected with problem `unknown-fork` means that the planner restarted: call `request_plan`
        again.
        """
        return self._rest.parsed(PROGRESS_ACK, "POST", f"{_fork(fork_id)}/progress", progress)

    def finish(self, fork_id: str, finish: ForkResult, *, deadline: float | None = None) -> None:
        """Report the result of a fork; its leases are released."""
        self._rest.call("POST", f"{_fork(fork_id)}/finish", finish, deadline=deadline)

    def fork(self, fork_id: str) -> ForkInfo:
        """Return a fork. Raises PlannerRejected with problem `unknown-fork` if there is none."""
        return self._rest.parsed(FORK, "GET", _fork(fork_id))

    def forks(
        self,
        *,
        model: str | None = None,
        state: ForkState | None = None,
        host: str | None = None,
        deadline: float | None = None,
    ) -> list[ForkInfo]:
        """Return the running and the latest finished forks, sorted by id, fetched page by page.

        `deadline` limits all pages together.
        """
        pages = self._pages(
            lambda after: self.fork_page(
                model=model, state=state, host=host, after=after, limit=PAGE, deadline=deadline
            )
        )
        return [item for page in pages for item in page.items]

    def fork_page(
        self,
        *,
        model: str | None = None,
        state: ForkState | None = None,
        host: str | None = None,
        after: str | None = None,
        limit: int | None = None,
        deadline: float | None = None,
    ) -> ForkPage:
        """Return a page of at most `limit` forks after the cursor `after`."""
        query = {"model": model, "state": state, "host": host, "after": after, "limit": limit}
        return self._rest.parsed(FORK_PAGE, "GET", "/v1/forks", query=query, deadline=deadline)

    def events(
        self, *, model: str | None = None, fork_id: str | None = None, silence_s: float = IDLE_TIMEOUT_S
    ) -> PlannerEventStream:
        """Return a stream of fork events, to iterate and close (or to use in a `with` block).

        The connection counts as broken after `silence_s` without data; the planner sends keep-alives.
        """
        response = self._rest.stream("/v1/events", {"model": model, "fork_id": fork_id}, silence_s)
        stream = PlannerEventStream(self._rest, response, silence_s)
        self._streams.add(stream)
        return stream

    # -- holders ----------------------------------------------------------------------------------

    def report_holder(self, report: HolderReport) -> HolderAck:
        """Register a holder, or send its heartbeat; the response has the images that it should keep."""
        return self._rest.parsed(HOLDER_ACK, "PUT", _holder(report.holder_id), report, patient=True)

    def holders(self, *, host: str | None = None, deadline: float | None = None) -> list[HolderInfo]:
        """Return all holders, or those on a host, sorted by id, fetched page by page; `deadline` limits all pages."""
        pages = self._pages(
            lambda after: self._rest.parsed(
                HOLDER_PAGE,
                "GET",
                "/v1/holders",
                query={"host": host, "after": after, "limit": PAGE},
                deadline=deadline,
            )
        )
        return [item for page in pages for item in page.items]

    def remove_holder(self, holder_id: str, *, deadline: float | None = None) -> None:
        """Remove the holder; an unknown holder is not an error. Its images are instances: remove them separately."""
        self._rest.call("DELETE", _holder(holder_id), deadline=deadline)

    # -- fleet ------------------------------------------------------------------------------------

    def models(self) -> list[ModelInfo]:
        """Return a row for each model, rank, layout and weights in the fleet."""
        return self._rest.parsed(MODELS, "GET", "/v1/models")

    def scaleups(self) -> list[ScaleUpInfo]:
        """Return active scale-ups."""
        return self._rest.parsed(SCALEUPS, "GET", "/v1/scaleups")

    def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        """Announce that replicas will start, or update how many."""
        return self._rest.parsed(SCALEUP, "POST", "/v1/scaleups", scaleup)

    def withdraw(self, scaleup_id: str) -> None:
        """Withdraw a scale-up; an unknown one is not an error."""
        self._rest.call("DELETE", f"/v1/scaleups/{quote(scaleup_id, safe=':')}")

    def preview(self, request: PreviewRequest) -> PreviewPage:
        """Predict the plan of new replicas, without any effect.

        Raises PlannerRejected with problem `unknown-model` if no instance of the model is known.
        """
        return self._rest.parsed(PREVIEWS, "POST", "/v1/previews", request)

    def ready(self) -> bool:
        """Return whether the planner is ready. Raises PlannerUnreachable if it does not respond."""
        try:
            self._rest.call("GET", "/readyz")
        except PlannerRejected as error:
            if error.status == httpx.codes.SERVICE_UNAVAILABLE:
                return False
            raise
        return True

    def close(self) -> None:
        """Close all connections and streams; the client cannot be used afterwards."""
        for stream in list(self._streams):
            stream.close()
        self._rest.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pages(self, fetch: Callable[[str | None], Page]) -> list[Page]:
        pages = [fetch(None)]
        while (following := pages[-1].next) is not None:
            pages.append(fetch(following))
            # Cursors must increase, or a faulty planner could make this loop endless.
            ahead = pages[-1].next
            if ahead is not None and ahead <= following:
                raise self._rest.unexpected_response_error("GET", "a list", httpx.codes.OK, "its pages repeat")
        return pages


def _instance(instance_id: str) -> str:
    return f"/v1/instances/{quote(instance_id, safe=':')}"


def _holder(holder_id: str) -> str:
    return f"/v1/holders/{quote(holder_id, safe=':')}"


def _fork(fork_id: str) -> str:
    return f"/v1/forks/{quote(fork_id, safe=':')}"
