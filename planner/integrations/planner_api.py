"""The seam from a hook to the planner: its REST API, in asynchronous calls."""

from __future__ import annotations

from typing import Protocol

from rfork.schema import ForkInfo, InstanceInfo, ModelInfo, ScaleUp, ScaleUpInfo


class PlannerUnavailable(Exception):
    """The planner does not answer, or not as agreed; its text says what was asked and why it failed."""


class PlannerApi(Protocol):
    """What hooks ask of the planner. Every call raises PlannerUnavailable, within `planner_timeout_s`."""

    async def instances(self, *, model: str | None = None) -> tuple[InstanceInfo, ...]:
        """All instances, or those of one model (`GET /v1/instances`, every page)."""

    async def forks(self) -> tuple[ForkInfo, ...]:
        """Forks under way and those that ended lately (`GET /v1/forks`, every page)."""

    async def models(self) -> tuple[ModelInfo, ...]:
        """What the fleet holds of each model and rank (`GET /v1/models`)."""

    async def scaleups(self) -> tuple[ScaleUpInfo, ...]:
        """Scale-ups under way (`GET /v1/scaleups`)."""

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        """Say that replicas are about to start, or how many still are (`POST /v1/scaleups`)."""

    async def withdraw(self, scaleup_id: str) -> None:
        """They are not waited for any more (`DELETE /v1/scaleups/{scaleup_id}`)."""

    async def remove(self, instance_id: str) -> None:
        """The instance is gone (`DELETE /v1/instances/{instance_id}`); one that is not known is no error."""

    async def close(self) -> None:
        """Let go of connections."""
