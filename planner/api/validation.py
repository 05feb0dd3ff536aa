"""What a route checks of a report beyond its form."""

from __future__ import annotations

from planner.http_errors import invalid_field
from planner.integrations.vllm_ascend.headers import PREFIX
from rfork.schema import InstanceReport


def reject_reserved_names(report: InstanceReport) -> InstanceReport:
    """The report; ProblemError 422 where it uses names of another protocol's instances.

    Those have forms of their own, which whoever leases one relies on.
    """
    for field, name in (("model", report.model), ("instance_id", report.instance_id)):
        if name.startswith(PREFIX):
            raise invalid_field(field, f"names that begin with {PREFIX} are those of vLLM-Ascend's protocol")
    return report
