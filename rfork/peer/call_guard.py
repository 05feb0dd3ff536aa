"""Who may call the peer service, and how much of it: decided before a byte of the request is read.

gRPC alone counts a call from its headers on and waits without end for the request, and for a caller to
take the answer: some hundred calls that never go on would be all that it serves. So a call shows its
lease first, has a few seconds for its request, loses its place when it takes no answer, and counts
against the fork that makes it. Runs on the source.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext, suppress
from typing import NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from rfork.errors import RforkError, SourceBusy
from rfork.peer import codec

REQUEST_S = 5.0
"""A request is one small message, sent along with its headers."""
RECEIVE_TIMEOUT_S = 10.0
"""A caller that does not take a message of the answer for so long is cut off."""
CLOSE_TIMEOUT_S = 1.0
MAX_CALLS_PER_FORK = 4
"""Calls of one fork at once to one method: it makes one, and the next before the last has quite ended."""

RequestMessage = TypeVar("RequestMessage", bound=Message)
ResponseMessage = TypeVar("ResponseMessage", bound=Message)
Context = grpc.aio.ServicerContext[RequestMessage, ResponseMessage]
UnaryHandler = Callable[
    [RequestMessage, Context[RequestMessage, ResponseMessage], str], AsyncGenerator[ResponseMessage, None]
]
"""Answers one request; told who asks."""
StreamHandler = Callable[
    [
        RequestMessage,
        AsyncIterator[RequestMessage],
        Context[RequestMessage, ResponseMessage],
        str,
    ],
    AsyncGenerator[ResponseMessage, None],
]
"""Answers a first request and those that follow it; told who asks."""


class CallGuard:
    """Makes gRPC handlers of answers. `check` gives a token's fork_id, or raises what the caller is told.

    Used on one event loop only.
    """

    def __init__(self, check: Callable[[str], str]) -> None:
        self._check = check

    def handler(
        self,
        handle: UnaryHandler[RequestMessage, ResponseMessage],
        request: type[RequestMessage],
        *,
        max_calls: int = MAX_CALLS_PER_FORK,
        leased: bool = True,
    ) -> grpc.RpcMethodHandler[RequestMessage, ResponseMessage]:
        """The handler of a method, whether it answers with one message or many: on the wire these are alike.

        `max_calls` of them are answered at once for one fork. `leased` False: anybody may call it, as often as
        they like, and `handle` is told the empty fork_id.
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
        """The handler of a method whose requests are many; see `handler`."""
        calls: Counter[str] = Counter()

        async def serve(
            requests: AsyncIterator[RequestMessage], context: Context[RequestMessage, ResponseMessage]
        ) -> None:
            try:
                fork_id = self._check(token_of(context)) if leased else ""
                with _limit_calls(calls, fork_id, max_calls) if leased else nullcontext():
                    first_message = await _first(requests, context)
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
        raise SourceBusy(f"fork {fork_id} makes {max_calls} such calls already")
    calls[fork_id] += 1
    try:
        yield
    finally:
        calls[fork_id] -= 1
        if not calls[fork_id]:
            del calls[fork_id]


async def _first(
    requests: AsyncIterator[RequestMessage], context: Context[RequestMessage, ResponseMessage]
) -> RequestMessage:
    try:
        async with asyncio.timeout(REQUEST_S):
            return await anext(requests)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come")
    except (StopAsyncIteration, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be read")


async def _respond(message: ResponseMessage, context: Context[RequestMessage, ResponseMessage]) -> None:
    try:
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            await context.write(message)
    except TimeoutError:
        # The end of the call waits behind the message that is not taken; it is broken off with us.
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the answer is not taken")
        raise asyncio.CancelledError from None


def token_of(context: Context[RequestMessage, ResponseMessage]) -> str:
    """The lease token that a call shows; empty when it shows none."""
    return metadata_value(context, "authorization").removeprefix("Bearer ")


def metadata_value(context: Context[RequestMessage, ResponseMessage], name: str) -> str:
    """What a call's metadata has under a name; empty when it has nothing."""
    metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
    value = metadata.get(name, "")
    return value if isinstance(value, str) else value.decode("ascii", "replace")


async def abort(context: Context[RequestMessage, ResponseMessage], error: RforkError) -> NoReturn:
    """End a call with the status that stands for `error`."""
    await context.abort(codec.STATUS_OF.get(type(error), grpc.StatusCode.INTERNAL), str(error))
