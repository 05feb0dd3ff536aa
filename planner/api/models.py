"""Models: what the fleet holds."""

from __future__ import annotations

from collections import Counter

from fastapi import APIRouter

from planner.problems import documented
from planner.registry import Registry
from planner.store.records import InstanceRecord
from rfork.wire import ModelView

Image = tuple[str, str, str, str | None]
"""Model, rank key, layout_id, weights_id."""


def models_router(registry: Registry) -> APIRouter:
    """The routes under /v1/models."""
    router = APIRouter(prefix="/v1/models", tags=["models"], responses=documented(401))

    @router.get("", summary="List models")
    async def list_models() -> list[ModelView]:
        """One row for each model, rank, layout and weights: how many hold it, and how many are getting it."""
        registry.sweep()
        seeds: Counter[Image] = Counter()
        relays: Counter[Image] = Counter()
        forks: Counter[Image] = Counter()
        sizes: dict[Image, int] = {}
        for record in registry.store.instances():
            image = image_of(registry, record)
            sizes[image] = record.report.image_bytes
            if record.source.complete:
                seeds[image] += 1
            elif registry.store.live_fork_of(record.report.instance_id):
                relays[image] += 1
        for fork in registry.store.live_forks():
            target = registry.store.instance(fork.instance_id)
            if target is not None:
                forks[image_of(registry, target)] += 1
        return [
            ModelView(
                model=image[0],
                rank_key=image[1],
                layout_id=image[2],
                weights_id=image[3],
                image_bytes=size,
                seeds=seeds[image],
                relays=relays[image],
                forks_running=forks[image],
            )
            for image, size in sorted(sizes.items(), key=lambda item: (item[0][:3], item[0][3] or ""))
        ]

    return router


def image_of(registry: Registry, record: InstanceRecord) -> Image:
    """What the instance holds; a target that has not learnt its weights yet holds those of its plan."""
    report = record.report
    fork = registry.store.live_fork_of(report.instance_id)
    weights_id = report.weights_id or (fork.plan.weights_id if fork else None)
    return report.model, report.rank.key, report.layout_id, weights_id
