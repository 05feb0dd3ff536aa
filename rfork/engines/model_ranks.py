"""The weights of a running model without its engine: which instances hold its ranks. Runs on the target.

For whoever wants the bytes of each rank and not the model: `rfork snapshot`.
"""

from __future__ import annotations

from collections import Counter

from rfork.errors import NoSource
from rfork.planner_client.client import PlannerClient
from rfork.receiver.fetch import fetch as fetch
from rfork.schema import InstanceReport, Rank


def sources_by_rank(planner: PlannerClient, model: str, version: str | None = None) -> list[InstanceReport]:
    """Return one complete instance of each rank of one version of `model`, in the order of the ranks.

    Without a `version`, of the one that is served. Where instances of one version differ in their weights, it
    is one of the most numerous. Raises NoSource where none is, and where several versions are served.
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
            hint="name one (--version)",
        )
    matching = [report for report in complete if version in (None, report.version)]
    if not matching:
        what = f"version {version} of {model}" if version is not None else model
        raise NoSource(
            f"no running instance holds the weights of {what}", hint="see `rfork status` for those there are"
        )
    alike = Counter(map(_weights_key, matching))
    chosen: dict[str, InstanceReport] = {}
    for report in matching:
        other = chosen.get(report.rank.key)
        if other is None or alike[_weights_key(report)] > alike[_weights_key(other)]:
            chosen[report.rank.key] = report
    return sorted(chosen.values(), key=lambda report: _rank_order(report.rank))


def _weights_key(report: InstanceReport) -> tuple[str, str, str | None]:
    return report.rank.key, report.layout_id, report.weights_id


def _rank_order(rank: Rank) -> tuple[bool, int, int, int]:
    """The model before its draft, then as the names of their snapshots go."""
    return rank.role != "main", rank.pp, rank.tp, rank.ep
