"""Uploads to an object store, against a bucket in memory."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("botocore", reason="NO boto3: S3 IS NOT TESTED")

from rfork.errors import (
    RforkError,
    StorageAccessDenied,
    StorageCorrupt,
    StorageError,
    StorageFull,
    StorageNotFound,
)
from rfork.settings import StorageSettings
from rfork.storage.s3.bucket import ObjectHead, Part, PartBody, S3Bucket
from rfork.storage.s3.errors import ConcurrentWriteConflict, ConditionFailed, Unsupported
from rfork.storage.s3.upload import (
    MAX_PARTS,
    MIN_PART_BYTES,
    buffers,
    multipart_etag,
    open_upload,
    part_size,
)

MIB = 1 << 20
SETTINGS = StorageSettings(concurrency=2, staging_bytes=32 * MIB, max_attempts=3, timeout_s=1e-9)


class FakeBucket(S3Bucket):
    """Bucket with objects, parts and recorded calls; `fail` maps a call's name to errors, one for each call."""

    def __init__(self, *, gate: Callable[[int], None] = lambda number: None) -> None:
        self.stored: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.calls: list[str] = []
        self.fail: dict[str, list[RforkError | None]] = {}
        self.lose_response = False
        self._gate = gate
        self._lock = threading.Lock()

    def put(self, key: str, body: PartBody, *, only_new: bool) -> None:
        self._record_call("put new" if only_new else "put", key, only_new)
        self.stored[key] = body.read()

    def begin(self, key: str) -> str:
        self._record_call("begin", key)
        self.uploads["id"] = {}
        return "id"

    def put_part(self, key: str, upload: str, number: int, body: PartBody) -> Part:
        self._gate(number)
        data = body.read()
        with self._lock:
            self._record_call(f"part {number}", key)
            self.uploads[upload][number] = data
        return Part(number, f'"{_md5(data)}"', {})

    def complete(self, key: str, upload: str, parts: Sequence[Part], *, only_new: bool) -> str:
        self._record_call("complete new" if only_new else "complete", key, only_new)
        stored_parts = self.uploads.pop(upload)
        self.stored[key] = b"".join(stored_parts[part.number] for part in parts)
        if self.lose_response:
            raise StorageError("no response")
        return self._head(key).etag

    def abort(self, key: str, upload: str) -> None:
        self._record_call("abort", key)
        self.uploads.pop(upload, None)

    def head(self, key: str) -> ObjectHead | None:
        self._record_call("head", key)
        return self._head(key) if key in self.stored else None

    def _head(self, key: str) -> ObjectHead:
        data = self.stored[key]
        parts = [data[at : at + MIN_PART_BYTES] for at in range(0, len(data), MIN_PART_BYTES)]
        tag = multipart_etag([Part(number, _md5(part), {}) for number, part in enumerate(parts, start=1)])
        return ObjectHead(len(data), tag or "")

    def _record_call(self, call: str, key: str, only_new: bool = False) -> None:
        self.calls.append(call)
        errors = self.fail.get(call, [])
        if errors and (error := errors.pop(0)) is not None:
            raise error
        if only_new and key in self.stored:
            raise ConditionFailed("the object exists")


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _write(bucket: FakeBucket, *pieces: bytes, replace: bool = True) -> None:
    with open_upload(bucket, "key", "s3://bucket/key", SETTINGS, replace=replace) as writer:
        for piece in pieces:
            writer.write([memoryview(piece)])


@pytest.mark.parametrize(
    ("number", "size"),
    [
        (1, 8 * MIB),
        (1000, 8 * MIB),
        (1001, 16 * MIB),
        (3000, 32 * MIB),
        (3001, 64 * MIB),
        (10_000, 4096 * MIB),
    ],
)
def test_parts_grow_with_their_number(number: int, size: int) -> None:
    """The first parts are small, and their size doubles after each thousand."""
    assert size == part_size(number)


def test_the_maximum_object_size_fits() -> None:
    """The maximum number of parts is enough for an object of 5 TiB."""
    assert 5 << 40 < sum(part_size(number) for number in range(1, MAX_PARTS + 1))


@pytest.mark.parametrize(
    ("streams", "memory", "size", "expected"),
    [
        (8, 128 * MIB, 8 * MIB, 9),  # each stream sends one part while another is filled
        (8, 32 * MIB, 8 * MIB, 4),
        (1, 128 * MIB, 8 * MIB, 2),
        (8, 16 * MIB, 8 * MIB, 2),
        (8, 16 * MIB, 64 * MIB, 1),  # a part is sent from memory, whatever its size
    ],
)
def test_memory_bounds_the_parts_in_flight(streams: int, memory: int, size: int, expected: int) -> None:
    """As many parts are in memory as fit, at most one more than there are streams."""
    assert expected == buffers(size, StorageSettings(concurrency=streams, staging_bytes=memory))


@pytest.mark.parametrize(
    ("size", "calls"),
    [
        (0, ["put"]),
        (1, ["put"]),
        (8 * MIB, ["put"]),
        (8 * MIB + 1, ["begin", "part 1", "part 2", "complete", "head"]),
    ],
)
def test_small_blobs_are_one_request(size: int, calls: list[str]) -> None:
    """Blobs that fit into one part are one request; larger ones are uploaded in parts, and their size is
    checked.
    """
    bucket, data = FakeBucket(), b"abc" * (size // 3) + b"abc"[: size % 3]
    _write(bucket, data)
    assert data == bucket.stored["key"]
    assert sorted(calls) == sorted(bucket.calls)


def test_bytes_may_change_after_the_write() -> None:
    """Changes of the memory after `write` do not change the object."""
    bucket, memory = FakeBucket(), bytearray(5 * MIB)
    with open_upload(bucket, "key", "s3://bucket/key", SETTINGS, replace=True) as writer:
        for value in range(5):
            memory[:] = bytes([value]) * len(memory)
            writer.write([memoryview(memory)[:MIB], memoryview(memory)[MIB:]])
    assert b"".join(bytes([value]) * 5 * MIB for value in range(5)) == bucket.stored["key"]


def test_parts_are_in_order_of_their_numbers() -> None:
    """The object has its parts in order, although a later one was uploaded first."""
    second_started = threading.Event()

    def gate(number: int) -> None:
        second_started.wait() if number == 1 else second_started.set()

    bucket = FakeBucket(gate=gate)
    _write(bucket, b"a" * MIN_PART_BYTES, b"b" * MIN_PART_BYTES, b"c")
    assert b"a" * MIN_PART_BYTES + b"b" * MIN_PART_BYTES + b"c" == bucket.stored["key"]


def test_a_writer_waits_for_memory() -> None:
    """No more parts are started than fit into memory until one is finished."""
    released, begun = threading.Semaphore(0), threading.Semaphore(0)
    running: set[int] = set()
    in_flight_counts: list[int] = []

    def gate(number: int) -> None:
        running.add(number)
        in_flight_counts.append(len(running))
        begun.release()
        released.acquire()
        running.discard(number)

    bucket, settings = FakeBucket(gate=gate), StorageSettings(concurrency=8, staging_bytes=16 * MIB)

    def write() -> None:
        with open_upload(bucket, "key", "s3://bucket/key", settings, replace=True) as writer:
            writer.write([memoryview(bytes(MIN_PART_BYTES * 6))])

    thread = threading.Thread(target=write)
    thread.start()
    begun.acquire()
    for _ in range(5):
        begun.acquire()
        released.release()
    released.release()
    thread.join()
    assert 2 == max(in_flight_counts)
    assert 6 * MIN_PART_BYTES == len(bucket.stored["key"])


def test_a_failed_part_ends_the_upload() -> None:
    """Its error is raised, and neither an object nor a part remains."""
    bucket = FakeBucket()
    bucket.fail = {"part 2": [StorageFull("no space left")]}
    with pytest.raises(StorageFull, match="no space left"):
        _write(bucket, *[b"a" * MIN_PART_BYTES] * 6)
    assert {} == bucket.stored
    assert {} == bucket.uploads
    assert "abort" == bucket.calls[-1]


def test_leaving_with_an_exception_leaves_nothing() -> None:
    """An exception in the block ends the upload, after the running parts have ended."""
    begun, released = threading.Event(), threading.Event()

    def gate(number: int) -> None:
        begun.set()
        released.wait()

    bucket = FakeBucket(gate=gate)

    def interrupted() -> None:
        with open_upload(bucket, "key", "s3://bucket/key", SETTINGS, replace=True) as writer:
            writer.write([memoryview(bytes(MIN_PART_BYTES + 1))])
            begun.wait()
            threading.Timer(0, released.set).start()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        interrupted()
    assert {} == bucket.stored
    assert {} == bucket.uploads
    assert ["begin", "part 1", "abort"] == bucket.calls


def test_a_failed_abort_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """If parts cannot be removed, it is logged, and the first error is raised."""
    bucket = FakeBucket()
    bucket.fail = {"part 1": [StorageAccessDenied("first")], "abort": [StorageError("second")]}
    with caplog.at_level(logging.WARNING), pytest.raises(StorageAccessDenied, match="first"):
        _write(bucket, b"a" * MIN_PART_BYTES, b"b")
    assert ["failed to remove the parts of an upload"] == [
        record.getMessage().split(" object=")[0] for record in caplog.records
    ]


def test_an_aborted_body_is_not_sent_again() -> None:
    """Rewinding the body for another attempt fails once the upload is aborted."""
    body = PartBody(memoryview(b"abc"))
    assert 0 == body.seek(0)
    assert b"abc" == body.read()
    body.cancel()
    with pytest.raises(OSError, match="cancelled"):
        body.seek(0)


@pytest.mark.parametrize("size", [3, MIN_PART_BYTES + 3])
@pytest.mark.parametrize(
    ("errors", "there", "kept"),
    [
        ([], False, b"new"),
        ([], True, b"old"),
        ([ConcurrentWriteConflict("now")], False, b"new"),
        ([ConcurrentWriteConflict("now"), ConditionFailed("there")], False, None),
        ([Unsupported("If-None-Match")], False, b"new"),
        ([Unsupported("If-None-Match")], True, b"old"),
    ],
)
def test_an_existing_object_stays_without_replace(
    size: int, errors: list[RforkError], there: bool, kept: bytes | None
) -> None:
    """Without `replace` an existing object stays, whichever conditions the service supports."""
    bucket = FakeBucket()
    if there:
        bucket.stored["key"] = b"old"
    bucket.fail = {"put new": [*errors], "complete new": [*errors]}
    _write(bucket, b"new".ljust(size), replace=False)
    assert kept == (bucket.stored.get("key", b"").strip() or None)
    assert {} == bucket.uploads


def test_a_writer_that_always_conflicts_gives_up() -> None:
    """A writer that always conflicts gives up after a number of attempts and leaves nothing."""
    bucket = FakeBucket()
    bucket.fail = {"put new": [ConcurrentWriteConflict("now")] * 9}
    with pytest.raises(StorageError, match="another writer is writing it"):
        _write(bucket, b"new", replace=False)
    assert [*["put new"] * SETTINGS.max_attempts, "head"] == bucket.calls


@pytest.mark.parametrize("size", [3, MIN_PART_BYTES + 3])
def test_the_other_writer_succeeds(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each conflict there is a pause; once the other writer's object exists, the upload is done."""
    bucket, pauses = FakeBucket(), list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            bucket.stored["key"] = b"theirs"

    monkeypatch.setattr(time, "sleep", pause)
    bucket.fail = {call: [ConcurrentWriteConflict("now")] * 9 for call in ("put new", "complete new")}
    _write(bucket, bytes(size), replace=False)
    assert b"theirs" == bucket.stored["key"]
    assert {} == bucket.uploads
    assert 0.05 <= pauses[0] <= pauses[1] <= 0.2


def test_a_conflict_that_ended_the_upload_fails_unless_the_other_object_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the service no longer knows the upload after a conflict, the other object exists or the upload
    fails.
    """
    bucket = FakeBucket()
    missing_upload = StorageNotFound("no such upload")
    bucket.fail = {
        "complete new": [
            ConcurrentWriteConflict("now"),
            missing_upload,
            ConcurrentWriteConflict("now"),
            missing_upload,
        ]
    }
    with pytest.raises(StorageNotFound, match="no such upload"):
        _write(bucket, bytes(MIN_PART_BYTES + 3), replace=False)
    theirs = {"key": b"theirs"}
    monkeypatch.setattr(time, "sleep", lambda _: bucket.stored.update(theirs))
    _write(bucket, bytes(MIN_PART_BYTES + 3), replace=False)
    assert theirs == bucket.stored
    assert {} == bucket.uploads


def test_an_object_counts_as_created_even_if_the_response_was_lost() -> None:
    """An object that was created counts as created, even if the response was lost."""
    bucket = FakeBucket()
    bucket.lose_response = True
    _write(bucket, b"a" * MIN_PART_BYTES, b"b")
    assert b"a" * MIN_PART_BYTES + b"b" == bucket.stored["key"]


def test_a_missing_response_without_an_object_is_a_failure() -> None:
    """If the object is missing or differs, the failure of the completion is raised."""
    bucket = FakeBucket()
    bucket.stored["key"] = b"a" * MIN_PART_BYTES + b"c"
    bucket.fail = {"complete": [StorageError("the service did not respond")]}
    with pytest.raises(StorageError, match="did not respond"):
        _write(bucket, b"a" * MIN_PART_BYTES, b"b")
    assert {} == bucket.uploads


def test_an_object_of_another_size_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another size than was written is detected, unless a later writer has replaced the object."""
    bucket = FakeBucket()
    monkeypatch.setattr(bucket, "complete", lambda *args, only_new: '"tag"')
    monkeypatch.setattr(bucket, "head", lambda key: ObjectHead(7, '"tag"'))
    with pytest.raises(StorageCorrupt, match=f"has 7 bytes, but {MIN_PART_BYTES + 1} were written"):
        _write(bucket, b"a" * MIN_PART_BYTES, b"b")
    monkeypatch.setattr(bucket, "head", lambda key: ObjectHead(7, '"another"'))
    _write(bucket, b"a" * MIN_PART_BYTES, b"b")


def test_write_permission_is_sufficient() -> None:
    """An object is written even if its size cannot be checked."""
    bucket = FakeBucket()
    bucket.fail = {"head": [StorageAccessDenied("no permission to read")]}
    _write(bucket, b"a" * MIN_PART_BYTES, b"b")
    assert MIN_PART_BYTES + 1 == len(bucket.stored["key"])


def test_the_entity_tag_of_an_object_in_parts_is_computed_from_the_parts() -> None:
    """It is the MD5 of the parts' MD5s and their number; None if the parts have other tags."""
    tag = '"043a916d6cfeecedf5e04f0312ba762d-2"'
    parts = [Part(1, '"900150983cd24fb0d6963f7d28e17f72"', {}), Part(2, _md5(b"abc"), {})]
    assert tag == multipart_etag(parts)
    assert multipart_etag([*parts, Part(3, '"opaque"', {})]) is None
