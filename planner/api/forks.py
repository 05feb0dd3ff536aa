"""Forks: ask for a plan, report progress, finish, list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query

from planner.api import examples
from planner.problems import documented
from planner.registry import Registry
from rfork.wire import (
    ForkFinish,
    ForkProgress,
    ForkRequest,
    ForkState,
    ForkView,
    Identifier,
    Plan,
    ProgressAck,
)

ForkId = Annotated[Identifier, Path(description="chosen by the target", examples=["fork-1"])]


def forks_router(registry: Registry) -> APIRouter:
    """The routes under /v1/forks."""
    router = APIRouter(prefix="/v1/forks", tags=["forks"], responses=documented(401, 422))

    @router.post("", summary="Ask for a plan, or for a new one", responses=documented(409, 413))
    async def ask(
        request: Annotated[
            ForkRequest,
            Body(
                openapi_examples={
                    "first": {"value": examples.ASK.model_dump(mode="json")},
                    "again, half way": {"value": examples.ASK_AGAIN.model_dump(mode="json")},
                }
            ),
        ],
    ) -> Plan:
        """Say who reads which chunks from whom, with a lease on each source.

        The call registers the target too, so that others can chain behind it at once. A target whose source
        died, stalled or lied calls again with the same `fork_id`, what it has verified by then, and `faults`:
        the new plan covers the rest. A plan without `routes` says in `reason` what there is instead.
        """
        return registry.ask(request)

    @router.post(
        "/{fork_id}/progress", summary="Report progress, renew leases", responses=documented(404, 409, 413)
    )
    async def progress(
        fork_id: ForkId,
        progress: Annotated[
            ForkProgress,
            Body(openapi_examples={"half way": {"value": examples.PROGRESS.model_dump(mode="json")}}),
        ],
    ) -> ProgressAck:
        """Tell what is verified, about once a second; the answer renews the leases of the current routes.

        A source that the answer lacks is gone or has new weights. Problem `unknown-fork` (404) means
        that the planner restarted, or heard nothing for too long: ask for a plan again.
        """
        return registry.progress(fork_id, progress)

    @router.post("/{fork_id}/finish", status_code=204, summary="Say how it ended", responses=documented(413))
    async def finish(
        fork_id: ForkId,
        finish: Annotated[
            ForkFinish, Body(openapi_examples={"forked": {"value": examples.FINISH.model_dump(mode="json")}})
        ],
    ) -> None:
        """End the fork and release its leases. A fork that is not known, or has ended, is no error."""
        registry.finish(fork_id, finish)

    @router.get("", summary="List forks")
    async def list_forks(
        model: Annotated[str | None, Query(description="only of this model")] = None,
        state: Annotated[ForkState | None, Query(description="only in this state")] = None,
    ) -> list[ForkView]:
        """The forks under way and the last ones that ended, in the order in which they came."""
        registry.sweep()
        now = registry.clock.monotonic()
        return [
            record.view(now)
            for record in registry.store.forks()
            if model in (None, record.model) and state in (None, record.state)
        ]

    @router.get("/{fork_id}", summary="Show one fork", responses=documented(404))
    async def show(fork_id: ForkId) -> ForkView:
        """The fork's plan, its progress and, once it has ended, how."""
        return registry.fork(fork_id).view(registry.clock.monotonic())

    return router
