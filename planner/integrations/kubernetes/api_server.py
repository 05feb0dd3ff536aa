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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from rfork import __version__
from rfork.errors import MissingExtra, SettingsError
from rfork.logs import logger
from rfork.settings import KubernetesSettings

try:
    import httpx2
    from lightkube import KubeConfig
    from lightkube.config.client_adapter import AsyncClient, ConnectionParams
except ImportError as error:
    raise MissingExtra("lightkube, for Kubernetes,", extra="kubernetes", reason=str(error)) from None

Document = dict[str, Any]
"""A JSON object of the Kubernetes API."""
ObservedT = TypeVar("ObservedT")
TIMEOUT_S: Final = 10.0
"""Maximum seconds to connect, and between two parts of a response."""
JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
WATCH_STARTED: Final = "OPENED"
"""Type of a synthetic event: the API server accepted the watch."""
STRATEGIC: Final = "application/strategic-merge-patch+json"
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


class ClusterUnavailable(Exception):
    """The API server did not respond, or rejected the request. The text names the request and the cause."""


class ResourceConflict(Exception):
    """The object changed since it was read (or already exists): read it again."""


class NotFound(Exception):
    """The object does not exist (any more)."""


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


@dataclass(frozen=True)
class Resource(Generic[ObservedT]):
    """A resource to list and watch, in all namespaces."""

    name: str
    path: str
    """``/api/v1/pods``"""
    read: Callable[[Document], ObservedT]
    selector: str = ""
    """Label selector."""
    optional: bool = False
    """The cluster may lack the resource or deny access to it; then it counts as empty."""


async def watch_forever(server: ApiServer, resource: Resource[ObservedT]) -> AsyncIterator[WatchEvent[ObservedT]]:
    """Yield the objects of a resource and their changes. Never raises and never ends: close it or cancel its task.

    Starts with a `Synced`, and yields a new one after the API server was unavailable or had dropped the watch
    position. Meanwhile each cause is logged once.
    """
    watch = _Watch(server, resource)
    while True:
        try:
            yield Synced(await watch.list())
            async with contextlib.aclosing(watch.changes()) as changes:
                async for event in changes:
                    yield event
        except (ClusterUnavailable, ResourceConflict, NotFound) as error:
            if resource.optional and _is_unavailable(error):
                wait_s = RECHECK_S * random.uniform(0.8, 1.2)
                if not isinstance(error, NotFound):
                    watch.on_failure(error)
                watch.version = "0"
                yield Synced(())
            else:
                wait_s = watch.on_failure(error)
            await asyncio.sleep(wait_s)


class _Watch(Generic[ObservedT]):
    """Position of a watch, and its consecutive failures."""

    def __init__(self, server: ApiServer, resource: Resource[ObservedT]) -> None:
        self._server, self._resource = server, resource
        self._query = {"labelSelector": resource.selector} if resource.selector else {}
        self._failures = 0
        self._causes: set[str] = set()
        self._log = logger(__name__).bind(resource=resource.name)
        self.version = "0"
        """resourceVersion. "0": any version from the server's cache; "": the latest version."""

    async def list(self) -> tuple[ObservedT, ...]:
        """Return all objects, and move to the position where `changes` continues."""
        # A list with a version comes from the server's cache only if it is not paginated.
        query = self._query | ({"resourceVersion": self.version} if self.version else {"limit": str(PAGE)})
        items: list[ObservedT] = []
        while True:
            page = await self._server.call("GET", self._resource.path, parameters=query)
            items += [seen for document in page.get("items") or () for seen in self._parse(document)]
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                self.version = str(metadata.get("resourceVersion") or "")
                return tuple(items)
            query["continue"] = str(metadata["continue"])

    async def changes(self) -> AsyncGenerator[WatchEvent[ObservedT], None]:
        """Yield the changes from the position on, over successive watches, until one fails."""
        path = self._resource.path
        while True:
            query = self._query | {"resourceVersion": self.version, "timeoutSeconds": str(WATCH_S)}
            started_at = time.monotonic()
            async with contextlib.aclosing(self._server.watch(path, query, silence_s=SILENCE_S)) as events:
                async for event in events:
                    if event.get("type") == WATCH_STARTED:
                        self._on_opened()
                        continue
                    self._failures = 0
                    document = event.get("object") or {}
                    self.version = str(_metadata(document).get("resourceVersion") or self.version)
                    if event.get("type") != "BOOKMARK":
                        for seen in self._parse(document):
                            yield Deleted(seen) if event.get("type") == "DELETED" else Upserted(seen)
            if time.monotonic() - started_at < MIN_WATCH_S:
                raise ClusterUnavailable(f"WATCH {path}: ended immediately")
            self._failures = 0

    def on_failure(self, error: Exception) -> float:
        """Log the error, once per cause, and return the seconds to wait before the next list."""
        cause = f"{error.status} {error.reason}" if isinstance(error, ApiError) else _type_name(error)
        if isinstance(error, ResourceVersionExpired):
            self.version = ""
            self._log.debug("watch expired, listing again", reason=str(error))
        elif cause not in self._causes:
            self._causes.add(cause)
            self._log.warning("watch of Kubernetes objects failed, retrying", reason=str(error))
        max_delay_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return max_delay_s * random.uniform(0.5, 1.0)

    def _on_opened(self) -> None:
        if self._causes:
            self._log.info("watch of Kubernetes objects restored")
            self._causes.clear()

    def _parse(self, document: Document) -> tuple[ObservedT, ...]:
        """Return the parsed object, or nothing if it is malformed: it must not hide the others."""
        try:
            return (self._resource.read(document),)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"a field is missing or has an unexpected type: {error!r}"
            self._log.warning("malformed object ignored", name=_metadata(document).get("name"), reason=reason)
            return ()


def _metadata(document: object) -> Document:
    """Return the metadata of a document; empty if it has none."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _is_unavailable(error: Exception) -> bool:
    """Return True if the cluster has no such kind, or denies access to it."""
    return isinstance(error, NotFound) or (isinstance(error, ApiError) and error.status == 403)


def _type_name(error: Exception) -> str:
    return type(error.__cause__ or error).__name__
