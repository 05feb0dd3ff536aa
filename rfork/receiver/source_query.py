"""Query of the instances that have an image: which is queried next, and when the query fails. Pure.

The planner chooses the instances, as for a fork; their leases authorize the requests. An instance that fails is
reported with the next plan request, so that the planner names others, and is queried again after them. One that refuses
the request (`Refusal`) is reported as well, which is no accusation.
"""

from __future__ import annotations

from typing import Final

from rfork.errors import LayoutMismatch, NetworkError, NoSource, RforkError, SourceError, TransportUnavailable
from rfork.receiver.machine import MAX_FAULT_DETAIL
from rfork.schema import ForkRequest, InstanceReport, Placement, Plan, Route, SourceFault

QUERY_RETRY_S: Final = 0.5
"""Pause between plan requests if no instance can answer yet."""
QueryFailure = LayoutMismatch | SourceError | NetworkError
"""Failure of one instance, after which the next one is queried."""
Refusal = LayoutMismatch | TransportUnavailable
"""Failure that an instance would repeat: it does not have what is requested, or no transport for it."""


class SourceQuery:
    """State machine of one query: for each plan `plan_received`, `failed` for each of its routes, then `pause_s`."""

    def __init__(
        self,
        source_instance: InstanceReport,
        fork_id: str,
        instance_id: str,
        *,
        placement: Placement,
        retry_until: float,
    ) -> None:
        """`fork_id` and `instance_id`: new ids for the planner's records of this query. `placement`: that of this
        instance, whose host avoids what cannot be reached. `retry_until`: time until which instances that have failed
        are queried again.
        """
        self._model = source_instance.model
        self._retry_until = retry_until
        self.request = ForkRequest(
            fork_id=fork_id,
            instance=source_instance.model_copy(
                update={
                    "instance_id": instance_id,
                    "replica": None,
                    "weights_id": None,
                    "state": "loading",
                    "verified": (),
                    "storage": (),
                    "readers": (),
                    "address": "none:0",
                    "placement": placement,
                    "max_readers": 0,  # no instance must wait for this one
                }
            ),
        )
        """Next request to the planner."""
        self._failure: RforkError | None = None
        self._tried: set[str] = set()
        self._untried: tuple[Route, ...] = ()
        self._faults: list[SourceFault] = []

    def plan_received(self, plan: Plan) -> tuple[Route, ...]:
        """Return the instances to query, in this order, until one responds. Nothing is read over these routes."""
        self._faults = []
        self._untried = tuple(route for route in plan.routes if route.source_id not in self._tried)
        return self._untried

    def failed(self, route: Route, error: QueryFailure) -> None:
        """Handle the failure of an instance."""
        self._failure = error
        self._tried.add(route.source_id)
        self._faults.append(
            SourceFault(
                instance_id=route.source_id,
                fault=error.fault,
                error=error.kind,
                detail=str(error)[:MAX_FAULT_DETAIL],
            )
        )

    def pause_s(self, plan: Plan, now: float) -> float:
        """Return the seconds until the next plan request, after all routes of the last plan have failed.

        Raises the last failure, or NoSource, if a further request is useless.
        """
        self.request = self.request.model_copy(update={"faults": tuple(self._faults)})
        if self._untried:
            return 0.0
        if isinstance(self._failure, Refusal):
            may_work = plan.retry_after_s is not None  # another instance is busy; this one would refuse again
        else:
            may_work = bool(plan.routes) or plan.retry_after_s is not None
        if not may_work or now >= self._retry_until:
            raise self._failure or NoSource(f"no instance with the image of {self._model} responded: {plan.reason}")
        self._tried.clear()
        return min(plan.retry_after_s or QUERY_RETRY_S, self._retry_until - now)
