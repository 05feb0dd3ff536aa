"""The served image as a state machine: what its changes do, without threads, sockets or memory."""

from __future__ import annotations

import pytest

from rfork.errors import LayoutMismatch, SourceBusy, SourceWeightsChanged
from rfork.image.chunks import ChunkState
from rfork.image.layout import Manifest
from rfork.schema import Placement, Rank
from rfork.source.served_image import NOTIFY_INTERVAL_S, InstanceIdentity, ServedImage
from tests.unit.source.seeds import IMAGE, LAYOUT_ID

MANIFEST = IMAGE.manifest()
OTHER_MANIFEST = Manifest(IMAGE.layout, tuple(digest[::-1] for digest in MANIFEST.digests))
NOW, UNIX_S = 100.0, 1000.0


def relay(identity: InstanceIdentity | None = None) -> ServedImage:
    """Return an image of which nothing is verified."""
    chunk_state = ChunkState(IMAGE.layout.chunks)
    return ServedImage(IMAGE.layout, identity or InstanceIdentity("model"), 4, chunk_state=chunk_state)


def complete(identity: InstanceIdentity | None = None) -> ServedImage:
    """Return a complete image."""
    return ServedImage(IMAGE.layout, identity or InstanceIdentity("model"), 4, manifest=MANIFEST)


def test_digests_of_an_earlier_generation_are_not_published() -> None:
    """The bytes may have changed under the digest."""
    served = complete()
    served.clear()
    assert not served.publish(MANIFEST, 0)
    assert served.manifest is None
    assert "loading" == served.state


def test_digests_of_the_current_generation_are_published() -> None:
    """All chunks are verified, and the image is served."""
    served = relay()
    assert served.publish(MANIFEST, 0)
    assert served.chunk_state.complete
    assert "serving" == served.state


def test_a_draining_image_stays_draining() -> None:
    """No change of the weights ends it."""
    served = complete()
    served.drain()
    served.clear()
    served.publish(MANIFEST, served.generation)
    assert "draining" == served.state
    with pytest.raises(SourceBusy, match="draining"):
        served.check_can_open(LAYOUT_ID)


def test_a_suspended_image_opens_no_channel_until_it_is_resumed() -> None:
    """Publishing alone does not resume it."""
    served = complete()
    served.suspend()
    served.clear()
    served.publish(MANIFEST, served.generation)
    assert "loading" == served.state
    with pytest.raises(SourceBusy, match="suspended"):
        served.check_can_open(LAYOUT_ID)
    served.resume()
    served.check_can_open(LAYOUT_ID)


def test_another_layout_opens_no_channel() -> None:
    """The error names both layouts."""
    with pytest.raises(LayoutMismatch, match="0000"):
        complete().check_can_open("0" * 32)


def test_an_incomplete_image_has_no_snapshot() -> None:
    """A snapshot needs the manifest and all chunks."""
    served = relay()
    served.set_manifest(MANIFEST)
    with pytest.raises(SourceWeightsChanged, match="no complete image"):
        served.snapshot()


def test_readers_are_notified_when_storage_activity_starts_or_ends() -> None:
    """A repeated report is not a change."""
    served = relay()
    assert served.set_storage_activity(lambda: NOW)
    assert not served.set_storage_activity(lambda: NOW)
    assert served.set_storage_activity(None)


def test_readers_are_notified_of_storage_progress_at_intervals() -> None:
    """Each block of storage alone is not a reason to notify them."""
    served = relay()
    served.set_storage_activity(lambda: NOW)
    assert not served.set_storage_activity(lambda: NOW + NOTIFY_INTERVAL_S / 2)
    assert served.set_storage_activity(lambda: NOW + NOTIFY_INTERVAL_S)


def test_storage_activity_has_an_age() -> None:
    """Progress messages contain the time since storage last delivered bytes."""
    served = relay()
    served.set_storage_activity(lambda: NOW, relayed=True)
    activity = served.progress_since((), NOW + 5.0).storage_activity
    assert activity is not None
    assert 5.0 == activity.idle_s
    assert activity.relayed


def test_a_seed_reports_no_storage_activity() -> None:
    """A complete image needs no storage."""
    served = relay()
    served.set_storage_activity(lambda: NOW)
    served.serve()
    assert served.progress_since((), NOW).storage_activity is None


@pytest.mark.parametrize(
    ("rank", "manifest", "stated", "expected"),
    [
        (Rank(), OTHER_MANIFEST, "v2", "v2"),
        (Rank(), OTHER_MANIFEST, None, f"weights:{OTHER_MANIFEST.weights_id}"),
        (Rank(), MANIFEST, None, "v1"),
        (Rank(tp=1, tp_size=2), OTHER_MANIFEST, None, "update:replica:7"),
        (Rank(tp=1, tp_size=2), OTHER_MANIFEST, "v1", "update:replica:7"),
    ],
    ids=["stated", "by content", "unchanged weights", "one of several ranks", "version of the previous weights"],
)
def test_updated_weights_have_a_version_of_their_own(
    rank: Rank, manifest: Manifest, stated: str | None, expected: str
) -> None:
    """Weights that no version is stated for are not confused with the ones before the update."""
    served = complete(InstanceIdentity("model", rank, version="v1", replica="replica"))
    choose = served.version_after_update(stated, 7)
    served.clear()
    served.publish(manifest, served.generation, choose)
    assert expected == served.version


def test_a_suspended_image_reports_no_chunks() -> None:
    """The planner assigns no reader to memory that is about to be released."""
    served = complete()
    served.suspend()
    assert () == served.report(UNIX_S, "host:1", ("http",), Placement(host="node")).verified


@pytest.mark.parametrize(("version", "expected"), [(None, True), ("v1", False)])
def test_an_adopted_version_is_reported_until_the_weights_are_served(version: str | None, expected: bool) -> None:
    """Only an instance without a version of its own accepts any version, while it is loading."""
    served = relay(InstanceIdentity("model", version=version))
    before = served.report(UNIX_S, "host:1", ("http",), Placement(host="node"))
    served.publish(MANIFEST, 0)
    after = served.report(UNIX_S, "host:1", ("http",), Placement(host="node"))
    assert expected is before.any_version
    assert not after.any_version
