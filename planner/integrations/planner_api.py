"""Interface of the integrations to the planner's REST API. Asynchronous."""

from __future__ import annotations

from typing import Protocol

from rfork.schema import ForkInfo, InstanceInfo, ModelInfo, ScaleUp, ScaleUpInfo


class PlannerUnavailable(Exception):
    """The planner did not respond, or its response was invalid. The text names the request and the cause."""


class PlannerApi(Protocol):
    """Calls to the planner. Every call raises PlannerUnavailable, within `planner_timeout_s`."""

    async def instances(self, *, model: str | None = None) -> tuple[InstanceInfo, ...]:
        """Return all instances, or those of one model (`GET /v1/instances`, all pages)."""

    async def forks(self) -> tuple[ForkInfo, ...]:
        """Return active and recently finished forks (`GET /v1/forks`, all pages)."""

    async def models(self) -> tuple[ModelInfo, ...]:
        """Return the fleet's state of each model and rank (`GET /v1/models`)."""

    async def scaleups(self) -> tuple[ScaleUpInfo, ...]:
        """Return active scale-ups (`GET /v1/scaleups`)."""

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        """Announce that replicas will start, or update how many (`POST /v1/scaleups`)."""

    async def withdraw(self, scaleup_id: str) -> None:
        """Withdraw a scale-up (`DELETE /v1/scaleups/{scaleup_id}`)."""

    async def remove(self, instance_id: str) -> None:
        """Remove an instance (`DELETE /v1/instances/{instance_id}`). An unknown one is no error."""

    async def close(self) -> None:
        """Close all connections."""
