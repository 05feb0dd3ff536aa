"""Rate limits of the sources of a fork."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.store.records import ForkRecord, InstanceRecord


def source_rate_limits(fork: ForkRecord, instance: Callable[[str], InstanceRecord | None]) -> Mapping[str, int]:
    """Return the egress limits (bytes per second) of the fork's sources, by instance_id, for those that have
    one.

    Taken from the source's last heartbeat; for a source that was removed, from the fork's record.
    """
    rates: dict[str, int] = {}
    for read in fork.reads:
        source = instance(read.source_id)
        rate = fork.source_rate_limits.get(read.source_id) if source is None else source.report.egress_rate
        if rate is not None:
            rates[read.source_id] = rate
    return rates
