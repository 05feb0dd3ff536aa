"""The planner's stream of fork events, for one reader.

The format is that of server-sent events (HTML standard, section 9.2), as far as the planner uses it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Final

import httpx
from pydantic import ValidationError
from typing_extensions import Self

from rfork.errors import PlannerRejected
from rfork.planner_client.deadline_transport import ABORT
from rfork.planner_client.rest import RestClient
from rfork.schema import ForkEvent

TOO_LARGE: Final = "an event of more than 4 MiB"
IDLE_TIMEOUT_S: Final = 20.0
"""A stream without data for this long is broken: the planner sends a comment every 5 s."""
MAX_EVENT_BYTES: Final = 4 << 20
"""Several times the largest event, which contains one fork."""


class PlannerEventStream(Iterator[ForkEvent]):
    """Iterator of fork events, first one for each running fork. Ends when the planner or `close` ends it.

    Iterating raises PlannerUnreachable if the connection breaks. One thread iterates; any thread may close.
    """

    def __init__(self, rest: RestClient, response: httpx.Response, silence_s: float = IDLE_TIMEOUT_S) -> None:
        self._rest = rest
        self._response = response
        self._silence_s = silence_s
        self._lines = self._read()
        self._closed = False
        self._reading = threading.Lock()

    def __next__(self) -> ForkEvent:
        data: list[str] = []
        size = 0
        with self._reading:
            for line in self._lines:
                if self._closed:
                    break
                if line.startswith("data:"):
                    data.append(line[5:].removeprefix(" "))
                    if (size := size + len(line)) > MAX_EVENT_BYTES:
                        raise self._unusable(TOO_LARGE)
                elif not line and data:
                    return self._event("\n".join(data))
            self._response.close()
        raise StopIteration

    def close(self) -> None:
        """End the stream, also for the thread that waits for its next event. Safe to call twice."""
        self._closed = True
        # Wakes the reading thread, the only one that may use the response.
        if (abort := self._response.extensions.get(ABORT)) is not None:
            abort()
        with self._reading:
            self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Iterator[str]:
        rest = b""
        try:
            for piece in self._response.iter_bytes():
                *lines, rest = (rest + piece).split(b"\n")
                yield from (line.decode("utf-8", "replace").removesuffix("\r") for line in lines)
                if len(rest) > MAX_EVENT_BYTES:
                    raise self._unusable(TOO_LARGE)
        except httpx.StreamError:  # closed by another thread
            return
        except httpx.RequestError as error:
            self._response.close()
            if not self._closed:
                raise self._rest.unreachable_error(error, self._silence_s) from error

    def _event(self, data: str) -> ForkEvent:
        try:
            return ForkEvent.model_validate_json(data)
        except ValidationError as error:
            raise self._unusable(str(error.errors()[0]["msg"])) from None

    def _unusable(self, reason: str) -> PlannerRejected:
        """Close the stream and return the error for an invalid event."""
        self._response.close()
        path, status = self._response.request.url.path, self._response.status_code
        return self._rest.unexpected_response_error("GET", path, status, reason)
