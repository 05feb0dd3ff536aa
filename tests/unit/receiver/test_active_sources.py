"""Sources of one fork: which failed, and which source is blamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from rfork.errors import (
    NotSameHost,
    RforkError,
    SourceUnavailable,
    SourceWeightsChanged,
    TransportUnavailable,
)
from rfork.image.chunk_state import ChunkState
from rfork.receiver.active_sources import ActiveSources
from rfork.receiver.chunk_scheduler import ChunkScheduler
from rfork.receiver.chunk_verifier import ChunkVerifier, ServingState
from rfork.receiver.peer_source import PeerSource
from rfork.receiver.source import SourceListener
from rfork.receiver.source_span import SourceSpan
from rfork.receiver.storage_source import StorageSource
from rfork.schema import Lease, Placement, Route, StorageAssignment
from tests.unit.receiver.fleet import image


class IdleSource:
    """A source that does nothing."""

    def __init__(self, source_id: str) -> None:
        self.source_id = self.instance_id = source_id
        self.source_span = SourceSpan()

    def start(self) -> None:
        return


class IdleSourceFactory:
    """Opens sources that do nothing."""

    def open_peer(self, route: Route, listener: SourceListener) -> PeerSource:
        return cast(PeerSource, IdleSource(route.source_id))

    def open_storage(self, read: StorageAssignment, listener: SourceListener) -> StorageSource:
        raise NotImplementedError

    def exclude(self, name: str) -> None:
        raise NotImplementedError


def sources_reading_from(*names: str) -> ActiveSources:
    """Return the sources of a fork that reads one chunk from each of these."""
    target_image = image()
    chunk_state, scheduler = ChunkState(target_image.layout.chunks), ChunkScheduler(len(target_image.layout.chunks))
    verifier = ChunkVerifier(target_image, chunk_state, scheduler, cast(ServingState, None))
    sources = ActiveSources(scheduler, verifier, IdleSourceFactory(), cast(SourceListener, None))
    routes = [
        Route(
            source_id=name,
            address=f"{name}:1",
            placement=Placement(host=name),
            transports=("memory",),
            generation=0,
            chunks=((chunk, chunk + 1),),
            lease=Lease(token="token", expires_in_s=60.0),
        )
        for chunk, name in enumerate(names)
    ]
    sources.apply_plan(routes, ())
    return sources


def fail(sources: ActiveSources, name: str, error: RforkError) -> None:
    peer_source = sources.find(name)
    assert peer_source is not None
    sources.fail(peer_source, error)


def test_an_unusable_transport_is_logged_once_per_reason() -> None:
    """The number of affected sources does not matter, and nothing is reported to the planner."""
    sources = sources_reading_from("a", "b")
    for error in (NotSameHost("two hosts"), NotSameHost("two hosts"), TransportUnavailable("no device")):
        sources.record_unavailable_transport(error)
    assert ["two hosts", "no device"] == [str(each) for each in sources.reasons]
    assert () == sources.faults


CHANGED, UNAVAILABLE, NOT_SAME_HOST = (
    SourceWeightsChanged("changed"),
    SourceUnavailable("closed"),
    NotSameHost("two hosts"),
)


@pytest.mark.parametrize(
    ("errors", "transport_recorded", "changing"),
    [
        ((), False, False),
        ((), True, False),
        ((CHANGED,), False, True),
        ((CHANGED,), True, True),
        ((CHANGED, UNAVAILABLE), True, False),
        ((UNAVAILABLE, CHANGED), True, True),
        ((CHANGED, NOT_SAME_HOST), False, True),
    ],
)
def test_new_weights_are_expected_only_after_the_last_source_changed_its_weights(
    errors: Sequence[RforkError], transport_recorded: bool, changing: bool
) -> None:
    """A transport recorded as unusable afterwards is not a failure."""
    sources = sources_reading_from("a", "b")
    for name, error in zip("ab", errors, strict=False):
        fail(sources, name, error)
    if transport_recorded:
        sources.record_unavailable_transport(NOT_SAME_HOST)
    assert changing == sources.weights_changing
