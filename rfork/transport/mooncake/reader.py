"""The target side: image ranges read from the source's memory into the target's own."""

from __future__ import annotations

from rfork.image.memory import Image
from rfork.image.storages import CPU
from rfork.transport.mooncake.engine import MooncakeEngine
from rfork.transport.mooncake.read_batch import ReadBatch
from rfork.transport.mooncake.read_plan import AddressMap, common_pieces, requests
from rfork.transport.mooncake.session import TransferSession


class TransferEngineReader:
    """One source's image over an engine of its own. Runs on the target; thread-safe.

    Reads that do not end after deadline and grace take the whole engine down: the reader is then spent, and
    further reads raise the error that spent it.
    """

    def __init__(self, engine: MooncakeEngine, session: str, remote: AddressMap, image: Image, *, gather: bool) -> None:
        self._connection = TransferSession(engine, session)
        self._remote = remote
        self._image = image
        self._gather = gather and image.devices <= {CPU}

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` into the target image; see `Reader.read`.

        Raises SourceUnavailable when the source hung up or refused, and SourceTimeout when it went silent
        or the deadline passed; the latter at most `GRACE_S` and a probe (2 s) after it.
        """
        pieces = common_pieces(self._remote.segments(begin, end), self._image.segments(begin, end))
        with self._connection.acquire():
            planned = requests(pieces, gather=self._gather, max_bytes=self._connection.sizes.request)
            ReadBatch(self._connection, planned, deadline).finish()

    def set_rate_limit(self, rate: int | None) -> None:
        """Take at most `rate` bytes a second: no code of the source runs that could hold this reader back.

        Reads that are under way run to their end at the speed of the link.
        """
        self._connection.set_rate_limit(rate)

    def close(self) -> None:
        """Take the engine down; reads under way raise SourceUnavailable. Safe to call twice."""
        self._connection.close()
