"""Previews: what would happen if replicas came now."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Body

from planner.api import examples
from planner.api.documents import ALWAYS, WITH_BODY, Told, answer, named, problems
from planner.groups import LiveGroup
from planner.previews import Snapshot, known, preview, snapshot
from planner.problems import ProblemError, invalid
from planner.registry import Registry
from rfork.wire import Preview, PreviewPage, PreviewRequest

MOST: Final = 8192
"""Targets of all ranks that one call asks about."""
MOST_WAITING: Final = 4
"""Calls that wait for another one to be answered."""

FULL = Told(503, "too-many-previews", f"{MOST_WAITING} callers wait for previews already")
UNKNOWN = Told(404, "unknown-model", "no instance of llama is known")


def previews_router(registry: Registry) -> APIRouter:
    """The routes under /v1/previews."""
    router = APIRouter(prefix="/v1/previews", tags=["previews"], responses=problems(*ALWAYS))
    # One at a time: Python has its thread and the event loop's take turns.
    turn = asyncio.Lock()
    room = asyncio.Semaphore(1 + MOST_WAITING)

    @router.post(
        "",
        summary="Preview replicas that would come",
        responses=answer(examples.PREVIEWS) | problems(*WITH_BODY, UNKNOWN, FULL),
    )
    async def ask(
        request: Annotated[PreviewRequest, Body(openapi_examples=named({"three": examples.PREVIEW_REQUEST}))],
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
        if len(groups) * request.targets > MOST:
            raise invalid(
                "targets", f"{request.targets} of {len(groups)} ranks are more than {MOST}: name one rank_key"
            )
        if room.locked():
            raise ProblemError(FULL.status, FULL.slug, FULL.detail, headers={"Retry-After": "2"})
        items: list[Preview] = []
        async with room:
            for group in groups:
                async with turn:
                    taken = snapshot(state, group, request, registry.now() if items else now)
                    if taken is not None:
                        items.append(await asyncio.to_thread(_previewed, taken))
        return PreviewPage(items=tuple(items))

    return router


def _seeds_of(groups: Sequence[LiveGroup]) -> Callable[[str], int]:
    """Return a function that counts the complete instances of a version."""
    counts = Counter[str]()
    for group in groups:
        counts[group.version] += sum(source.complete for source in group.sources.values())
    return counts.__getitem__


def _previewed(taken: Snapshot) -> Preview:
    """Run in a thread."""
    return preview(known(taken))
