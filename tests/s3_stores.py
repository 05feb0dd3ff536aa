"""Stores of the S3 server that all tests of a run share, and operations on them."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from benchmarks import seaweed
from benchmarks.seaweed import SeaweedServer
from rfork.errors import RforkError
from rfork.storage.blob import BlobStore, read_range
from rfork.storage.location import Location
from rfork.storage.registry import open_store

MIB = 1 << 20
SEVERAL_PARTS = 9 * MIB
"""Size in bytes of a blob that is uploaded in two parts."""

OpenStore = Callable[..., BlobStore]
StoreOperation = Callable[[BlobStore], None]


@pytest.fixture
def s3_store(s3: SeaweedServer) -> Iterator[OpenStore]:
    """Open stores: ``open_(uri, **settings)``, in the test's own folder by default."""
    pytest.importorskip("botocore", reason="NO boto3: S3 IS NOT TESTED")
    folder = f"tests/{uuid.uuid4().hex}/"
    stores: list[BlobStore] = []

    def open_(uri: str = f"s3://models/{folder}", **changes: bool | float | str) -> BlobStore:
        store = open_store(Location.parse(uri), s3.settings(**{"max_attempts": 3} | changes))
        stores.append(store)
        return store

    yield open_
    for store in stores:
        store.close()


def put(store: BlobStore, name: str, data: bytes, *, replace: bool = True) -> None:
    """Write a blob."""
    with store.write(name, replace=replace) as writer:
        writer.write([memoryview(data)])


def get(store: BlobStore, name: str) -> bytes:
    """Read a complete blob."""
    with closing(store.open(name)) as blob:
        return read_range(blob, 0, blob.size)


def random_bytes(size: int) -> bytes:
    """Return the same random bytes for the same size."""
    return random.Random(size).randbytes(size)


def pending_uploads(server: SeaweedServer) -> list[str]:
    """Return keys of multipart uploads that are neither completed nor aborted."""
    from botocore.session import Session

    client = Session().create_client("s3", region_name=seaweed.REGION, endpoint_url=server.endpoint)
    found = client.list_multipart_uploads(Bucket="models").get("Uploads", ())
    client.close()
    return [upload["Key"] for upload in found]


def storage_error_of(use: Callable[[], None]) -> tuple[type[RforkError], str]:
    """Return the type of the error that `use` raises, and its message without the name."""
    with pytest.raises(RforkError) as caught:
        use()
    return type(caught.value), str(caught.value).partition(": ")[2]


def open_named_blob(store: BlobStore) -> None:
    """Open a blob."""
    store.open("blob").close()


def list_blobs(store: BlobStore) -> None:
    """List all blobs."""
    list(store.list())


def put_blob(store: BlobStore) -> None:
    """Write a small blob."""
    put(store, "blob", b"abc")


def upload_blob(store: BlobStore) -> None:
    """Write a blob in parts."""
    put(store, "blob", bytes(SEVERAL_PARTS))


def remove_blob(store: BlobStore) -> None:
    """Remove a blob."""
    store.remove("blob")


each_operation = pytest.mark.parametrize("use", [open_named_blob, list_blobs, put_blob, upload_blob, remove_blob])
