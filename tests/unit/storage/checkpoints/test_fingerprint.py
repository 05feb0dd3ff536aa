"""Origins of checkpoints elsewhere: few small reads, and what the server says of its objects."""

from __future__ import annotations

from contextlib import closing

import torch
from safetensors.torch import save

from rfork.settings import StorageSettings
from rfork.storage.checkpoints.fingerprint import MAX_REMOTE_READS, SAMPLE_BYTES, checkpoint_fingerprint
from rfork.storage.formats.safetensors_file import read_shard
from rfork.storage.formats.safetensors_source import SafetensorsSource
from tests.unit.storage.recording_store import RecordingBlob

TENSORS = {f"layers.{number}.weight": torch.full((200, 300), float(number)) for number in range(100)}
DATA = save(TENSORS)


def blob(uri: str, version: str | None = None, data: bytes = DATA) -> RecordingBlob:
    made = RecordingBlob(uri, data)
    made.version = version
    return made


def fingerprint(stored_blob: RecordingBlob, computed: bytes = b"", index: bytes = b"") -> str:
    source = SafetensorsSource(stored_blob.uri, [read_shard("x", stored_blob)], StorageSettings(), index=index)
    stored_blob.read_ranges.clear()
    with closing(source):
        return checkpoint_fingerprint(source, [(0, memoryview(computed))])


def test_a_remote_checkpoint_costs_few_small_reads() -> None:
    """However many tensors it has, each instance sends few requests, and takes few bytes."""
    stored_blob = blob("s3://bucket/x.safetensors", "etag")
    fingerprint(stored_blob)
    lengths = [end - begin for begin, end in stored_blob.read_ranges]
    assert (MAX_REMOTE_READS, {SAMPLE_BYTES}) == (len(lengths), set(lengths))


def test_instances_that_read_one_object_agree() -> None:
    """Bytes, version and what is computed are all that counts."""
    here, there = (fingerprint(blob("s3://bucket/x.safetensors", "etag")) for _ in range(2))
    assert here == there


def test_an_object_that_was_replaced_has_another_origin() -> None:
    """The version tells, even where no sample lies in what changed."""
    remote = "https://models/x.safetensors"
    assert 4 == len({
        fingerprint(blob(remote, "one")),
        fingerprint(blob(remote, "two")),
        fingerprint(blob(remote, "one"), computed=b"x"),
        fingerprint(blob(remote, "one"), index=b"{}"),
    })  # fmt: skip


def test_copies_on_two_machines_agree() -> None:
    """A file's own version is made of when it came, and counts for nothing."""
    one, two = blob("file:///a/x.safetensors", "1-2-3"), blob("file:///b/x.safetensors", "4-5-6")
    assert fingerprint(one) == fingerprint(two)
    assert len(one.read_ranges) > MAX_REMOTE_READS
