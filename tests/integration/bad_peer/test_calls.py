"""Malicious calls: the seed survives, serves other forks, and leaks nothing."""

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

from rfork.peer.servicer import MAX_PROGRESS_STREAMS
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.source.served_image import MAX_CHANNELS_PER_FORK
from tests.integration.bad_peer.attacked_seed import (
    FORKED,
    MIB,
    OWN_CONNECTION,
    SETTLE_TIMEOUT_S,
    AttackedSeed,
    bearer,
    start_process,
    wait_for,
)
from tests.integration.bad_peer_node import ForgedLease, start_node


def open_request(attacked_seed: AttackedSeed) -> peer_pb2.OpenChannelRequest:
    return peer_pb2.OpenChannelRequest(layout_id=attacked_seed.layout_id, transports=["http"])


def statuses(calls: list[Callable[[], object]]) -> Counter[grpc.StatusCode]:
    """Return the final status of each call, made sequentially."""
    ended: Counter[grpc.StatusCode] = Counter()
    for call in calls:
        try:
            call()
            ended[grpc.StatusCode.OK] += 1
        except grpc.RpcError as error:
            ended[error.code()] += 1
    return ended


def test_500_channels_of_one_fork(attacked_seed: AttackedSeed) -> None:
    """A fork gets only a few channels, in one reader slot; its lease's end releases all of them."""
    metadata = bearer(replace(attacked_seed.lease, fork_id="greedy", lifetime_s=10.0).token)
    with attacked_seed.assert_unharmed(), contextlib.ExitStack() as stack:
        stub = attacked_seed.stub(stack)
        open_one = partial(stub.OpenChannel, open_request(attacked_seed), metadata=metadata, timeout=30)
        ended = statuses([open_one] * 500)
        assert attacked_seed.fork() == FORKED
    expected = {
        grpc.StatusCode.OK: MAX_CHANNELS_PER_FORK,
        grpc.StatusCode.RESOURCE_EXHAUSTED: 500 - MAX_CHANNELS_PER_FORK,
    }
    assert expected == ended


@pytest.mark.slow  # logic: tests/unit/source/test_leases.py
def test_a_hundred_leases(attacked_seed: AttackedSeed) -> None:
    """As many forks get a slot as there are slots; when their leases expire, other forks get them."""
    emptied = {"readers": 0}
    wait_for(lambda: attacked_seed.seed.request("readers") == emptied)
    leases = [replace(attacked_seed.lease, fork_id=f"many-{n}", lifetime_s=8.0).token for n in range(100)]
    with contextlib.ExitStack() as stack:
        stub = attacked_seed.stub(stack)
        ended = statuses(
            [partial(stub.OpenChannel, open_request(attacked_seed), metadata=bearer(one), timeout=30) for one in leases]
        )
    wait_for(lambda: attacked_seed.seed.request("readers") == emptied)
    assert {grpc.StatusCode.OK: 4, grpc.StatusCode.RESOURCE_EXHAUSTED: 96} == ended
    assert attacked_seed.fork() == FORKED


def never_sent_request(stack: contextlib.ExitStack) -> Iterator[bytes]:
    """Yield no request until the stack closes."""
    finished = threading.Event()
    stack.callback(finished.set)
    finished.wait(SETTLE_TIMEOUT_S)
    yield from ()


HALF_OPEN = {
    "no token, GetManifest": ("/rfork.v1.Peer/GetManifest", False),
    "no token, Check": ("/grpc.health.v1.Health/Check", False),
    "a fork, WatchProgress": ("/rfork.v1.Peer/WatchProgress", True),
}


@pytest.mark.parametrize("call", HALF_OPEN)
def test_calls_without_a_request_do_not_block_others(attacked_seed: AttackedSeed, call: str) -> None:
    """Hundreds of calls that stop after their headers do not block other calls."""
    method, leased = HALF_OPEN[call]
    metadata = bearer(attacked_seed.lease.token) if leased else ()
    with attacked_seed.assert_unharmed(), contextlib.ExitStack() as stack:
        for _ in range(30):
            channel = stack.enter_context(grpc.insecure_channel(attacked_seed.address, OWN_CONNECTION))
            begin = channel.stream_unary(method, None, None)
            for _ in range(20):
                stack.callback(begin.future(never_sent_request(stack), metadata=metadata).cancel)
        assert FORKED == attacked_seed.fork()
        assert health_pb2.HealthCheckResponse.SERVING == probe_status(attacked_seed)


def probe_status(attacked_seed: AttackedSeed) -> int:
    """Return the status that a health probe gets."""
    with grpc.insecure_channel(attacked_seed.address, OWN_CONNECTION) as channel:
        health_response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    return int(health_response.status)


def test_unauthenticated_clients_cannot_watch_streams(attacked_seed: AttackedSeed) -> None:
    """A client without a lease can watch nothing, not even health."""
    with grpc.insecure_channel(attacked_seed.address) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        with pytest.raises(grpc.RpcError) as refused:
            next(watched)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_500_unread_progress_streams(attacked_seed: AttackedSeed) -> None:
    """A fork gets a few streams; its further calls are refused, other forks' calls are not."""
    metadata = bearer(replace(attacked_seed.lease, fork_id="watcher", lifetime_s=15.0).token)
    with attacked_seed.assert_unharmed(), contextlib.ExitStack() as stack:
        stub = attacked_seed.stub(stack)
        channel = stub.OpenChannel(open_request(attacked_seed), metadata=metadata, timeout=30).channel_id
        watch = peer_pb2.WatchProgressRequest(channel_id=channel, keep_alive_ms=1)
        streams = [stub.WatchProgress(watch, metadata=metadata) for _ in range(500)]
        for stream in streams:
            stack.callback(stream.cancel)
        assert attacked_seed.fork() == FORKED
        wait_for(lambda: sum(stream.is_active() for stream in streams) <= MAX_PROGRESS_STREAMS)
        ended = [stream.code() for stream in streams if not stream.is_active()]
    # Refused by the service, or by gRPC itself if one connection has too many.
    refusals = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    assert 500 - MAX_PROGRESS_STREAMS <= len(ended) < 500
    assert set() == {*ended} - refusals


def test_malformed_requests(attacked_seed: AttackedSeed) -> None:
    """Requests above the size limit and bytes that are no message are refused with a status."""
    metadata = bearer(attacked_seed.lease.token)
    with attacked_seed.assert_unharmed(), grpc.insecure_channel(attacked_seed.address) as channel:
        call = channel.unary_unary("/rfork.v1.Peer/OpenChannel", None, None)
        status_codes = [
            statuses([partial(call, body, metadata=metadata, timeout=30)])
            for body in (os.urandom(MIB), b"\xff" * 100, bytes(60_000))
        ]
    refusals = (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert [Counter([refusal]) for refusal in refusals] == status_codes


@pytest.mark.slow
def test_unread_manifests(tmp_path: Path) -> None:
    """Hundreds of unread streams of a manifest of 100,000 tensors share one copy, and other readers get
    theirs.
    """
    environment = {"RFORK_TRANSPORTS": "http", "BAD_PEER_BYTES": "1000", "BAD_PEER_TENSORS": "100000"}
    with contextlib.ExitStack() as stack:
        seed = start_node(start_process, tmp_path, "seed", "seed", **environment)
        stack.callback(seed.close)
        facts = seed.request("facts")
        before = seed.resident_bytes()
        layout_id, address = str(facts["layout_id"]), str(facts["address"])
        metadata = bearer(ForgedLease(layout_id, "bad").token)
        request = peer_pb2.GetManifestRequest(include_tensors=True)
        for _ in range(25):
            channel = stack.enter_context(grpc.insecure_channel(address, OWN_CONNECTION))
            stub = peer_pb2_grpc.PeerStub(channel)
            for _ in range(20):
                stack.callback(stub.GetManifest(request, metadata=metadata).cancel)
        honest = bearer(ForgedLease(layout_id, "good").token)
        stub = peer_pb2_grpc.PeerStub(stack.enter_context(grpc.insecure_channel(address, OWN_CONNECTION)))
        tensors = sum(len(part.tensors) for part in stub.GetManifest(request, metadata=honest, timeout=60))
        grown = seed.resident_bytes() - before
    assert 100_001 == tensors, grown
    assert grown < 300 * MIB, grown
