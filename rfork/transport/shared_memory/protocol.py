"""What one reader asks for, and what is said to it. Runs on the source."""

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
"""A reader hears at least so often that it is held back, and not forgotten."""


class SharedMemoryRequest:
    """What a reader asks for: image bytes `[begin, end)`, and how it would like to have them.

    `chunk` is the one that holds them all. Raises SourceCorrupt where they are not in the image.
    """

    def __init__(self, message: Message, image: Image) -> None:
        self.token = get_str(message, "token")
        self.begin, self.end = get_int(message, "begin"), get_int(message, "end")
        if not 0 <= self.begin < self.end <= image.layout.image_bytes:
            raise SourceCorrupt(f"[{self.begin}, {self.end}) is not within the image")
        chunks = image.layout.chunks.covering(self.begin, self.end)
        self.chunk = chunks[0] if len(chunks) == 1 else None
        self.maps = "wishes" in message
        self.layout_request = get_ints(message, "wishes") if self.maps else []
        if self.maps and self.chunk is not None:
            try:
                FileLayout.requested(*image.layout.chunks[self.chunk], self.layout_request)
            except ValueError as error:
                raise SourceCorrupt(str(error)) from None


class ReplyStream:
    """What is said to one reader."""

    def __init__(self, connection: UnixSocketConnection, stall_s: float) -> None:
        self.piece: Descriptor | None = None
        self.paid = (0, 0)
        """Image bytes that the budget was asked for, and that may be given yet."""
        self._connection = connection
        self._stall_s = stall_s
        self._last_reply_at = time.monotonic()

    def send_reply(self, message: Message, *descriptors: int) -> None:
        """Raises SourceUnavailable or SourceTimeout where the reader is."""
        self._last_reply_at = time.monotonic()
        self._connection.send(message, descriptors, deadline=self._last_reply_at + self._stall_s)

    def keepalive(self) -> None:
        """Have the reader wait on."""
        if time.monotonic() - self._last_reply_at >= KEEPALIVE_INTERVAL_S:
            self.send_reply({"wait": 0})

    def end(self) -> None:
        """Nothing more is said: a reader that keeps its piece keeps no memory with it."""
        if self.piece is not None:
            self.piece.empty()
