"""What one reader asks for, and what is said to it. Runs on the source."""

from __future__ import annotations

import time
from typing import Final

from rfork.errors import SourceCorrupt
from rfork.image.memory import Image
from rfork.transport.same_host.connection import Connection
from rfork.transport.same_host.messages import Message, number_in, numbers_in, text_in
from rfork.transport.shared_memory.placement import Layout
from rfork.transport.shared_memory.sealed import Descriptor

NOTE_S: Final = 0.5
"""A reader hears at least so often that it is held back, and not forgotten."""


class Request:
    """What a reader asks for: image bytes `[begin, end)`, and how it would like to have them.

    `chunk` is the one that holds them all. Raises SourceCorrupt where they are not in the image.
    """

    def __init__(self, message: Message, image: Image) -> None:
        self.token = text_in(message, "token")
        self.begin, self.end = number_in(message, "begin"), number_in(message, "end")
        if not 0 <= self.begin < self.end <= image.layout.image_bytes:
            raise SourceCorrupt(f"[{self.begin}, {self.end}) is not within the image")
        chunks = image.layout.chunks.covering(self.begin, self.end)
        self.chunk = chunks[0] if len(chunks) == 1 else None
        self.maps = "wishes" in message
        self.wishes = numbers_in(message, "wishes") if self.maps else []
        if self.maps and self.chunk is not None:
            try:
                Layout.wished(*image.layout.chunks[self.chunk], self.wishes)
            except ValueError as error:
                raise SourceCorrupt(str(error)) from None


class Talk:
    """What is said to one reader."""

    def __init__(self, connection: Connection, stall_s: float) -> None:
        self.piece: Descriptor | None = None
        self.paid = (0, 0)
        """Image bytes that the budget was asked for, and that may be given yet."""
        self._connection = connection
        self._stall_s = stall_s
        self._said_at = time.monotonic()

    def say(self, message: Message, *descriptors: int) -> None:
        """Raises SourceGone or SourceStalled where the reader is."""
        self._said_at = time.monotonic()
        self._connection.send(message, descriptors, deadline=self._said_at + self._stall_s)

    def note(self) -> None:
        """Have the reader wait on."""
        if time.monotonic() - self._said_at >= NOTE_S:
            self.say({"wait": 0})

    def end(self) -> None:
        """Nothing more is said: a reader that keeps its piece keeps no memory with it."""
        if self.piece is not None:
            self.piece.empty()
