"""Read-only store on any web server that supports range requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from rfork.errors import SettingsError
from rfork.net.request import HttpRequest
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob, BlobEntry, BlobWriter
from rfork.storage.http.blob import RangedBlob
from rfork.storage.http.session import HttpSession
from rfork.storage.location import Location


class HttpStore:
    """A `BlobStore` on ``http://`` or ``https://``; all its blobs share one session."""

    def __init__(self, folder: Location, settings: StorageSettings) -> None:
        self._folder = folder.folder
        self._session = HttpSession(settings)

    @property
    def uri(self) -> str:
        """See `BlobStore`."""
        return self._folder.uri

    def open(self, name: str, *, front: int = 0) -> Blob:
        """See `BlobStore`. A `name` may include the ``?query`` of a presigned URL, which no error shows.

        Percent-encoding in a name (``%2F``) is sent unchanged.
        """
        path, mark, query = name.partition("?")
        uri = self._folder.child(path).uri
        token = self._session.settings.http_token
        headers = {"Authorization": f"Bearer {token.get_secret_value()}"} if token is not None else {}
        request = HttpRequest(f"{uri}{mark}{query}", headers)
        return RangedBlob.open(uri, lambda: request, self._session, front=front)

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        """Raise SettingsError: a web server cannot be listed."""
        raise SettingsError(
            f"{self.uri} cannot be listed: it is a web server", hint="pass the file, or use s3:// or a path"
        )

    def write(self, name: str, *, replace: bool = True) -> AbstractContextManager[BlobWriter]:
        """Raise SettingsError: a web server is read-only."""
        raise self._read_only_error()

    def remove(self, name: str) -> None:
        """Raise SettingsError: a web server is read-only."""
        raise self._read_only_error()

    def close(self) -> None:
        """See `BlobStore`."""
        self._session.pool.unregister()

    def _read_only_error(self) -> SettingsError:
        return SettingsError(f"{self.uri} is read-only: it is a web server", hint="write to s3:// or a path")
