"""The weights of a running model without its engine: which instances hold its ranks. Runs on the target.

For whoever wants the bytes of each rank and not the model: `rfork snapshot`.
"""

from __future__ import annotations

from collections import Counter

from rfork.control.client import PlannerClient
from rfork.errors import NoSource
from rfork.fork.fetching import fetch as fetch
from rfork.wire import InstanceReport, Rank


def ranks_of(planner: PlannerClient, model: str) -> list[InstanceReport]:
    """One instance that holds the whole image of each rank of `model`, in the order of the ranks.

    Where instances differ in their weights, it is one of the most numerous. Raises NoSource where none is.
    """
    whole = [
        view.report
        for view in planner.instances(model=model)
        if view.report.state == "serving" and view.report.weights_id is not None
    ]
    if not whole:
        raise NoSource(
            f"no running instance holds the weights of {model}", hint="see `rfork status` for those there are"
        )
    alike = Counter(map(_kind, whole))
    chosen: dict[str, InstanceReport] = {}
    for report in whole:
        other = chosen.get(report.rank.key)
        if other is None or alike[_kind(report)] > alike[_kind(other)]:
            chosen[report.rank.key] = report
    return sorted(chosen.values(), key=lambda report: _place(report.rank))


def _kind(report: InstanceReport) -> tuple[str, str, str | None]:
    return report.rank.key, report.layout_id, report.weights_id


def _place(rank: Rank) -> tuple[bool, int, int, int]:
    """The model before its draft, then as the names of their snapshots go."""
    return rank.role != "target", rank.pp, rank.tp, rank.ep
