"""Calls to a Kubernetes API server: how it is reached, and what its answers mean.

lightkube knows where the server is and how to show who one is: a Pod's token, which is read again when it was
renewed, a kubeconfig's certificate, or a program that gives tokens. The calls are plain HTTP with JSON
documents, because lightkube's own neither ask for bookmarks nor say which version a list may have: without
those, each look at a busy cluster would read all of its Pods out of etcd.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from planner.integrations.kubernetes.cluster import ClusterUnavailable, NotFound, ResourceConflict
from planner.integrations.kubernetes.manifests import Document
from rfork import __version__
from rfork.errors import MissingExtra, SettingsError
from rfork.settings import KubernetesSettings

try:
    import httpx2
    from lightkube import KubeConfig
    from lightkube.config.client_adapter import AsyncClient, ConnectionParams
except ImportError as error:
    raise MissingExtra("lightkube, for Kubernetes,", extra="kubernetes", why=str(error)) from None

TIMEOUT_S: Final = 10.0
"""Most seconds to connect, and between two parts of an answer."""
JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
WATCH_STARTED: Final = "OPENED"
"""Type of an event that is not the API server's: it took the watch."""
STRATEGIC: Final = "application/strategic-merge-patch+json"


class ApiError(ClusterUnavailable):
    """The API server answered with an error; `status` is HTTP's, `reason` its own word for it."""

    def __init__(self, message: str, *, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class ResourceVersionExpired(ClusterUnavailable):
    """It does not know this resourceVersion: it forgot that far back, or has not come that far."""


class ApiServer:
    """One API server, as one user."""

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
        """The answer to one request.

        Raises Gone (404), Conflict (409), Expired (410), Refused for every other error that the server
        answers, and ClusterUnavailable where it does not.
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
        """The events of one watch until the server ends it, the first of which is one of type `WATCH_STARTED`.

        Raises as `call`, and ClusterUnavailable after `silence_s` seconds of silence.
        """
        operation, timeout_config = f"WATCH {path}", httpx2.Timeout(TIMEOUT_S, read=silence_s)
        query = {**parameters, "watch": "true", "allowWatchBookmarks": "true"}
        try:
            async with self._client.stream("GET", path, params=query, timeout=timeout_config) as response:
                if not response.is_success:
                    raise _to_error(operation, response.status_code, await response.aread())
                yield {"type": WATCH_STARTED}
                rest = b""
                # Not httpx's lines: those end at characters too that JSON may hold as they are.
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
        """Let go of connections."""
        await self._client.aclose()


def open_server(settings: KubernetesSettings) -> ApiServer:
    """The API server of `settings.kubeconfig`; without one, of the Pod that this is, else as kubectl would.

    Connects to nothing yet. Raises SettingsError where it is not said how, or not so that it can be used.
    (Importing this module raises MissingExtra without lightkube.)
    """
    kubeconfig = str(settings.kubeconfig) if settings.kubeconfig is not None else "the Pod's, or KUBECONFIG"
    try:
        found = KubeConfig.from_file(settings.kubeconfig) if settings.kubeconfig is not None else KubeConfig.from_env()
        config = found.get()
        if config is None or config.user is None:
            raise SettingsError(f"the kubeconfig ({kubeconfig}) names no cluster, or no user")
        client = AsyncClient(config, ConnectionParams(timeout=httpx2.Timeout(TIMEOUT_S)))
    except SettingsError:
        raise
    except Exception as error:  # a file that others wrote can be wrong in every way there is
        raise SettingsError(
            f"cannot use the kubeconfig ({kubeconfig}): {error or type(error).__name__}",
            hint="in a cluster: mount the ServiceAccount's token; outside: set RFORK_K8S_KUBECONFIG",
        ) from error
    client.headers["User-Agent"] = f"rfork/{__version__}"
    return ApiServer(client)


def _unavailable(operation: str, error: Exception) -> ClusterUnavailable:
    return ClusterUnavailable(f"{operation}: {type(error).__name__}: {error}".rstrip(": "))


def _to_error(operation: str, code: int, content: bytes) -> Exception:
    """The error for an answer that is one: a Status of Kubernetes, or what a proxy on the way says."""
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
    """Whether a patch was refused because the object has another UID than it named."""
    # The first since 1.21 or so, the second until then.
    return "UID in precondition" in str(status.get("message")) or any(
        cause.get("field") == "metadata.uid" for cause in _causes(status)
    )


def _causes(status: Document) -> list[Document]:
    """What a Status gives as causes, if it is one: a proxy on the way may answer anything."""
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    return [cause for cause in causes if isinstance(cause, dict)] if isinstance(causes, list) else []


def _document(operation: str, content: bytes) -> Document:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ClusterUnavailable(f"{operation}: the answer is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ClusterUnavailable(f"{operation}: the answer is no object")
    return document
