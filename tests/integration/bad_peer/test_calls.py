"""Calls that mean harm: the seed lives, others fork from it, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rfork.peer.answers import MOST_STREAMS
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.seed.leases import MOST_CHANNELS
from tests.integration.bad_peer.scene import ALONE, FORKED, MIB, SETTLED_S, Scene, bearer, popen, wait_for
from tests.integration.bad_peer_node import Lease, start_node


def open_request(scene: Scene) -> peer_pb2.OpenChannelRequest:
    return peer_pb2.OpenChannelRequest(layout_id=scene.layout_id, transports=["http"])


def statuses(calls: list[Callable[[], object]]) -> Counter[grpc.StatusCode]:
    """How each call ends, made one after the other."""
    ended: Counter[grpc.StatusCode] = Counter()
    for call in calls:
        try:
            call()
            ended[grpc.StatusCode.OK] += 1
        except grpc.RpcError as error:
            ended[error.code()] += 1
    return ended


def test_500_channels_of_one_fork(scene: Scene) -> None:
    """A fork gets no more than a handful, in one place; all is given back with its lease."""
    shown = bearer(replace(scene.lease, fork_id="greedy", lives_s=10.0).token)
    with scene.unharmed(), contextlib.ExitStack() as stack:
        stub = scene.stub(stack)
        open_one = partial(stub.OpenChannel, open_request(scene), metadata=shown, timeout=30)
        ended = statuses([open_one] * 500)
        assert scene.fork() == FORKED
    expected = {grpc.StatusCode.OK: MOST_CHANNELS, grpc.StatusCode.RESOURCE_EXHAUSTED: 500 - MOST_CHANNELS}
    assert expected == ended


def test_a_hundred_leases(scene: Scene) -> None:
    """As many forks get a place as there are; they last as long as their leases, and then others fork."""
    emptied = {"readers": 0}
    wait_for(lambda: scene.seed.ask("readers") == emptied)
    leases = [replace(scene.lease, fork_id=f"many-{n}", lives_s=8.0).token for n in range(100)]
    with contextlib.ExitStack() as stack:
        stub = scene.stub(stack)
        ended = statuses(
            [
                partial(stub.OpenChannel, open_request(scene), metadata=bearer(one), timeout=30)
                for one in leases
            ]
        )
    wait_for(lambda: scene.seed.ask("readers") == emptied)
    assert {grpc.StatusCode.OK: 4, grpc.StatusCode.RESOURCE_EXHAUSTED: 96} == ended
    assert scene.fork() == FORKED


def never(stack: contextlib.ExitStack) -> Iterator[bytes]:
    """A request that does not come while the stack is open."""
    over = threading.Event()
    stack.callback(over.set)
    over.wait(SETTLED_S)
    yield from ()


HALF_OPEN = {
    "a stranger, GetManifest": ("/rfork.v1.Peer/GetManifest", False),
    "a stranger, Check": ("/grpc.health.v1.Health/Check", False),
    "a fork, WatchProgress": ("/rfork.v1.Peer/WatchProgress", True),
}


@pytest.mark.parametrize("call", HALF_OPEN)
def test_calls_whose_request_never_comes(scene: Scene, call: str) -> None:
    """Hundreds of calls that stop after their headers take no place of the calls of others."""
    method, leased = HALF_OPEN[call]
    shown = bearer(scene.lease.token) if leased else ()
    with scene.unharmed(), contextlib.ExitStack() as stack:
        for _ in range(30):
            channel = stack.enter_context(grpc.insecure_channel(scene.address, ALONE))
            begin = channel.stream_unary(method, None, None)
            for _ in range(20):
                stack.callback(begin.future(never(stack), metadata=shown).cancel)
        assert (FORKED, health_pb2.HealthCheckResponse.SERVING) == (scene.fork(), health(scene))


def health(scene: Scene) -> int:
    """What a probe hears."""
    with grpc.insecure_channel(scene.address, ALONE) as channel:
        asked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    return int(asked.status)


def test_streams_of_a_stranger(scene: Scene) -> None:
    """There is nothing to watch for who has no lease, health neither."""
    with grpc.insecure_channel(scene.address) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        with pytest.raises(grpc.RpcError) as refused:
            next(watched)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_500_progress_streams_that_nobody_reads(scene: Scene) -> None:
    """A fork holds a few; all other calls of its own are refused, and nobody else's."""
    shown = bearer(replace(scene.lease, fork_id="watcher", lives_s=15.0).token)
    with scene.unharmed(), contextlib.ExitStack() as stack:
        stub = scene.stub(stack)
        channel = stub.OpenChannel(open_request(scene), metadata=shown, timeout=30).channel_id
        watch = peer_pb2.WatchProgressRequest(channel_id=channel, keep_alive_ms=1)
        streams = [stub.WatchProgress(watch, metadata=shown) for _ in range(500)]
        for stream in streams:
            stack.callback(stream.cancel)
        assert scene.fork() == FORKED
        wait_for(lambda: sum(stream.is_active() for stream in streams) <= MOST_STREAMS)
        ended = [stream.code() for stream in streams if not stream.is_active()]
    # By the service, or by gRPC itself where there are too many on one connection.
    refusals = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    assert (True, set()) == (500 - MOST_STREAMS <= len(ended) < 500, {*ended} - refusals)


def test_requests_of_no_sense(scene: Scene) -> None:
    """Requests over the size limit, and bytes that are no message, are refused with a status."""
    shown = bearer(scene.lease.token)
    with scene.unharmed(), grpc.insecure_channel(scene.address) as channel:
        call = channel.unary_unary("/rfork.v1.Peer/OpenChannel", None, None)
        said = [
            statuses([partial(call, body, metadata=shown, timeout=30)])
            for body in (os.urandom(MIB), b"\xff" * 100, bytes(60_000))
        ]
    refusals = (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert [Counter([refusal]) for refusal in refusals] == said


@pytest.mark.slow
def test_manifests_that_nobody_reads(tmp_path: Path) -> None:
    """Hundreds of streams of a manifest of 100,000 tensors make no copy each, and others get theirs."""
    environment = {"RFORK_TRANSPORTS": "http", "BAD_PEER_BYTES": "1000", "BAD_PEER_TENSORS": "100000"}
    with contextlib.ExitStack() as stack:
        seed = start_node(popen, tmp_path, "seed", "seed", **environment)
        stack.callback(seed.close)
        facts = seed.ask("facts")
        before = seed.resident()
        layout_id, address = str(facts["layout_id"]), str(facts["address"])
        shown = bearer(Lease(layout_id, "bad").token)
        request = peer_pb2.GetManifestRequest(include_tensors=True)
        for _ in range(25):
            channel = stack.enter_context(grpc.insecure_channel(address, ALONE))
            stub = peer_pb2_grpc.PeerStub(channel)
            for _ in range(20):
                stack.callback(stub.GetManifest(request, metadata=shown).cancel)
        honest = bearer(Lease(layout_id, "good").token)
        mine = peer_pb2_grpc.PeerStub(stack.enter_context(grpc.insecure_channel(address, ALONE)))
        tensors = sum(len(part.tensors) for part in mine.GetManifest(request, metadata=honest, timeout=60))
        grown = seed.resident() - before
    assert (100_001, True) == (tensors, grown < 300 * MIB), grown
