"""Finds the instances that serve the ranks of a running model. Runs on the target.

For callers that need the bytes of each rank but not the model: `rfork snapshot`.
"""

from __future__ import annotations

from collections import Counter

from rfork.errors import NoSource
from rfork.planner_client.client import PlannerClient
from rfork.schema import InstanceReport, Rank


def sources_by_rank(planner: PlannerClient, model: str, version: str | None = None) -> list[InstanceReport]:
    """Return one complete instance for each rank of one version of `model`, in rank order.

    `version` defaults to the only version that is served. If instances of one version differ in their
    weights, one of the most common is chosen. Raises NoSource if there is none, or if several versions are
    served.
    """
    complete = [
        view.report.model_copy(update={"version": view.version})
        for view in planner.instances(model=model)
        if view.report.state == "serving" and view.report.weights_id is not None
    ]
    versions = sorted({report.version or "" for report in complete})
    if version is None and len(versions) > 1:
        raise NoSource(
            f"{len(versions)} versions of {model} are served: {', '.join(versions[:8])}",
            hint="choose one with --version",
        )
    matching = [report for report in complete if version in (None, report.version)]
    if not matching:
        weights = f"version {version} of {model}" if version is not None else model
        raise NoSource(
            f"no running instance has the weights of {weights}", hint="list the running instances with `rfork status`"
        )
    instance_counts = Counter(map(_weights_key, matching))
    chosen: dict[str, InstanceReport] = {}
    for report in matching:
        other = chosen.get(report.rank.key)
        if other is None or instance_counts[_weights_key(report)] > instance_counts[_weights_key(other)]:
            chosen[report.rank.key] = report
    return sorted(chosen.values(), key=lambda report: _rank_order(report.rank))


def _weights_key(report: InstanceReport) -> tuple[str, str, str | None]:
    return report.rank.key, report.layout_id, report.weights_id


def _rank_order(rank: Rank) -> tuple[bool, int, int, int]:
    """Return a sort key: the main model before its draft, then the order of snapshot names."""
    return rank.role != "main", rank.pp, rank.tp, rank.ep
