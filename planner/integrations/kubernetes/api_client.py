"""HTTP client for a Kubernetes API server.

lightkube finds the server and its credentials: a Pod's token, reread after each renewal, a kubeconfig's
certificate, or an exec plug-in. The calls themselves are plain HTTP with JSON documents, because lightkube's
own calls neither request bookmarks nor set the version of a list. Without those, each list of a large cluster
would read all of its Pods from etcd.
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
