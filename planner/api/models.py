"""Model routes: the contents of the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fastapi import APIRouter

from planner.api import examples
from planner.api.openapi import ALWAYS, problems, success
from planner.core.group_index import GroupIndex
from planner.core.state import PlannerState
from planner.plan_service import PlanService
from rfork.schema import ModelInfo

Image = tuple[str, str | None]
"""layout_id and weights_id."""


def models_router(service: PlanService) -> APIRouter:
    """Return the routes under /v1/models."""
    router = APIRouter(prefix="/v1/models", tags=["models"], responses=problems(*ALWAYS))

    @router.get("", summary="List models", responses=success(examples.MODELS))
    async def list_models() -> list[ModelInfo]:
        """Count the instances that have, or are receiving, each model, version, rank, layout and weights.

        `storage_bytes` and `forked_bytes` are totals of the model's rank, the same in each of its rows: the
        lower the ratio of bytes from storage to forked bytes, the less storage was used. So are `storage_s`,
        `fork_s` and `seconds_saved`: the durations of recent forks that read the complete image from storage
        or from peers, and the total time that the latter saved.
        """
        await service.sweep()
        groups = sorted(service.state.groups(), key=lambda group: group.key)
        return [row for group in groups for row in model_infos(service.state, group)]

    return router


def model_infos(state: PlannerState, group: GroupIndex) -> Iterator[ModelInfo]:
    """Return the contents of a group; a target that does not know its weights yet counts for those of its
    plan.
    """
    seeds: Counter[Image] = Counter()
    holders: Counter[Image] = Counter()
    relays: Counter[Image] = Counter()
    forks: Counter[Image] = Counter()
    members: dict[Image, str] = {}
    for instance_id, source in group.sources.items():
        receiving = instance_id in group.shares
        weights_id = source.weights_id
        if weights_id is None and receiving and (fork := state.live_fork_of(instance_id)) is not None:
            weights_id = fork.weights_id
        image = (source.layout_id, weights_id)
        members[image] = instance_id
        if source.complete:
            seeds[image] += 1
            holders[image] += source.holder is not None
        elif receiving:
            relays[image] += 1
        if receiving:
            forks[image] += 1
    for image, instance_id in sorted(members.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        record = state.instance(instance_id)
        yield ModelInfo(
            model=group.model,
            version=group.version or None,
            rank_key=group.rank_key,
            layout_id=image[0],
            weights_id=image[1],
            image_bytes=record.report.image_bytes if record is not None else 0,
            seeds=seeds[image],
            holders=holders[image],
            relays=relays[image],
            forks_running=forks[image],
            storage_bytes=group.history.storage_bytes,
            forked_bytes=group.history.forked_bytes,
            storage_s=group.history.storage_s,
            fork_s=group.history.fork_s,
            seconds_saved=group.history.total_seconds_saved,
        )
