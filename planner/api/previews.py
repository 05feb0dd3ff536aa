"""Preview routes: a dry run of starting replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Body

from planner.api import examples
from planner.api.openapi import ALWAYS, WITH_BODY, ProblemDoc, openapi_examples, problems, success
from planner.core.group_index import GroupIndex
from planner.core.problems import ProblemError, invalid_field
from planner.dry_run import GroupSnapshot, build_scenario, preview, snapshot_group
from planner.plan_service import PlanService
from rfork.schema import Preview, PreviewPage, PreviewRequest

MAX_TARGETS: Final = 8192
"""Maximum targets per call, over all ranks."""
MAX_QUEUED: Final = 4
"""Maximum number of calls that wait for another call."""

QUEUE_FULL = ProblemDoc(503, "too-many-previews", f"{MAX_QUEUED} previews are already queued")
UNKNOWN_MODEL = ProblemDoc(404, "unknown-model", "no known instance of llama")


def previews_router(service: PlanService) -> APIRouter:
    """Return the routes under /v1/previews."""
    router = APIRouter(prefix="/v1/previews", tags=["previews"], responses=problems(*ALWAYS))
    # One at a time: because of the GIL, its thread competes with the event loop.
    run_lock = asyncio.Lock()
    queue_slots = asyncio.Semaphore(1 + MAX_QUEUED)

    @router.post(
        "",
        summary="Preview a scale-up",
        responses=success(examples.PREVIEWS) | problems(*WITH_BODY, UNKNOWN_MODEL, QUEUE_FULL),
    )
    async def create_preview(
        request: Annotated[
            PreviewRequest, Body(openapi_examples=openapi_examples({"three": examples.PREVIEW_REQUEST}))
        ],
    ) -> PreviewPage:
        """Return what each new replica would read from which source, and when it would be complete.

        A read-only dry run: nothing is registered, planned or stored. The planner's own policy decides, over
        its current state and `targets` hypothetical replicas that resemble a seed of the model. The predicted
        seconds cover the transfer at link speed: not the start of engines, later arrivals, or replans. For a
        model with many ranks, request one (`rank_key`), or few targets.
        """
        await service.sweep()
        state, now = service.state, service.now()
        groups = sorted(state.groups_of(request.model), key=lambda group: group.rank_key)
        if not groups:
            raise ProblemError(404, "unknown-model", f"no known instance of {request.model}")
        version = request.version or max(sorted({group.version for group in groups}), key=_seeds_of(groups))
        known_versions = ", ".join(sorted({group.version for group in groups if group.version})[:8])
        groups = [group for group in groups if group.version == version]
        if not groups:
            detail = f"no known instance of version {version}; known versions: {known_versions or 'none'}"
            raise ProblemError(404, "unknown-version", detail)
        if request.rank_key is not None:
            ranks = ", ".join(group.rank_key for group in groups[:8])
            groups = [group for group in groups if group.rank_key == request.rank_key]
            if not groups:
                detail = f"no known instance of rank {request.rank_key}; known ranks: {ranks}"
                raise ProblemError(404, "unknown-model", detail)
        if len(groups) * request.targets > MAX_TARGETS:
            raise invalid_field(
                "targets",
                f"{request.targets} targets of {len(groups)} ranks exceed {MAX_TARGETS}: name one rank_key",
            )
        if queue_slots.locked():
            raise ProblemError(QUEUE_FULL.status, QUEUE_FULL.slug, QUEUE_FULL.detail, headers={"Retry-After": "2"})
        rank_items: list[Preview] = []
        async with queue_slots:
            for group in groups:
                async with run_lock:
                    group_snapshot = snapshot_group(state, group, request, service.now() if rank_items else now)
                    if group_snapshot is not None:
                        rank_items.append(await asyncio.to_thread(_run_preview, group_snapshot))
        return PreviewPage(items=tuple(rank_items))

    return router


def _seeds_of(groups: Sequence[GroupIndex]) -> Callable[[str], int]:
    """Return a function that counts the complete instances of a version."""
    counts = Counter[str]()
    for group in groups:
        counts[group.version] += sum(source.complete for source in group.sources.values())
    return counts.__getitem__


def _run_preview(group_snapshot: GroupSnapshot) -> Preview:
    """Runs in a thread."""
    return preview(build_scenario(group_snapshot))
