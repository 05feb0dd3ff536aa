"""List and watch: streams the objects of a kind and their changes, forever.

The first list may come from the API server's cache. A later one must not be older than what was seen, or an
object created meanwhile would look deleted. Watches are short and resume where they ended: the server ends
each after `WATCH_S`, so a longer silence means a dead connection. Bookmarks keep the position recent when the
watched objects hardly change but others do.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from planner.integrations.kubernetes.api_client import (
    WATCH_STARTED,
    ApiError,
    ApiServer,
    ResourceVersionExpired,
)
from planner.integrations.kubernetes.cluster import (
    ClusterUnavailable,
    Deleted,
    NotFound,
    ResourceConflict,
    Synced,
    Upserted,
    WatchEvent,
)
from planner.integrations.kubernetes.manifests import Document
from rfork.logs import logger

WATCH_S: Final = 60
SILENCE_S: Final = WATCH_S + 15.0
MIN_WATCH_S: Final = 1.0
"""A watch that ends sooner counts as failed; otherwise it would be restarted without a pause."""
BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0
RECHECK_S: Final = 300.0
"""Seconds between two checks for a kind that the cluster lacks."""
PAGE: Final = 500
"""Page size of a list, on servers that paginate lists."""

ObservedT = TypeVar("ObservedT")


@dataclass(frozen=True)
class Resource(Generic[ObservedT]):
    """A resource to list and watch, in all namespaces."""

    name: str
    path: str
    """``/api/v1/pods``"""
    read: Callable[[Document], ObservedT]
    key: Callable[[ObservedT], Hashable]
    selector: str = ""
    """Label selector."""
    optional: bool = False
    """The cluster may lack the resource or deny access to it; then it counts as empty."""


@dataclass
class WatchCursor:
    """Position of a watch."""

    version: str = "0"
    """resourceVersion. "0": any version from the server's cache; "": the latest version."""


@dataclass
class WatchBackoff:
    """Backoff after consecutive failures of a watch, and their logging."""

    name: str
    failures: int = 0
    causes: set[str] = field(default_factory=set)

    def on_opened(self) -> None:
        """The server accepted the watch."""
        if self.causes:
            logger(__name__).info("watch of Kubernetes objects restored", resource=self.name)
            self.causes.clear()

    def reset(self) -> None:
        """The watch delivered something: the next failure counts as the first."""
        self.failures = 0

    def next_delay(self, error: Exception) -> float:
        """Log the error, once per cause, and return the seconds to wait before the next attempt."""
        cause = _cause(error)
        if isinstance(error, ResourceVersionExpired):
            logger(__name__).debug("watch expired, listing again", resource=self.name, reason=str(error))
        elif cause not in self.causes:
            self.causes.add(cause)
            logger(__name__).warning(
                "watch of Kubernetes objects failed, retrying", resource=self.name, reason=str(error)
            )
        max_delay_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(self.failures, 16))
        self.failures += 1
        return max_delay_s * random.uniform(0.5, 1.0)


async def watch_forever(server: ApiServer, resource: Resource[ObservedT]) -> AsyncIterator[WatchEvent[ObservedT]]:
    """See `Cluster`. Never raises and never ends: close it or cancel its task."""
    cursor, backoff = WatchCursor(), WatchBackoff(resource.name)
    while True:
        try:
            yield Synced(await _list(server, resource, cursor))
            async with contextlib.aclosing(_watch(server, resource, cursor, backoff)) as watch:
                async for event in watch:
                    yield event
        except (ClusterUnavailable, ResourceConflict, NotFound) as error:
            if resource.optional and _is_unavailable(error):
                wait_s = RECHECK_S * random.uniform(0.8, 1.2)
                if not isinstance(error, NotFound):
                    backoff.next_delay(error)
                cursor.version = "0"
                yield Synced(())
            else:
                wait_s = backoff.next_delay(error)
                if isinstance(error, ResourceVersionExpired):
                    cursor.version = ""
            await asyncio.sleep(wait_s)


async def merge_watches(
    server: ApiServer, resources: Sequence[Resource[ObservedT]]
) -> AsyncIterator[WatchEvent[ObservedT]]:
    """Merge the streams of several kinds. Starts when all are listed; each `Synced` has all of them."""
    queue: asyncio.Queue[tuple[int, WatchEvent[ObservedT] | None]] = asyncio.Queue()
    known: dict[int, dict[Hashable, ObservedT]] = {}

    async def feed(number: int) -> None:
        try:
            async for event in watch_forever(server, resources[number]):
                queue.put_nowait((number, event))
        finally:
            queue.put_nowait((number, None))  # an ended stream is a bug and must not look like an idle cluster

    tasks = [asyncio.create_task(feed(number)) for number in range(len(resources))]
    try:
        while True:
            number, event = await queue.get()
            if event is None:
                await tasks[number]
                return
            _apply(event, known, number, resources[number].key)
            if len(known) < len(resources):
                continue
            if isinstance(event, Synced):
                yield Synced(tuple(item for each in sorted(known) for item in known[each].values()))
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _apply(
    event: WatchEvent[ObservedT],
    known: dict[int, dict[Hashable, ObservedT]],
    number: int,
    key: Callable[[ObservedT], Hashable],
) -> None:
    """Update `known` from an event of one kind. The first event of a kind is a Synced."""
    match event:
        case Synced(items):
            known[number] = {key(item): item for item in items}
        case Upserted(item):
            known[number][key(item)] = item
        case Deleted(item):
            known[number].pop(key(item), None)


async def _list(server: ApiServer, resource: Resource[ObservedT], cursor: WatchCursor) -> tuple[ObservedT, ...]:
    """Return all objects, and move `cursor` to the position where a watch continues."""
    parameters = {"labelSelector": resource.selector} if resource.selector else {}
    # A list with a version comes from the server's cache only if it is not paginated.
    parameters |= {"resourceVersion": cursor.version} if cursor.version else {"limit": str(PAGE)}
    items: list[ObservedT] = []
    while True:
        page = await server.call("GET", resource.path, parameters=parameters)
        items += [seen for document in page.get("items") or () for seen in _parse(resource, document)]
        metadata = page.get("metadata") or {}
        if not metadata.get("continue"):
            cursor.version = str(metadata.get("resourceVersion") or "")
            return tuple(items)
        parameters["continue"] = str(metadata["continue"])


async def _watch(
    server: ApiServer, resource: Resource[ObservedT], cursor: WatchCursor, backoff: WatchBackoff
) -> AsyncGenerator[WatchEvent[ObservedT], None]:
    """Yield the changes from `cursor` on, over successive watches, until one fails."""
    while True:
        parameters = {"resourceVersion": cursor.version, "timeoutSeconds": str(WATCH_S)}
        parameters |= {"labelSelector": resource.selector} if resource.selector else {}
        started_at = time.monotonic()
        async with contextlib.aclosing(server.watch(resource.path, parameters, silence_s=SILENCE_S)) as events:
            async for event in events:
                if event.get("type") == WATCH_STARTED:
                    backoff.on_opened()
                    continue
                backoff.reset()
                document = event.get("object") or {}
                cursor.version = str(_metadata(document).get("resourceVersion") or cursor.version)
                if event.get("type") != "BOOKMARK":
                    for seen in _parse(resource, document):
                        yield Deleted(seen) if event.get("type") == "DELETED" else Upserted(seen)
        if time.monotonic() - started_at < MIN_WATCH_S:
            raise ClusterUnavailable(f"WATCH {resource.path}: ended immediately")
        backoff.reset()


def _metadata(document: object) -> Document:
    """Return the metadata of a document; empty if it has none."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _parse(resource: Resource[ObservedT], document: Document) -> tuple[ObservedT, ...]:
    """Return the parsed object, or nothing if it is malformed: it must not hide the others."""
    try:
        return (resource.read(document),)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        name = _metadata(document).get("name")
        reason = f"a field is missing or has an unexpected type: {error!r}"
        logger(__name__).warning("malformed object ignored", resource=resource.name, name=name, reason=reason)
        return ()


def _is_unavailable(error: Exception) -> bool:
    """Return True if the cluster has no such kind, or denies access to it."""
    return isinstance(error, NotFound) or (isinstance(error, ApiError) and error.status == 403)


def _cause(error: Exception) -> str:
    """Return the part of an error's text that is equal for equal causes."""
    if isinstance(error, ApiError):
        return f"{error.status} {error.reason}"
    return type(error.__cause__ or error).__name__
