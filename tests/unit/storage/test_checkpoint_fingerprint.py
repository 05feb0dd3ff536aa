"""Origins of remote checkpoints: few small reads, and the versions that the server reports."""

from __future__ import annotations

from contextlib import closing

import torch
from safetensors.torch import save

from rfork.settings import StorageSettings
from rfork.storage.checkpoint import MAX_REMOTE_READS, SAMPLE_BYTES, checkpoint_fingerprint
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
    """An instance sends few requests and reads few bytes, however many tensors there are."""
    stored_blob = blob("s3://bucket/x.safetensors", "etag")
    fingerprint(stored_blob)
    lengths = [end - begin for begin, end in stored_blob.read_ranges]
    assert MAX_REMOTE_READS == len(lengths)
    assert {SAMPLE_BYTES} == set(lengths)


def test_instances_that_read_the_same_object_agree() -> None:
    """Only bytes, version and computed tensors count."""
    here, there = (fingerprint(blob("s3://bucket/x.safetensors", "etag")) for _ in range(2))
    assert here == there


def test_a_replaced_object_has_another_origin() -> None:
    """The version of the object counts, even if no sampled block has changed."""
    remote = "https://models/x.safetensors"
    assert 4 == len({
        fingerprint(blob(remote, "one")),
        fingerprint(blob(remote, "two")),
        fingerprint(blob(remote, "one"), computed=b"x"),
        fingerprint(blob(remote, "one"), index=b"{}"),
    })  # fmt: skip


def test_copies_on_two_machines_agree() -> None:
    """The version of a local file depends on its modification time, so it does not count."""
    one, two = blob("file:///a/x.safetensors", "1-2-3"), blob("file:///b/x.safetensors", "4-5-6")
    assert fingerprint(one) == fingerprint(two)
    assert len(one.read_ranges) > MAX_REMOTE_READS
