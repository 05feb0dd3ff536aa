"""Access control and limits for gRPC calls, applied before a request is read. Runs on the source.

gRPC counts a call from its headers on, and waits without limit for its request and for the client to read the
response: a few hundred stalled calls would block the service. So a call presents its lease first, has a few
seconds to send its request, is cancelled if the client does not read the response, and counts against the
limit of its fork.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext, suppress
from typing import NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from rfork.asyncio_timeout import timeout
from rfork.errors import RforkError, SourceBusy
from rfork.peer import codec
from rfork.planner_client.lease import KEYS_TIMEOUT_S

REQUEST_TIMEOUT_S = 5.0
"""A request is one small message, sent together with its headers."""
RECEIVE_TIMEOUT_S = 10.0
"""A client that does not read a response message for this long is disconnected."""
CLOSE_TIMEOUT_S = 1.0
KEYS_POLL_INTERVAL_S = 0.02
MAX_CALLS_PER_FORK = 4
"""Limit of concurrent calls per fork and method: a fork makes one, and may start the next before the last has
ended.
"""

RequestMessage = TypeVar("RequestMessage", bound=Message)
ResponseMessage = TypeVar("ResponseMessage", bound=Message)
Context = grpc.aio.ServicerContext[RequestMessage, ResponseMessage]
UnaryHandler = Callable[
    [RequestMessage, Context[RequestMessage, ResponseMessage], str], AsyncGenerator[ResponseMessage, None]
]
"""Handler of one request; the last argument is the fork_id."""
StreamHandler = Callable[
    [
        RequestMessage,
        AsyncIterator[RequestMessage],
        Context[RequestMessage, ResponseMessage],
        str,
    ],
    AsyncGenerator[ResponseMessage, None],
]
"""Handler of a first request and the following ones; the last argument is the fork_id."""


class LeaseChecker(Protocol):
    """Checks lease tokens."""

    @property
    def has_lease_keys(self) -> bool:
        """True once the planner has sent the keys with which it signs leases."""
        ...

    def check(self, token: str) -> str:
        """Return the fork_id of a token's lease. Raises LeaseRejected or SourceWeightsChanged."""
        ...


async def fork_of(leases: LeaseChecker, token: str) -> str:
    """Return the fork_id of a token's lease; wait for the keys if there are none yet. Raises as `check`."""
    until = time.monotonic() + KEYS_TIMEOUT_S
    while token and not leases.has_lease_keys and time.monotonic() < until:
        await asyncio.sleep(KEYS_POLL_INTERVAL_S)
    return leases.check(token)


class CallGuard:
    """Wraps handlers as gRPC handlers. Used on one event loop only."""

    def __init__(self, leases: LeaseChecker) -> None:
        self._leases = leases

    def handler(
        self,
        handle: UnaryHandler[RequestMessage, ResponseMessage],
        request: type[RequestMessage],
        *,
        max_calls: int = MAX_CALLS_PER_FORK,
        leased: bool = True,
    ) -> grpc.RpcMethodHandler[RequestMessage, ResponseMessage]:
        """Return the gRPC handler of a unary or response-streaming method; they are identical on the wire.

        `max_calls` limits the concurrent calls per fork. `leased` False: no lease and no limit; `handle` then
        gets an empty fork_id.
        """

        def handle_first(
            first_message: RequestMessage,
            _: AsyncIterator[RequestMessage],
            context: Context[RequestMessage, ResponseMessage],
            fork_id: str,
        ) -> AsyncGenerator[ResponseMessage, None]:
            return handle(first_message, context, fork_id)

        return self.stream_handler(handle_first, request, max_calls=max_calls, leased=leased)

    def stream_handler(
        self,
        handle: StreamHandler[RequestMessage, ResponseMessage],
        request: type[RequestMessage],
        *,
        max_calls: int,
        leased: bool = True,
    ) -> grpc.RpcMethodHandler[RequestMessage, ResponseMessage]:
        """Return the gRPC handler of a request-streaming method; see `handler`."""
        calls: Counter[str] = Counter()

        async def serve(
            requests: AsyncIterator[RequestMessage], context: Context[RequestMessage, ResponseMessage]
        ) -> None:
            try:
                fork_id = await fork_of(self._leases, token_of(context)) if leased else ""
                with _limit_calls(calls, fork_id, max_calls) if leased else nullcontext():
                    first_message = await _first_message(requests, context)
                    async with aclosing(handle(first_message, requests, context, fork_id)) as messages:
                        async for message in messages:
                            await _respond(message, context)
            except RforkError as error:
                await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(
            serve,
            request_deserializer=request.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )


@contextmanager
def _limit_calls(calls: Counter[str], fork_id: str, max_calls: int) -> Iterator[None]:
    if calls[fork_id] >= max_calls:
        raise SourceBusy(f"fork {fork_id} already has {max_calls} concurrent calls of this method")
    calls[fork_id] += 1
    try:
        yield
    finally:
        calls[fork_id] -= 1
        if not calls[fork_id]:
            del calls[fork_id]


async def _first_message(
    requests: AsyncIterator[RequestMessage], context: Context[RequestMessage, ResponseMessage]
) -> RequestMessage:
    try:
        async with timeout(REQUEST_TIMEOUT_S):
            return await anext(requests)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not arrive in time")
    except (StopAsyncIteration, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is invalid")


async def _respond(message: ResponseMessage, context: Context[RequestMessage, ResponseMessage]) -> None:
    try:
        async with timeout(RECEIVE_TIMEOUT_S):
            await context.write(message)
    except TimeoutError:
        # The status of the call would wait for the unread message, so cancel the call.
        with suppress(TimeoutError):
            async with timeout(CLOSE_TIMEOUT_S):
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the response was not read in time")
        raise asyncio.CancelledError from None


def token_of(context: Context[RequestMessage, ResponseMessage]) -> str:
    """Return the lease token of a call; empty if there is none."""
    return metadata_value(context, "authorization").removeprefix("Bearer ")


def metadata_value(context: Context[RequestMessage, ResponseMessage], name: str) -> str:
    """Return a value of a call's metadata; empty if there is none."""
    metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
    value = metadata.get(name, "")
    return value if isinstance(value, str) else value.decode("ascii", "replace")


async def abort(context: Context[RequestMessage, ResponseMessage], error: RforkError) -> NoReturn:
    """End a call with the status for `error`."""
    await context.abort(codec.STATUS_OF.get(type(error), grpc.StatusCode.INTERNAL), str(error))
