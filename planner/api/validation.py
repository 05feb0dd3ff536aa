"""Checks of reports beyond their schema."""

from __future__ import annotations

from planner.core.problems import invalid_field
from planner.integrations.vllm_ascend.headers import NAME_PREFIX
from rfork.schema import InstanceReport


def reject_reserved_names(report: InstanceReport) -> InstanceReport:
    """Return the report; ProblemError 422 if it uses reserved names of another protocol's instances.

    Those names have a fixed format that clients of that protocol rely on.
    """
    for field, name in (("model", report.model), ("instance_id", report.instance_id)):
        if name.startswith(NAME_PREFIX):
            raise invalid_field(field, f"names that start with {NAME_PREFIX} are reserved for vLLM-Ascend's protocol")
    return report
