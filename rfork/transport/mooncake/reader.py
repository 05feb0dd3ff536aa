"""Target side: reads image ranges from the source's memory into the target's image."""

from __future__ import annotations

from rfork.image.memory import Image
from rfork.image.storages import CPU
from rfork.transport.mooncake.engine import MooncakeEngine
from rfork.transport.mooncake.read_batch import ReadBatch
from rfork.transport.mooncake.read_plan import AddressMap, common_pieces, plan_reads
from rfork.transport.mooncake.session import TransferSession


class TransferEngineReader:
    """Reads one source's image over a separate engine. Runs on the target; thread-safe.

    If reads do not end after deadline and grace period, the engine is closed; the reader is then unusable,
    and further reads raise the same error.
    """

    def __init__(self, engine: MooncakeEngine, session: str, remote: AddressMap, image: Image, *, gather: bool) -> None:
        self._transfer_session = TransferSession(engine, session)
        self._remote = remote
        self._image = image
        self._gather = gather and image.devices <= {CPU}

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` into the target image; see `Reader.read`.

        Raises SourceUnavailable if the source disconnected or rejected a read, and SourceTimeout if it did
        not respond or the deadline passed; at most `GRACE_S` plus a ping (2 s) after the deadline.
        """
        pieces = common_pieces(self._remote.segments(begin, end), self._image.segments(begin, end))
        with self._transfer_session.acquire():
            reads = plan_reads(pieces, gather=self._gather, max_bytes=self._transfer_session.sizes.request)
            ReadBatch(self._transfer_session, reads, deadline).finish()

    def set_rate_limit(self, rate: int | None) -> None:
        """Limit reads to `rate` bytes per second. The reader enforces it, because no code of the source runs.

        Reads in flight finish at full speed.
        """
        self._transfer_session.set_rate_limit(rate)

    def close(self) -> None:
        """Close the engine; reads in progress raise SourceUnavailable. Idempotent."""
        self._transfer_session.close()
