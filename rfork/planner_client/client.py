"""A typed client of the planner's REST interface, for instances and for the command line.

Runs inside an inference instance, beside the engine: synchronous, thread-safe, one connection pool.
Every call is idempotent at the planner, so a call whose pooled connection turns out dead (a planner
that restarted) is sent once more on a fresh one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TypeVar
from urllib.parse import quote
from weakref import WeakSet

import httpx
from pydantic import TypeAdapter

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
    InstanceAck,
    InstanceInfo,
    InstancePage,
    InstanceReport,
    ModelInfo,
    Plan,
    PreviewPage,
    PreviewRequest,
    ProgressAck,
)
from rfork.schema.types import ForkState, InstanceState
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

PAGE: Final = 1000
"""Items that one call of `instances` or `forks` asks for at a time."""

Page = TypeVar("Page", InstancePage, ForkPage)


class PlannerClient:
    """Speaks to one planner.

    Every method raises PlannerUnreachable when the planner does not answer within `timeout_s`, and
    PlannerRejected when it answers with a problem document or with something that is not an answer. `report`
    and `request_plan` wait once, within `timeout_s`, where the planner says that it is busy for so long. A `deadline`
    (`time.monotonic()` value) bounds a call further; both hold however slowly, and whatever, the other side
    sends. An answer of more than 32 MiB is refused.
    The constructor raises SettingsError for a URL or files that cannot be used; it connects to nothing.
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
        """`owner`: secret that proves which records are the caller's own; none: this process's.

        `transport` replaces the sockets, for tests.
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
    def of(cls, settings: InstanceSettings) -> Self:
        """A client of the planner that the settings name. Raises SettingsError where they name none."""
        if settings.planner is None:
            raise SettingsError("no planner is set", hint="pass --planner URL or set RFORK_PLANNER")
        token: str | TokenFile | None = None
        if settings.token_file is not None:
            token = TokenFile(settings.token_file)
        elif settings.token is not None:
            token = settings.token.get_secret_value()
        return cls(
            settings.planner, token=token, owner=owner_secret(settings), tls=settings.tls,
            timeout_s=settings.planner_timeout_s,
        )  # fmt: skip

    # -- instances --------------------------------------------------------------------------------

    def report(self, report: InstanceReport) -> InstanceAck:
        """Register an instance, or send its heartbeat: one call does both."""
        return self._rest.parsed(ACK, "PUT", _instance(report.instance_id), report, patient=True)

    def drain(self, instance_id: str, *, force: bool = False) -> InstanceInfo:
        """Give the instance no new readers from now on.

        PlannerRejected with problem `last-seed` where it is the last that holds its weights, unless forced.
        """
        query = {"force": "true"} if force else None
        return self._rest.parsed(INSTANCE, "POST", f"{_instance(instance_id)}/drain", query=query)

    def can_exit(self, instance_id: str) -> ExitCheck:
        """Whether the instance may end now; one that the planner does not know may."""
        return self._rest.parsed(EXIT, "GET", f"{_instance(instance_id)}/exit")

    def remove(self, instance_id: str, *, deadline: float | None = None) -> None:
        """Forget the instance; one that is not known is no error."""
        self._rest.call("DELETE", _instance(instance_id), deadline=deadline)

    def instance(self, instance_id: str) -> InstanceInfo:
        """One instance; PlannerRejected with problem `unknown-instance` where there is none."""
        return self._rest.parsed(INSTANCE, "GET", _instance(instance_id))

    def instances(
        self,
        *,
        model: str | None = None,
        state: InstanceState | None = None,
        host: str | None = None,
        replica: str | None = None,
    ) -> list[InstanceInfo]:
        """The instances the planner knows, in the order of their ids, fetched page after page.

        `replica`: the ranks of one server, which costs the planner nothing for the others. One that does not
        know that filter lists them all.
        """
        pages = self._pages(
            lambda after: self.instance_page(
                model=model, state=state, host=host, replica=replica, after=after, limit=PAGE
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
    ) -> InstancePage:
        """Some of the instances: at most `limit`, from behind the cursor `after` on."""
        query = {
            "model": model, "state": state, "host": host, "replica": replica, "after": after, "limit": limit,
        }  # fmt: skip
        return self._rest.parsed(INSTANCE_PAGE, "GET", "/v1/instances", query=query)

    # -- forks ------------------------------------------------------------------------------------

    def request_plan(self, request: ForkRequest, *, deadline: float | None = None) -> Plan:
        """Ask for a plan, or for a new one under the same fork_id."""
        return self._rest.parsed(PLAN, "POST", "/v1/forks", request, patient=True, deadline=deadline)

    def progress(self, fork_id: str, progress: ForkProgress) -> ProgressAck:
        """Report progress and get the leases of the current routes renewed.

        PlannerRejected with problem `unknown-fork` means that the planner restarted: `request_plan` again.
        """
        return self._rest.parsed(PROGRESS_ACK, "POST", f"{_fork(fork_id)}/progress", progress)

    def finish(self, fork_id: str, finish: ForkResult, *, deadline: float | None = None) -> None:
        """Report how a fork ended; its leases are released."""
        self._rest.call("POST", f"{_fork(fork_id)}/finish", finish, deadline=deadline)

    def fork(self, fork_id: str) -> ForkInfo:
        """One fork; PlannerRejected with problem `unknown-fork` where there is none."""
        return self._rest.parsed(FORK, "GET", _fork(fork_id))

    def forks(
        self, *, model: str | None = None, state: ForkState | None = None, host: str | None = None
    ) -> list[ForkInfo]:
        """The forks under way and the last finished ones, in the order of their ids, page after page."""
        pages = self._pages(lambda after: self.fork_page(model=model, state=state, host=host, after=after, limit=PAGE))
        return [item for page in pages for item in page.items]

    def fork_page(
        self,
        *,
        model: str | None = None,
        state: ForkState | None = None,
        host: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> ForkPage:
        """Some of the forks: at most `limit`, from behind the cursor `after` on."""
        query = {"model": model, "state": state, "host": host, "after": after, "limit": limit}
        return self._rest.parsed(FORK_PAGE, "GET", "/v1/forks", query=query)

    def events(
        self, *, model: str | None = None, fork_id: str | None = None, silence_s: float = IDLE_TIMEOUT_S
    ) -> PlannerEventStream:
        """Follow forks: iterate it, and close it (or use it in a `with` block) when done.

        `silence_s` without a word, the planner's keep-alive included, is a broken connection.
        """
        response = self._rest.stream("/v1/events", {"model": model, "fork_id": fork_id}, silence_s)
        stream = PlannerEventStream(self._rest, response, silence_s)
        self._streams.add(stream)
        return stream

    # -- the rest ---------------------------------------------------------------------------------

    def models(self) -> list[ModelInfo]:
        """What the fleet holds, one row for each model, rank, layout and weights."""
        return self._rest.parsed(MODELS, "GET", "/v1/models")

    def preview(self, request: PreviewRequest) -> PreviewPage:
        """What would happen if replicas came now; nothing comes of it.

        PlannerRejected with problem `unknown-model` where no instance of it is known.
        """
        return self._rest.parsed(PREVIEWS, "POST", "/v1/previews", request)

    def ready(self) -> bool:
        """Whether the planner is ready to answer; raises PlannerUnreachable where nothing answers."""
        try:
            self._rest.call("GET", "/readyz")
        except PlannerRejected as error:
            if error.status == httpx.codes.SERVICE_UNAVAILABLE:
                return False
            raise
        return True

    def close(self) -> None:
        """Close the pooled connections and end the streams; the client cannot be used again."""
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
            # Cursors only grow: a planner that goes round in circles must not hold the caller.
            ahead = pages[-1].next
            if ahead is not None and ahead <= following:
                raise self._rest.unexpected_response_error("GET", "a list", httpx.codes.OK, "its pages go in circles")
        return pages


def _instance(instance_id: str) -> str:
    return f"/v1/instances/{quote(instance_id, safe=':')}"


def _fork(fork_id: str) -> str:
    return f"/v1/forks/{quote(fork_id, safe=':')}"
