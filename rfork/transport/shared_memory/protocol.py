"""A reader's requests and the replies to it. Runs on the source."""

from __future__ import annotations

import time
from typing import Final

from rfork.errors import SourceCorrupt
from rfork.image.memory import Image
from rfork.transport.shared_memory.file_layout import FileLayout
from rfork.transport.shared_memory.memfd import Descriptor
from rfork.transport.unix_socket.connection import UnixSocketConnection
from rfork.transport.unix_socket.messages import Message, get_int, get_ints, get_str

KEEPALIVE_INTERVAL_S: Final = 0.5
"""Maximum interval between messages, so that a throttled reader does not consider the source stalled."""


class SharedMemoryRequest:
    """A request for image bytes `[begin, end)`, with the alignment for mapping, if any.

    `chunk` is the chunk that contains them all. Raises SourceCorrupt for a range outside the image.
    """

    def __init__(self, message: Message, image: Image) -> None:
        self.token = get_str(message, "token")
        self.begin, self.end = get_int(message, "begin"), get_int(message, "end")
        if not 0 <= self.begin < self.end <= image.layout.image_bytes:
            raise SourceCorrupt(f"[{self.begin}, {self.end}) is not within the image")
        chunks = image.layout.chunks.covering(self.begin, self.end)
        self.chunk = chunks[0] if len(chunks) == 1 else None
        self.maps = "alignment" in message
        self.alignment = get_ints(message, "alignment") if self.maps else []
        if self.maps and self.chunk is not None:
            try:
                FileLayout.requested(*image.layout.chunks[self.chunk], self.alignment)
            except ValueError as error:
                raise SourceCorrupt(str(error)) from None


class ReplyStream:
    """Replies to one reader."""

    def __init__(self, connection: UnixSocketConnection, idle_timeout_s: float) -> None:
        self.piece: Descriptor | None = None
        self.charged = (0, 0)
        """Image range that has been charged to the budget but not been sent."""
        self._connection = connection
        self._idle_timeout_s = idle_timeout_s
        self._last_reply_at = time.monotonic()

    def send_reply(self, message: Message, *descriptors: int) -> None:
        """Send a reply. Raises SourceUnavailable or SourceTimeout if the reader disconnected or does not
        read.
        """
        self._last_reply_at = time.monotonic()
        self._connection.send(message, descriptors, deadline=self._last_reply_at + self._idle_timeout_s)

    def keepalive(self) -> None:
        """Make the reader continue to wait."""
        if time.monotonic() - self._last_reply_at >= KEEPALIVE_INTERVAL_S:
            self.send_reply({"wait": 0})

    def end(self) -> None:
        """End the replies and empty the piece, so that a reader cannot keep its memory."""
        if self.piece is not None:
            self.piece.empty()
