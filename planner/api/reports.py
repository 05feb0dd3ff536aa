"""What a route checks of a report beyond its form."""

from __future__ import annotations

from planner.compat.ascend_headers import PREFIX
from planner.problems import invalid
from rfork.wire import InstanceReport


def own_names(report: InstanceReport) -> InstanceReport:
    """The report; ProblemError 422 where it uses names of another protocol's instances.

    Those have forms of their own, which whoever leases one relies on.
    """
    for field, name in (("model", report.model), ("instance_id", report.instance_id)):
        if name.startswith(PREFIX):
            raise invalid(field, f"names that begin with {PREFIX} are those of vLLM-Ascend's protocol")
    return report
