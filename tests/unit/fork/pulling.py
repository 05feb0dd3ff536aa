"""What tests of pulls ask of them."""

from __future__ import annotations

from rfork.errors import RforkError
from rfork.image.chunks import MIB
from rfork.wire import Plan
from tests.unit.fork.fleet import CHUNKS, Target

ALL = (0, CHUNKS)
IMAGE_BYTES = CHUNKS * MIB


def given(target: Target) -> dict[str, int]:
    """Verified chunks by source."""
    return {share.source_id: share.verified_chunks for share in target.puller.shares}


def refusing(error: RforkError) -> Plan:
    raise error
