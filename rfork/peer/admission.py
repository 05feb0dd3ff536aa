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
TAKE_S = 10.0
"""A caller that does not take a message of the answer for so long is cut off."""
END_S = 1.0
MOST_CALLS = 4
"""Calls of one fork at once to one method: it makes one, and the next before the last has quite ended."""

RequestMessage = TypeVar("RequestMessage", bound=Message)
ResponseMessage = TypeVar("ResponseMessage", bound=Message)
Context = grpc.aio.ServicerContext[RequestMessage, ResponseMessage]
Answer = Callable[
    [RequestMessage, Context[RequestMessage, ResponseMessage], str], AsyncGenerator[ResponseMessage, None]
]
"""Answers one request; told who asks."""
Conversation = Callable[
    [
        RequestMessage,
        AsyncIterator[RequestMessage],
        Context[RequestMessage, ResponseMessage],
        str,
    ],
    AsyncGenerator[ResponseMessage, None],
]
"""Answers a first request and those that follow it; told who asks."""


class Admission:
    """Makes gRPC handlers of answers. `check` gives a token's fork_id, or raises what the caller is told.

    Used on one event loop only.
    """

    def __init__(self, check: Callable[[str], str]) -> None:
        self._check = check

    def handler(
        self,
        answer: Answer[RequestMessage, ResponseMessage],
        request: type[RequestMessage],
        *,
        most: int = MOST_CALLS,
        leased: bool = True,
    ) -> grpc.RpcMethodHandler[RequestMessage, ResponseMessage]:
        """The handler of a method, whether it answers with one message or many: on the wire these are alike.

        `most` of them are answered at once for one fork. `leased` False: anybody may call it, as often as
        they like, and `answer` is told the empty fork_id.
        """

        def answer_first(
            asked: RequestMessage,
            _: AsyncIterator[RequestMessage],
            context: Context[RequestMessage, ResponseMessage],
            fork_id: str,
        ) -> AsyncGenerator[ResponseMessage, None]:
            return answer(asked, context, fork_id)

        return self.conversation(answer_first, request, most=most, leased=leased)

    def conversation(
        self,
        answer: Conversation[RequestMessage, ResponseMessage],
        request: type[RequestMessage],
        *,
        most: int,
        leased: bool = True,
    ) -> grpc.RpcMethodHandler[RequestMessage, ResponseMessage]:
        """The handler of a method whose requests are many; see `handler`."""
        calls: Counter[str] = Counter()

        async def serve(
            requests: AsyncIterator[RequestMessage], context: Context[RequestMessage, ResponseMessage]
        ) -> None:
            try:
                fork_id = self._check(token_of(context)) if leased else ""
                with _counted(calls, fork_id, most) if leased else nullcontext():
                    asked = await _first(requests, context)
                    async with aclosing(answer(asked, requests, context, fork_id)) as messages:
                        async for message in messages:
                            await _give(message, context)
            except RforkError as error:
                await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(
            serve,
            request_deserializer=request.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )


@contextmanager
def _counted(calls: Counter[str], fork_id: str, most: int) -> Iterator[None]:
    if calls[fork_id] >= most:
        raise SourceBusy(f"fork {fork_id} makes {most} such calls already")
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


async def _give(message: ResponseMessage, context: Context[RequestMessage, ResponseMessage]) -> None:
    try:
        async with asyncio.timeout(TAKE_S):
            await context.write(message)
    except TimeoutError:
        # The end of the call waits behind the message that is not taken; it is broken off with us.
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the answer is not taken")
        raise asyncio.CancelledError from None


def token_of(context: Context[RequestMessage, ResponseMessage]) -> str:
    """The lease token that a call shows; empty when it shows none."""
    return shown(context, "authorization").removeprefix("Bearer ")


def shown(context: Context[RequestMessage, ResponseMessage], name: str) -> str:
    """What a call's metadata has under a name; empty when it has nothing."""
    metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
    value = metadata.get(name, "")
    return value if isinstance(value, str) else value.decode("ascii", "replace")


async def abort(context: Context[RequestMessage, ResponseMessage], error: RforkError) -> NoReturn:
    """End a call with the status that stands for `error`."""
    await context.abort(codec.STATUS_OF.get(type(error), grpc.StatusCode.INTERNAL), str(error))
