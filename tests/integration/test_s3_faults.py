"""S3 through a proxy that breaks connections, stalls and refuses, in front of a real SeaweedFS."""

from __future__ import annotations

from contextlib import closing

import pytest

from benchmarks.seaweed import SeaweedServer
from rfork.errors import StorageError
from rfork.storage.blob import read_range
from tests.fault_proxy import FaultProxy
from tests.s3_stores import (
    MIB,
    SEVERAL_PARTS,
    OpenStore,
    get,
    pending_uploads,
    put,
    random_bytes,
    storage_error_of,
)
from tests.storage_faults import ErrorStatus, Fault, ResetFault, StallFault, TruncateFault


@pytest.mark.parametrize(
    "faults",
    [
        [ResetFault(after=1000), ResetFault(after=None)],
        [TruncateFault(after=100_000), TruncateFault(after=0)],
        [ErrorStatus(503, text=b"<Error><Code>SlowDown</Code></Error>"), ErrorStatus(500)],
        [StallFault(after=5000)],
        pytest.param([StallFault(after=None)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_reads_are_retried(s3: SeaweedServer, s3_store: OpenStore, faults: list[Fault]) -> None:
    """A read whose connection breaks, stalls or is throttled returns the right bytes."""
    data = random_bytes(3 * MIB)
    put(s3_store(), "blob", data)
    timeout_s = 4.0 if isinstance(faults[0], StallFault) else 10.0
    with (
        FaultProxy(s3.port) as proxy,
        closing(s3_store(s3_endpoint=proxy.url, timeout_s=timeout_s, hedge_ratio=0).open("blob")) as blob,
    ):
        proxy.script.then(*faults, path="GET ")
        assert data == read_range(blob, 0, len(data))
        assert len(faults) + 2 == len(proxy.requests_matching("GET "))


@pytest.mark.parametrize(
    "faults",
    [
        [ResetFault(after=None)],
        [TruncateFault(after=None)],
        [ErrorStatus(503, text=b"<Error><Code>SlowDown</Code></Error>")],
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1000, SEVERAL_PARTS])
def test_writes_are_retried(s3: SeaweedServer, s3_store: OpenStore, faults: list[Fault], size: int) -> None:
    """A part, or a complete blob, that was not accepted is sent again."""
    data = random_bytes(size)
    with FaultProxy(s3.port) as proxy:
        proxy.script.then(*faults, path="PUT ")
        put(s3_store(s3_endpoint=proxy.url), "blob", data)
        assert (1 if size < MIB else 2) + len(faults) == len(proxy.requests_matching("PUT "))
    assert data == get(s3_store(), "blob")


@pytest.mark.slow  # logic: tests/unit/storage/http/test_retries_and_timeouts.py
def test_a_stalled_write_is_retried(s3: SeaweedServer, s3_store: OpenStore) -> None:
    """A blob that the service received but did not acknowledge is sent again."""
    with FaultProxy(s3.port) as proxy:
        proxy.script.then(StallFault(after=None), path="PUT ")
        put(s3_store(s3_endpoint=proxy.url, timeout_s=4.0), "blob", b"abc")
        assert 2 == len(proxy.requests_matching("PUT "))
    assert b"abc" == get(s3_store(), "blob")


@pytest.mark.slow  # logic: tests/unit/storage/http/test_retries_and_timeouts.py
def test_a_lost_response_is_tolerated(s3: SeaweedServer, s3_store: OpenStore) -> None:
    """A completed upload counts as complete, even though its responses never arrived."""
    data = random_bytes(SEVERAL_PARTS)
    with FaultProxy(s3.port) as proxy:
        # The first POST starts the upload.
        proxy.script.then(None, TruncateFault(after=0), TruncateFault(after=0), TruncateFault(after=0), path="POST ")
        put(s3_store(s3_endpoint=proxy.url), "blob", data)
    assert data == get(s3_store(), "blob")
    assert [] == pending_uploads(s3)


def test_a_service_that_rejects_every_part(s3: SeaweedServer, s3_store: OpenStore) -> None:
    """Parts that are rejected permanently abort the upload, and none remain."""
    with FaultProxy(s3.port) as proxy:
        proxy.script.then(None, path="PUT ")
        proxy.script.always(ErrorStatus(500, text=b"<Error><Code>InternalError</Code></Error>"), path="PUT ")
        store = s3_store(s3_endpoint=proxy.url)
        assert (StorageError, "the service refused the request: InternalError") == storage_error_of(
            lambda: put(store, "blob", bytes(20 * MIB))
        )
    assert [] == list(s3_store().list())
    assert [] == pending_uploads(s3)
