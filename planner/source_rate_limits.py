"""What the sources of a fork held it to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.store.records import ForkRecord, InstanceRecord


def source_rate_limits(fork: ForkRecord, instance: Callable[[str], InstanceRecord | None]) -> Mapping[str, int]:
    """Bytes a second that each source of the fork's plan holds all its readers to, where it does.

    As its last heartbeat said; of a source that is gone, what was known before.
    """
    rates: dict[str, int] = {}
    for read in fork.reads:
        source = instance(read.source_id)
        rate = fork.source_rate_limits.get(read.source_id) if source is None else source.report.egress_rate
        if rate is not None:
            rates[read.source_id] = rate
    return rates
