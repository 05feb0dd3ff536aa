"""Pin that keeps the source's memory valid while the target has it opened. Runs on the target."""

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
"""Timeout of the source's reply to a token: long, because it may be stopped, and reads have their own
deadlines.
"""

log = logger(__name__)


class SourcePin:
    """Connection and descriptor that coordinate the release of a source's memory.

    The source closes the connection to request the release: `on_end` is then called on the pin's thread and
    must release the memory. Closing the descriptor signals the source that the memory has been released. The
    constructor sets the pin; raises as `Reader.read`.
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
        self._thread = threading.Thread(target=self._run, args=(deadline,), name="rfork-cuda-ipc-pin", daemon=True)
        self._thread.start()
        self._descriptor = self._pinned.result()  # each step has a deadline

    def release(self) -> None:
        """Close the descriptor, after all connections to the source were closed. Call once."""
        os.close(self._descriptor)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wait_for_refresh(self, connection: UnixSocketConnection) -> None:
        """Wait until the next token is due. Raises the error with which the source ends the pin."""
        try:
            message, descriptors = connection.receive(time.monotonic() + TOKEN_REFRESH_S)
        except SourceTimeout:
            return
        close_all(descriptors)
        raise_error(message)
        raise SourceCorrupt("unexpected message from the source")

    def _refresh_token(self, connection: UnixSocketConnection) -> None:
        connection.send({"operation": "pin", "token": self._token()}, deadline=time.monotonic() + REPLY_TIMEOUT_S)
        reply, descriptors = connection.receive(time.monotonic() + REPLY_TIMEOUT_S)
        close_all(descriptors)
        raise_error(reply)

    def _run(self, deadline: float) -> None:
        try:
            with self._connections.lease(deadline) as connection:
                connection.send({"operation": "pin", "token": self._token()}, deadline=deadline)
                reply, descriptors = connection.receive(deadline)
                try:
                    raise_error(reply)
                    if len(descriptors) != 1:
                        raise SourceCorrupt("the source sent no descriptor that keeps its memory")
                except BaseException:
                    close_all(descriptors)
                    raise
                self._pinned.set_result(descriptors[0])
                while True:
                    self._wait_for_refresh(connection)
                    self._refresh_token(connection)
        except RforkError as error:
            if self._pinned.done():
                self._on_end(error)
            else:
                self._pinned.set_exception(error)
        except Exception as error:  # an unexpected error must reach the caller that waits for the pin
            log.exception("unexpected error in the connection that keeps a source's memory")
            if not self._pinned.done():
                self._pinned.set_exception(error)
