"""Helpers for tests of transfers."""

from __future__ import annotations

from rfork.errors import RforkError
from rfork.image.chunks import MIB
from rfork.schema import Plan
from tests.unit.receiver.fleet import CHUNKS, Target

ALL = (0, CHUNKS)
IMAGE_BYTES = CHUNKS * MIB


def verified_by_source(target: Target) -> dict[str, int]:
    """Return the number of verified chunks by source."""
    return {share.source_id: share.verified_chunks for share in target.transfer.shares}


def raise_plan_error(error: RforkError) -> Plan:
    raise error
