"""Previews: what would happen if replicas came now."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Body

from planner.api import examples
from planner.api.openapi import ALWAYS, WITH_BODY, ProblemDoc, openapi_examples, problems, success
from planner.dry_run import GroupSnapshot, build_scenario, preview, take_group_snapshot
from planner.group_index import GroupIndex
from planner.http_errors import ProblemError, invalid_field
from planner.registry import Registry
from rfork.schema import Preview, PreviewPage, PreviewRequest

MAX_TARGETS: Final = 8192
"""Targets of all ranks that one call asks about."""
MAX_QUEUED: Final = 4
"""Calls that wait for another one to be answered."""

FULL = ProblemDoc(503, "too-many-previews", f"{MAX_QUEUED} callers wait for previews already")
UNKNOWN = ProblemDoc(404, "unknown-model", "no instance of llama is known")


def previews_router(registry: Registry) -> APIRouter:
    """The routes under /v1/previews."""
    router = APIRouter(prefix="/v1/previews", tags=["previews"], responses=problems(*ALWAYS))
    # One at a time: Python has its thread and the event loop's take turns.
    run_lock = asyncio.Lock()
    queue_slots = asyncio.Semaphore(1 + MAX_QUEUED)

    @router.post(
        "",
        summary="Preview replicas that would come",
        responses=success(examples.PREVIEWS) | problems(*WITH_BODY, UNKNOWN, FULL),
    )
    async def create_preview(
        request: Annotated[
            PreviewRequest, Body(openapi_examples=openapi_examples({"three": examples.PREVIEW_REQUEST}))
        ],
    ) -> PreviewPage:
        """Who would read what from whom if replicas came now, and when each would be whole.

        Nothing is registered, planned or kept: a reader may ask. It is the planner's own policy that decides,
        over what it knows at this moment and over as many `targets` that do not exist; they are taken to be
        like a seed of the model. The seconds are those of the transfer, as the links would do it: without
        the start of engines, without replicas that come later than others, and without forks that are planned
        again. Of a model with many ranks ask for one (`rank_key`), or for few targets.
        """
        await registry.sweep()
        state, now = registry.state, registry.now()
        groups = sorted(state.groups_of(request.model), key=lambda group: group.rank_key)
        if not groups:
            raise ProblemError(404, "unknown-model", f"no instance of {request.model} is known")
        version = request.version or max(sorted({group.version for group in groups}), key=_seeds_of(groups))
        known_versions = ", ".join(sorted({group.version for group in groups if group.version})[:8])
        groups = [group for group in groups if group.version == version]
        if not groups:
            detail = f"no instance of version {version} is known, but of {known_versions or 'none'}"
            raise ProblemError(404, "unknown-version", detail)
        if request.rank_key is not None:
            ranks = ", ".join(group.rank_key for group in groups[:8])
            groups = [group for group in groups if group.rank_key == request.rank_key]
            if not groups:
                raise ProblemError(404, "unknown-model", f"no instance of that rank is known, but of {ranks}")
        if len(groups) * request.targets > MAX_TARGETS:
            raise invalid_field(
                "targets",
                f"{request.targets} of {len(groups)} ranks are more than {MAX_TARGETS}: name one rank_key",
            )
        if queue_slots.locked():
            raise ProblemError(FULL.status, FULL.slug, FULL.detail, headers={"Retry-After": "2"})
        rank_items: list[Preview] = []
        async with queue_slots:
            for group in groups:
                async with run_lock:
                    group_snapshot = take_group_snapshot(state, group, request, registry.now() if rank_items else now)
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
    """Run in a thread."""
    return preview(build_scenario(group_snapshot))
