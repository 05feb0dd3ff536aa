"""Kubernetes API server: calls, and lists with watches.

lightkube finds the server and its credentials: a Pod's token, reread after each renewal, a kubeconfig's
certificate, or an exec plug-in. Everything else is plain HTTP with JSON documents, because no Python client
(lightkube 1.0, kubernetes 37, kubernetes_asyncio 36, kr8s 0.20 and kopf 1.45 were tried) has an informer that
lists from the server's cache, follows bookmarks, notices dead connections and backs off. The informer of
kubernetes 37 needs 425 MB and 3.9 s of CPU time for 5,000 Pods where this module needs 125 MB and 0.6 s, and
repeats a rejected watch 22 times a second.

The first list may come from the API server's cache. A later one must not be older than what was seen, or an
object created meanwhile would look deleted. Watches are short and resume where they ended: the server ends
each after `WATCH_S`, so a longer silence means a dead connection. Bookmarks keep the position recent when the
watched objects hardly change but others do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from rfork import __version__
from rfork.errors import MissingExtra, SettingsError
from rfork.logs import logger
from rfork.settings import KubernetesSettings

Document = dict[str, Any]
"""A JSON object of the Kubernetes API."""


class ClusterUnavailable(Exception):
    """The API server did not respond, or rejected the request. The text names the request and the cause."""


class ResourceConflict(Exception):
    """The object changed since it was read (or already exists): read it again."""


class NotFound(Exception):
    """The object does not exist (any more)."""


ObservedT = TypeVar("ObservedT")


@dataclass(frozen=True)
class Synced(Generic[ObservedT]):
    """All objects of a kind, sent after each list. Objects that are not included no longer exist."""

    items: tuple[ObservedT, ...]


@dataclass(frozen=True)
class Upserted(Generic[ObservedT]):
    """An object was created or changed."""

    item: ObservedT


@dataclass(frozen=True)
class Deleted(Generic[ObservedT]):
    """An object was deleted; its last known state."""

    item: ObservedT


WatchEvent = Synced[ObservedT] | Upserted[ObservedT] | Deleted[ObservedT]


try:
    import httpx2
    from lightkube import KubeConfig
    from lightkube.config.client_adapter import AsyncClient, ConnectionParams
except ImportError as error:
    raise MissingExtra("lightkube, for Kubernetes,", extra="kubernetes", reason=str(error)) from None

TIMEOUT_S: Final = 10.0
"""Maximum seconds to connect, and between two parts of a response."""
JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
WATCH_STARTED: Final = "OPENED"
"""Type of a synthetic event: the API server accepted the watch."""
STRATEGIC: Final = "application/strategic-merge-patch+json"


class ApiError(ClusterUnavailable):
    """The API server returned an error, with an HTTP `status` and the `reason` of its Status object."""

    def __init__(self, message: str, *, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class ResourceVersionExpired(ClusterUnavailable):
    """The API server does not have this resourceVersion: it is too old, or newer than the server's state."""


class ApiServer:
    """One API server, accessed as one user."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Document | None = None,
        content_type: str = JSON,
        parameters: Mapping[str, str] | None = None,
    ) -> Document:
        """Send one request and return the response.

        Raises NotFound (404), ResourceConflict (409), ResourceVersionExpired (410), ApiError for all other
        errors of the server, and ClusterUnavailable if it does not respond.
        """
        content = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": content_type} if body is not None else None
        operation = f"{method} {path}"
        try:
            response = await self._client.request(
                method, path, content=content, headers=headers, params=dict(parameters or {})
            )
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise _unavailable(operation, error) from error
        if not response.is_success:
            raise _to_error(operation, response.status_code, response.content)
        return _document(operation, response.content)

    async def watch(
        self, path: str, parameters: Mapping[str, str], *, silence_s: float
    ) -> AsyncGenerator[Document, None]:
        """Yield the events of one watch until the server ends it. The first has the type `WATCH_STARTED`.

        Raises as `call` does, and ClusterUnavailable after `silence_s` seconds without data.
        """
        operation, timeout_config = f"WATCH {path}", httpx2.Timeout(TIMEOUT_S, read=silence_s)
        query = {**parameters, "watch": "true", "allowWatchBookmarks": "true"}
        try:
            async with self._client.stream("GET", path, params=query, timeout=timeout_config) as response:
                if not response.is_success:
                    raise _to_error(operation, response.status_code, await response.aread())
                yield {"type": WATCH_STARTED}
                rest = b""
                # Not httpx's line iterator: it also splits at characters that JSON strings may contain.
                async for part in response.aiter_bytes():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in filter(None, lines):
                        event = _document(operation, line)
                        if event.get("type") == "ERROR":
                            status = event.get("object")
                            code = status.get("code") if isinstance(status, dict) else None
                            raise _to_error(
                                operation, code if isinstance(code, int) else 0, json.dumps(status).encode()
                            )
                        yield event
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise _unavailable(operation, error) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def open_server(settings: KubernetesSettings) -> ApiServer:
    """Return a client for the API server of `settings.kubeconfig`, else of this Pod, else of
    ~/.kube/config.

    Does not connect yet. Raises SettingsError if the configuration is missing or unusable. (Importing this
    module raises MissingExtra without lightkube.)
    """
    kubeconfig = str(settings.kubeconfig) if settings.kubeconfig is not None else "the Pod's, or ~/.kube/config"
    try:
        found = KubeConfig.from_file(settings.kubeconfig) if settings.kubeconfig is not None else KubeConfig.from_env()
        config = found.get()
        if config is None or config.user is None:
            raise SettingsError(f"the kubeconfig ({kubeconfig}) names no cluster or no user")
        client = AsyncClient(config, ConnectionParams(timeout=httpx2.Timeout(TIMEOUT_S)))
    except SettingsError:
        raise
    except Exception as error:  # a file from elsewhere can be wrong in any way
        raise SettingsError(
            f"cannot use the kubeconfig ({kubeconfig}): {error or type(error).__name__}",
            hint="in a cluster, mount the ServiceAccount's token; outside, set KUBECONFIG",
        ) from error
    client.headers["User-Agent"] = f"rfork/{__version__}"
    return ApiServer(client)


def _unavailable(operation: str, error: Exception) -> ClusterUnavailable:
    return ClusterUnavailable(f"{operation}: {type(error).__name__}: {error}".rstrip(": "))


def _to_error(operation: str, code: int, content: bytes) -> Exception:
    """Convert an error response to an exception. Its body is a Kubernetes Status, or text from a proxy."""
    try:
        status = json.loads(content)
    except ValueError:
        status = {}
    if not isinstance(status, dict):
        status = {}
    reason = str(status.get("reason") or "")
    message = f"{operation}: {code} {status.get('message') or content[:200].decode(errors='replace')}"
    match code:
        case 404:
            return NotFound(message)
        case 409 | 422 if _unexpected_status(status):
            return NotFound(message)
        case 409:
            return ResourceConflict(message)
        case 410:
            return ResourceVersionExpired(message)
        case 504 if any(cause.get("reason") == "ResourceVersionTooLarge" for cause in _causes(status)):
            return ResourceVersionExpired(message)
    return ApiError(message, status=code, reason=reason)


def _unexpected_status(status: Document) -> bool:
    """Return True if a patch was rejected because the object has another UID than the patch."""
    # The first text is used since Kubernetes 1.21, the second before.
    return "UID in precondition" in str(status.get("message")) or any(
        cause.get("field") == "metadata.uid" for cause in _causes(status)
    )


def _causes(status: Document) -> list[Document]:
    """Return the causes of a Status, or nothing for other bodies, such as a proxy's."""
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    return [cause for cause in causes if isinstance(cause, dict)] if isinstance(causes, list) else []


def _document(operation: str, content: bytes) -> Document:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ClusterUnavailable(f"{operation}: the response is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ClusterUnavailable(f"{operation}: the response is not a JSON object")
    return document


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
