"""Instances: register and heartbeat, drain, remove, list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query

from planner.api import examples
from planner.problems import documented, invalid
from planner.registry import Registry
from rfork.wire import Identifier, InstanceAck, InstanceReport, InstanceState, InstanceView

InstanceId = Annotated[Identifier, Path(description="chosen by the instance", examples=["seed-1"])]


def instances_router(registry: Registry) -> APIRouter:
    """The routes under /v1/instances."""
    router = APIRouter(prefix="/v1/instances", tags=["instances"], responses=documented(401, 422))

    @router.put("/{instance_id}", summary="Register, or send a heartbeat", responses=documented(413))
    async def report(
        instance_id: InstanceId,
        report: Annotated[
            InstanceReport, Body(openapi_examples={"seed": {"value": examples.SEED.model_dump(mode="json")}})
        ],
    ) -> InstanceAck:
        """Tell the planner all about one rank of an instance.

        The first report registers it, each further one is its heartbeat; every report carries everything,
        so that a planner that restarted knows it all again after one. Send the next one within `heartbeat_s`.
        """
        if report.instance_id != instance_id:
            raise invalid("instance_id", f"the path says {instance_id}, the body {report.instance_id}")
        return registry.report(report)

    @router.post("/{instance_id}/drain", summary="Give it no new readers", responses=documented(404))
    async def drain(instance_id: InstanceId) -> InstanceView:
        """Send no new forks to the instance; those that read from it go on. Lasts until it is removed."""
        return registry.drain(instance_id).view(registry.clock.monotonic())

    @router.delete("/{instance_id}", status_code=204, summary="Forget an instance")
    async def remove(instance_id: InstanceId) -> None:
        """Forget the instance and end its fork. One that is not known is no error."""
        registry.remove(instance_id)

    @router.get("", summary="List instances")
    async def list_instances(
        model: Annotated[str | None, Query(description="only of this model")] = None,
        state: Annotated[InstanceState | None, Query(description="only in this state")] = None,
    ) -> list[InstanceView]:
        """The instances that reported lately, in the order in which they came."""
        registry.sweep()
        now = registry.clock.monotonic()
        return [
            record.view(now)
            for record in registry.store.instances()
            if model in (None, record.report.model) and state in (None, record.source.state)
        ]

    @router.get("/{instance_id}", summary="Show one instance", responses=documented(404))
    async def show(instance_id: InstanceId) -> InstanceView:
        """What the instance last reported, how long ago, and whether it is in quarantine."""
        return registry.instance(instance_id).view(registry.clock.monotonic())

    return router
