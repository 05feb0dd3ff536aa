"""What a target holds of its source for as long as it has the source's memory opened. Runs on the target."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from rfork.errors import RforkError, SourceCorrupt, SourceTimeout
from rfork.logs import logger
from rfork.transport.base import TokenSource
from rfork.transport.cuda_ipc.protocol import TOKEN_REFRESH_S
from rfork.transport.unix_socket.client import ConnectionPool
from rfork.transport.unix_socket.connection import UnixSocketConnection, close_all
from rfork.transport.unix_socket.messages import raise_error

REPLY_TIMEOUT_S: Final = 60.0
"""Seconds that the source may take to answer a token: it may stand still, and reads have deadlines."""

log = logger(__name__)


class SourcePin:
    """A connection on which the source says, by ending it, that its memory has to be let go.

    And a descriptor that tells the source, by its end, that it was. `on_end` is called, on the hold's own
    thread, when the source ends it; it has to let go. Takes hold at once; raises as `Reader.read` does.
    """

    def __init__(
        self,
        connections: ConnectionPool,
        token: TokenSource,
        deadline: float,
        on_end: Callable[[RforkError], None],
    ) -> None:
        self._connections = connections
        self._token = token
        self._on_end = on_end
        self._pinned: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(deadline,), name="rfork-cuda-ipc-hold", daemon=True)
        self._thread.start()
        self._descriptor = self._pinned.result()  # each step of it has its deadline

    def release(self) -> None:
        """Tell the source that nothing of it is opened here any more; after its connections were cut.

        Once only.
        """
        os.close(self._descriptor)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _listen(self, connection: UnixSocketConnection) -> None:
        """Until it is time to show a token again. Raises what the source ends it with."""
        try:
            message, unasked = connection.receive(time.monotonic() + TOKEN_REFRESH_S)
        except SourceTimeout:
            return
        close_all(unasked)
        raise_error(message)
        raise SourceCorrupt("the source talks where it was not asked")

    def _show(self, connection: UnixSocketConnection) -> None:
        connection.send({"ask": "hold", "token": self._token()}, deadline=time.monotonic() + REPLY_TIMEOUT_S)
        reply, unasked = connection.receive(time.monotonic() + REPLY_TIMEOUT_S)
        close_all(unasked)
        raise_error(reply)

    def _run(self, deadline: float) -> None:
        try:
            with self._connections.lease(deadline) as connection:
                connection.send({"ask": "hold", "token": self._token()}, deadline=deadline)
                reply, descriptors = connection.receive(deadline)
                try:
                    raise_error(reply)
                    if len(descriptors) != 1:
                        raise SourceCorrupt("the source gave nothing to hold on to")
                except BaseException:
                    close_all(descriptors)
                    raise
                self._pinned.set_result(descriptors[0])
                while True:
                    self._listen(connection)
                    self._show(connection)
        except RforkError as error:
            if self._pinned.done():
                self._on_end(error)
            else:
                self._pinned.set_exception(error)
        except Exception as error:  # whoever waits for the hold must not wait for ever
            log.exception("hold failed")
            if not self._pinned.done():
                self._pinned.set_exception(error)
