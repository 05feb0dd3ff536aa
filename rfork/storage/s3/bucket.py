"""One S3 bucket through botocore: credentials, endpoints, signatures and retries, with rfork's errors.

Runs wherever weights are read or written. botocore finds credentials like AWS's own tools: environment,
profiles, web identity (IRSA), container and instance metadata.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

import botocore
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader, create_loader
from botocore.session import Session

import rfork
from rfork.errors import StorageError
from rfork.settings import StorageSettings
from rfork.storage.s3.errors import MISSING_CODES, error_code, to_storage_error
from rfork.storage.s3.url_signer import DEFAULT_REGION, URL_TTL_S, UrlSigner

_AWS_HOST = re.compile(r"\.amazonaws\.com(\.cn)?$")


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """Metadata of an object."""

    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Part:
    """An uploaded part; `checksums` are sent back to complete the upload."""

    number: int
    etag: str
    checksums: Mapping[str, str]


class PartBody(io.RawIOBase):
    """Seekable request body for botocore, which restarts it for each attempt until it is cancelled."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0
        self._cancelled = threading.Event()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # botocore passes a memoryview
        """See `io.RawIOBase`."""
        count = min(len(buffer), len(self._data) - self._at)
        buffer[:count] = self._data[self._at : self._at + count]
        self._at += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.IOBase`. Raises OSError after `cancel`, so that no further attempt is made."""
        if self._cancelled.is_set():
            raise OSError("the upload was cancelled")
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = start + offset
        return self._at

    def cancel(self) -> None:
        """Prevent further attempts. Safe from any thread."""
        self._cancelled.set()


class S3Bucket:
    """Requests to one bucket. Thread-safe; raise StorageError subclasses, or SettingsError.

    AWS's configuration is read on first use. botocore's client is created on first use too: URLs rarely need it.

    With `only_new`, an existing object is kept: raises ConditionFailed, ConcurrentWriteConflict if another writer is
    creating it, or Unsupported if the service does not support the condition.
    """

    def __init__(self, name: str, settings: StorageSettings) -> None:
        self.name = name
        self._settings = settings
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    def put(self, key: str, body: PartBody, *, only_new: bool) -> None:
        """Write a complete object."""
        condition = {"IfNoneMatch": "*"} if only_new else {}
        with self._storage_errors(key):
            self._client.put_object(Bucket=self.name, Key=key, Body=body, **condition)

    def begin(self, key: str) -> str:
        """Start a multipart upload and return its id."""
        with self._storage_errors(key):
            response = self._client.create_multipart_upload(Bucket=self.name, Key=key)
        return _required_field(response, "UploadId", key)

    def put_part(self, key: str, upload: str, number: int, body: PartBody) -> Part:
        """Upload one part; numbers start at 1."""
        with self._storage_errors(key):
            response = self._client.upload_part(
                Bucket=self.name, Key=key, UploadId=upload, PartNumber=number, Body=body
            )
        checksums = {
            name: str(value)
            for name, value in response.items()
            if name.startswith("Checksum") and name != "ChecksumType"
        }
        return Part(number, _required_field(response, "ETag", key), checksums)

    def complete(self, key: str, upload: str, parts: Sequence[Part], *, only_new: bool) -> str:
        """Create an object from the parts and return its entity tag."""
        part_list: list[dict[str, str | int]] = [
            {"PartNumber": part.number, "ETag": part.etag, **part.checksums} for part in parts
        ]
        condition = {"IfNoneMatch": "*"} if only_new else {}
        with self._storage_errors(key):
            response = self._client.complete_multipart_upload(
                Bucket=self.name, Key=key, UploadId=upload, MultipartUpload={"Parts": part_list}, **condition
            )
        return _required_field(response, "ETag", key)

    def abort(self, key: str, upload: str) -> None:
        """Remove an upload and its parts; does nothing if there is none."""
        with self._storage_errors(key):
            try:
                self._client.abort_multipart_upload(Bucket=self.name, Key=key, UploadId=upload)
            except ClientError as error:
                if error_code(error) != "NoSuchUpload":
                    raise

    def head(self, key: str) -> ObjectHead | None:
        """Return the object's metadata; None if it does not exist."""
        with self._storage_errors(key):
            try:
                response = self._client.head_object(Bucket=self.name, Key=key)
            except ClientError as error:
                if error_code(error) in MISSING_CODES:
                    return None
                raise
        return ObjectHead(int(response["ContentLength"]), str(response["ETag"]))

    def delete(self, key: str) -> None:
        """Remove an object; does nothing if it does not exist."""
        with self._storage_errors(key):
            try:
                self._client.delete_object(Bucket=self.name, Key=key)
            except ClientError as error:
                if error_code(error) != "NoSuchKey":
                    raise

    def objects(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Iterate over key and size of every object whose key begins with `prefix`, in the service's order."""
        with self._storage_errors(prefix):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix):
                for entry in page.get("Contents", ()):
                    yield entry["Key"], int(entry["Size"])

    def url(self, key: str) -> str:
        """Return a URL that allows anyone to read the object for `URL_TTL_S` seconds: a secret."""
        with self._storage_errors(key):
            connection = self._connected()
            if connection.signer is not None:
                return connection.signer.url(key)
            return connection.client().generate_presigned_url(
                "get_object", Params={"Bucket": self.name, "Key": key}, ExpiresIn=URL_TTL_S
            )

    def find_region(self) -> None:
        """Use the region that the service reports for the bucket from now on, if it reports one."""
        with self._storage_errors(""):
            try:
                response = self._client.head_bucket(Bucket=self.name)
            except ClientError as error:
                response = error.response  # errors report the region too
            region = response["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
            if region:
                connection = _Connection(self.name, self._settings.model_copy(update={"s3_region": region}))
                with self._lock:
                    # The previous client may be in use: it is closed when it is garbage collected.
                    self._connection = connection

    @property
    def ca_file(self) -> Path | None:
        """File of the authorities that the service is verified with, if it is not the default."""
        with self._storage_errors(""):
            return self._connected().ca_file

    def close(self) -> None:
        """Close connections; they reopen on use."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    @contextmanager
    def _storage_errors(self, key: str) -> Iterator[None]:
        uri = f"s3://{self.name}/{key}"
        try:
            yield
        except (ClientError, BotoCoreError, ValueError) as error:
            # Without the cause: botocore's message may contain a complete URL.
            raise to_storage_error(uri, error) from None

    @property
    def _client(self) -> _Client:
        return self._connected().client()

    def _connected(self) -> _Connection:
        with self._lock:
            if self._connection is None:
                self._connection = _Connection(self.name, self._settings)
            return self._connection


class _Connection:
    """Signer and client of a bucket, configured by the settings, then by AWS's environment and files.

    The client is created on first use. Thread-safe; raises botocore's errors.
    """

    def __init__(self, bucket: str, settings: StorageSettings) -> None:
        self._settings = settings
        self._session = Session()
        data_path = self._session.get_config_variable("data_path")
        self._session.register_component("data_loader", _service_models(data_path))
        self._region: str = settings.s3_region or self._session.get_config_variable("region") or DEFAULT_REGION
        self._lock = threading.Lock()
        self._client: _Client | None = None
        ca_file = self._session.get_config_variable("ca_bundle") or settings.ca
        self.ca_file = Path(ca_file) if ca_file else None
        self.signer = UrlSigner.for_bucket(bucket, self._region, settings, self._session)

    def client(self) -> _Client:
        """Return the client."""
        with self._lock:
            if self._client is None:
                client = self._create_client(self._settings.s3_addressing)
                addressing_style = (client.meta.config.s3 or {}).get("addressing_style", "auto")
                if addressing_style == "auto" and _AWS_HOST.search(urlsplit(client.meta.endpoint_url).hostname or ""):
                    # Otherwise URLs use the global endpoint, which redirects for days after a bucket was created.
                    client = self._create_client("virtual")
                self._client = client
            return self._client

    def close(self) -> None:
        """Close the client's connections; they reopen on use."""
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _create_client(self, addressing_style: str) -> _Client:
        settings = self._settings
        client = self._session.create_client(
            "s3",
            region_name=self._region,
            endpoint_url=settings.s3_endpoint,
            verify=str(self.ca_file) if self.ca_file else None,
            config=Config(
                # botocore's default version for presigned URLs is rejected by newer regions.
                signature_version=botocore.UNSIGNED if settings.s3_anonymous else "s3v4",
                connect_timeout=settings.timeout_s,
                read_timeout=settings.timeout_s,
                retries={"mode": "standard", "total_max_attempts": settings.max_attempts},
                # Concurrent uploads of several blobs share this client.
                max_pool_connections=max(32, 2 * settings.concurrency),
                user_agent_extra=f"rfork/{rfork.__version__}",
                s3={} if addressing_style == "auto" else {"addressing_style": addressing_style},
            ),
        )
        return cast(_Client, client)


def _required_field(response: Mapping[str, str], name: str, key: str) -> str:
    """Return a field of a response. Raises StorageError without it: botocore treats a connection that closes before
    any body as a response without fields.
    """
    if name not in response:
        raise StorageError(f"{key}: the service's response was incomplete")
    return str(response[name])


@cache
def _service_models(data_path: str | None) -> Loader:
    """Return botocore's service models, parsed once for all clients because that takes 0.1 to 0.3 s."""
    return create_loader(data_path)


class _Client(Protocol):
    """The part of botocore's client that is used; botocore generates these methods at run time."""

    @property
    def meta(self) -> _Meta: ...
    def put_object(self, **parameters: str | PartBody) -> Mapping[str, str]: ...
    def create_multipart_upload(self, **parameters: str) -> Mapping[str, str]: ...
    def upload_part(self, **parameters: str | int | PartBody) -> Mapping[str, str]: ...
    def complete_multipart_upload(
        self, *, MultipartUpload: Mapping[str, Sequence[Mapping[str, str | int]]], **parameters: str
    ) -> Mapping[str, str]: ...
    def abort_multipart_upload(self, **parameters: str) -> None: ...
    def head_object(self, **parameters: str) -> Mapping[str, str | int]: ...
    def head_bucket(self, **parameters: str) -> Mapping[str, Mapping[str, Mapping[str, str]]]: ...
    def delete_object(self, **parameters: str) -> None: ...
    def get_paginator(self, operation: str) -> _Paginator: ...
    def generate_presigned_url(self, method: str, *, Params: Mapping[str, str], ExpiresIn: int) -> str: ...
    def close(self) -> None: ...


class _Meta(Protocol):
    @property
    def endpoint_url(self) -> str: ...
    @property
    def config(self) -> _Config: ...


class _Config(Protocol):
    @property
    def s3(self) -> Mapping[str, str] | None: ...


class _Paginator(Protocol):
    def paginate(self, **parameters: str) -> Iterator[Mapping[str, Sequence[Mapping[str, str]]]]: ...
