"""List, then watch, for ever: what there is of a kind, and how it changes.

The first list may come out of the API server's cache; a later one may not be older than what was seen, or an
object that came meanwhile would look gone. Watches are short, and begin again where they stood: the server
ends each after `WATCH_S`, so that one which says nothing for longer stands on a connection that is dead.
Bookmarks keep the place fresh where the objects watched hardly change, but others do.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from planner.hooks.kubernetes.cluster import (
    ClusterUnavailable,
    Conflict,
    Gone,
    Listed,
    News,
    Put,
    Removed,
)
from planner.hooks.kubernetes.server import OPENED, ApiServer, Expired, Refused
from planner.hooks.kubernetes.shapes import Document
from rfork.logs import logger

WATCH_S: Final = 60
SILENCE_S: Final = WATCH_S + 15.0
SHORTEST_S: Final = 1.0
"""A watch that ends sooner is no watch: what is between would otherwise be asked without a pause."""
BACKOFF_S: Final = 0.5
MOST_BACKOFF_S: Final = 30.0
LOOK_AGAIN_S: Final = 300.0
"""Seconds between two looks for a kind that the cluster lacks."""
PAGE: Final = 500
"""Most objects of one answer to a list, where the server cuts lists."""

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Kind(Generic[Seen]):
    """What is listed and watched, in all namespaces."""

    name: str
    path: str
    """``/api/v1/pods``"""
    read: Callable[[Document], Seen]
    key: Callable[[Seen], Hashable]
    selector: str = ""
    """Of labels."""
    optional: bool = False
    """A cluster may lack it, or not let us see it: then there is none."""


@dataclass
class Place:
    """Where a watch stands."""

    version: str = "0"
    """resourceVersion; "0": anything the server has at hand, "": what is true now."""


@dataclass
class Trouble:
    """How often in a row it failed, and what was said of that."""

    name: str
    failures: int = 0
    causes: set[str] = field(default_factory=set)

    def opened(self) -> None:
        """The server took the watch."""
        if self.causes:
            logger(__name__).info("watch_works", of=self.name)
            self.causes.clear()

    def worked(self) -> None:
        """The watch brought something: the next failure is a first one."""
        self.failures = 0

    def tell(self, error: Exception) -> float:
        """Log it, if its cause was not yet; seconds to wait before trying again."""
        cause = _cause(error)
        if isinstance(error, Expired):
            logger(__name__).debug("watch_expired", of=self.name, why=str(error))
        elif cause not in self.causes:
            self.causes.add(cause)
            logger(__name__).warning("watch_failed", of=self.name, why=str(error))
        most = min(MOST_BACKOFF_S, BACKOFF_S * 2.0 ** min(self.failures, 16))
        self.failures += 1
        return most * random.uniform(0.5, 1.0)


async def follow(server: ApiServer, kind: Kind[Seen]) -> AsyncIterator[News[Seen]]:
    """See `Cluster`. Never raises, and never ends by itself: close it, or cancel its task."""
    place, trouble = Place(), Trouble(kind.name)
    while True:
        try:
            yield Listed(await _list(server, kind, place))
            async with contextlib.aclosing(_watch(server, kind, place, trouble)) as watch:
                async for news in watch:
                    yield news
        except (ClusterUnavailable, Conflict, Gone) as error:
            if kind.optional and _lacking(error):
                wait_s = LOOK_AGAIN_S * random.uniform(0.8, 1.2)
                if not isinstance(error, Gone):
                    trouble.tell(error)
                place.version = "0"
                yield Listed(())
            else:
                wait_s = trouble.tell(error)
                if isinstance(error, Expired):
                    place.version = ""
            await asyncio.sleep(wait_s)


async def merged(server: ApiServer, kinds: Sequence[Kind[Seen]]) -> AsyncIterator[News[Seen]]:
    """Several kinds as one: nothing is told before each was listed, and each `Listed` holds them all."""
    queue: asyncio.Queue[tuple[int, News[Seen] | None]] = asyncio.Queue()
    known: dict[int, dict[Hashable, Seen]] = {}

    async def feed(number: int) -> None:
        try:
            async for news in follow(server, kinds[number]):
                queue.put_nowait((number, news))
        finally:
            queue.put_nowait((number, None))  # its end is a bug, and may not look like a quiet cluster

    tasks = [asyncio.create_task(feed(number)) for number in range(len(kinds))]
    try:
        while True:
            number, news = await queue.get()
            if news is None:
                await tasks[number]
                return
            _apply(news, known, number, kinds[number].key)
            if len(known) < len(kinds):
                continue
            if isinstance(news, Listed):
                yield Listed(tuple(item for each in sorted(known) for item in known[each].values()))
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _apply(
    news: News[Seen], known: dict[int, dict[Hashable, Seen]], number: int, key: Callable[[Seen], Hashable]
) -> None:
    """Make `known` what it is after this news of one kind. A kind's first news is a Listed."""
    match news:
        case Listed(items):
            known[number] = {key(item): item for item in items}
        case Put(item):
            known[number][key(item)] = item
        case Removed(item):
            known[number].pop(key(item), None)


async def _list(server: ApiServer, kind: Kind[Seen], place: Place) -> tuple[Seen, ...]:
    """Everything there is; `place` is then where a watch goes on."""
    asked = {"labelSelector": kind.selector} if kind.selector else {}
    # A list with a version comes out of the server's cache only if it is asked for whole.
    asked |= {"resourceVersion": place.version} if place.version else {"limit": str(PAGE)}
    items: list[Seen] = []
    while True:
        answer = await server.ask("GET", kind.path, parameters=asked)
        items += [seen for document in answer.get("items") or () for seen in _understood(kind, document)]
        about = answer.get("metadata") or {}
        if not about.get("continue"):
            place.version = str(about.get("resourceVersion") or "")
            return tuple(items)
        asked["continue"] = str(about["continue"])


async def _watch(
    server: ApiServer, kind: Kind[Seen], place: Place, trouble: Trouble
) -> AsyncGenerator[News[Seen], None]:
    """What happens from `place` on, watch after watch, until one fails."""
    while True:
        asked = {"resourceVersion": place.version, "timeoutSeconds": str(WATCH_S)}
        asked |= {"labelSelector": kind.selector} if kind.selector else {}
        begun = time.monotonic()
        async with contextlib.aclosing(server.watch(kind.path, asked, silence_s=SILENCE_S)) as events:
            async for event in events:
                if event.get("type") == OPENED:
                    trouble.opened()
                    continue
                trouble.worked()
                document = event.get("object") or {}
                place.version = str(_about(document).get("resourceVersion") or place.version)
                if event.get("type") != "BOOKMARK":
                    for seen in _understood(kind, document):
                        yield Removed(seen) if event.get("type") == "DELETED" else Put(seen)
        if time.monotonic() - begun < SHORTEST_S:
            raise ClusterUnavailable(f"WATCH {kind.path}: ended as soon as it had begun")
        trouble.worked()


def _about(document: object) -> Document:
    """The metadata of what is meant to be an object; empty where it has none."""
    about = document.get("metadata") if isinstance(document, dict) else None
    return about if isinstance(about, dict) else {}


def _understood(kind: Kind[Seen], document: Document) -> tuple[Seen, ...]:
    """The object, or nothing for one that is not as its kind is: it may not hide the others."""
    try:
        return (kind.read(document),)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        name = _about(document).get("name")
        logger(__name__).warning("object_not_understood", of=kind.name, name=name, why=repr(error))
        return ()


def _lacking(error: Exception) -> bool:
    """Whether the cluster has no such kind, or does not let us see it."""
    return isinstance(error, Gone) or (isinstance(error, Refused) and error.status == 403)


def _cause(error: Exception) -> str:
    """What stays the same in the texts of errors that have one cause."""
    if isinstance(error, Refused):
        return f"{error.status} {error.reason}"
    return type(error.__cause__ or error).__name__
