"""The nixl transport over UCX (cma, tcp) between processes that die, stop and disagree.

Install ``rfork[nixl]`` and run this file alone: NIXL and grpcio-tools, which other tests import, contain copies of one
library that crash a process with both.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rfork.errors import (
    RforkError,
    SourceCorrupt,
    SourceError,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
    TransportUnavailable,
    VersionMismatch,
)
from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image
from rfork.peer.control_stream import serve_control_stream
from rfork.placement.box_tensors import allocate_boxes
from rfork.planner_client.lease import LeaseClaims, decode_key, sign
from rfork.settings import InstanceSettings
from rfork.testing.peers import stream_pair
from rfork.transport.base import ControlStream, Endpoint, Exporter, Reader
from rfork.transport.bpf_filter import listening_ports
from rfork.transport.nixl import NixlTransport
from rfork.transport.nixl.agent import FIRST_PORT, LAST_PORT, Fabric, NixlAgent, NixlReadState
from rfork.transport.nixl.library import library_state
from rfork.transport.nixl.protocol import AgentDescription, PagedDescription
from rfork.transport.nixl.reader import NixlReader
from rfork.transport.same_host.connection import decode, encode
from tests.integration.bad_peer_node import accepts_connections
from tests.integration.box_seeds import SIZE, BoxSeed, box, checkpoint, elements, rank_image
from tests.integration.nixl_node import (
    SETTINGS,
    NixlNode,
    StreamServer,
    image_from,
    pattern,
    shared_image,
    stream_opener,
)
from tests.integration.peer_service.seeds import KEY, SOON_S
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, TransportPair, image_of, soon

STATE = library_state()
pytestmark = [pytest.mark.skipif(bool(STATE.error), reason=f"{STATE.error} ({STATE.hint})")]
LARGE = [1 << 27]
SMALL = [8192] * 2000

StartNode = Callable[[], NixlNode]


@pytest.fixture
def start_node() -> Iterator[StartNode]:
    """Start nodes that end with the test."""
    with contextlib.ExitStack() as nodes:

        def start() -> NixlNode:
            node = NixlNode()
            nodes.callback(node.kill)
            return node

        yield start


@pytest.fixture(scope="module")
def target_node() -> Iterator[NixlNode]:
    """One process in which all checks of the contract read."""
    node = NixlNode()
    yield node
    node.kill()


@dataclass
class RemoteReader:
    """A reader in another process."""

    node: NixlNode
    name: str
    token: Callable[[], str]

    def read(self, begin: int, end: int, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        self.node.request("read", reader=self.name, begin=begin, end=end, seconds=seconds, token=self.token())

    def set_rate_limit(self, rate: int | None) -> None:
        raise AssertionError("the source throttles")

    def close(self) -> None:
        self.node.request("close", reader=self.name)


@dataclass
class RemoteTransport:
    """Connects readers of another process, over the control streams at `path`."""

    node: NixlNode
    path: Path
    memory: str
    exporter: Exporter
    numbers: Iterator[int]
    name = "nixl"

    def connect(self, endpoint: Endpoint, image: Image, token: Callable[[], str], deadline: float) -> RemoteReader:
        name = f"reader-{os.path.basename(self.path)}-{next(self.numbers)}"
        with contextlib.suppress(RforkError):  # a closed exporter
            self.exporter.authorize_peer(name, "127.0.0.1")
        self.node.request(
            "connect",
            reader=name,
            memory=self.memory,
            sizes=list(MIXED),
            parameters=dict(endpoint.parameters),
            segments=endpoint.segments,
            path=str(self.path),
            channel=name,
            seconds=deadline - time.monotonic(),
        )
        return RemoteReader(self.node, name, token)


@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_nixl_keeps_the_contract(check: Callable[[TransportPair], None], target_node: NixlNode, tmp_path: Path) -> None:
    """Every check of the contract holds between two processes."""
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(sum(MIXED) + 24 * len(MIXED)))
    gate, source = FakeGate(), image_of(MIXED, seed=1)
    exporter = NixlTransport(SETTINGS).export(source, gate)
    server = StreamServer(str(tmp_path / "streams"), exporter)
    remote = RemoteTransport(target_node, tmp_path / "streams", str(memory), exporter, itertools.count())
    pair = TransportPair(remote, gate, source, shared_image(str(memory), MIXED), exporter)  # type: ignore[arg-type]
    try:
        check(pair)
    finally:
        pair.close()
        server.close()


def empty_target(sizes: Sequence[int]) -> tuple[Image, list[torch.Tensor]]:
    """Return a target image of zeros, and its tensors."""
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    return image_from(sizes, tensors), tensors


def wrong_tensors(tensors: Sequence[torch.Tensor], salt: int = 0) -> list[int]:
    """Return the indices of tensors that differ from the source's."""
    return [
        index for index, tensor in enumerate(tensors) if not torch.equal(tensor, pattern(index, tensor.numel(), salt))
    ]


def connect(endpoint: Endpoint, image: Image, opener: Callable[[], ControlStream], seconds: float = 20.0) -> NixlReader:
    """Open a reader with a deadline `seconds` from now."""
    return NixlTransport(SETTINGS).connect(endpoint, image, lambda: TOKEN, time.monotonic() + seconds, opener)


@dataclass
class RemoteSource:
    """A source in its own process, with one authorized channel."""

    node: NixlNode
    endpoint: Endpoint
    path: str

    def connect(self, image: Image, seconds: float = 20.0) -> NixlReader:
        return connect(self.endpoint, image, stream_opener(self.path, "channel"), seconds)


def start_source(start_node: StartNode, folder: Path, sizes: Sequence[int], salt: int = 0) -> RemoteSource:
    """Start a source that has authorized the channel "channel"."""
    node, path = start_node(), folder / f"source-{salt}"
    endpoint = node.export(path, sizes, salt)
    node.request("authorize", channel="channel")
    return RemoteSource(node, endpoint, str(path))


def read_until_error(reader: Reader, image: Image, seconds: float) -> SourceError:
    """Read the image repeatedly until the source fails, and return the error."""
    while True:
        try:
            reader.read(0, image.layout.image_bytes, time.monotonic() + seconds)
        except SourceError as error:
            return error


@pytest.mark.parametrize("sizes", [SMALL, [3, (70 << 20) + 5, 1, 4097]], ids=["small", "large"])
def test_every_byte_arrives(start_node: StartNode, tmp_path: Path, sizes: list[int]) -> None:
    """Two thousand small tensors arrive complete, and tensors larger than one grant."""
    source = start_source(start_node, tmp_path, sizes)
    image, tensors = empty_target(sizes)
    reader = source.connect(image)
    reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    assert [] == wrong_tensors(tensors)


def test_a_killed_source_is_unavailable_and_another_continues(start_node: StartNode, tmp_path: Path) -> None:
    """SIGKILL during reads is SourceUnavailable; a reader of another source continues in this process."""
    killed = start_source(start_node, tmp_path, LARGE)
    healthy = start_source(start_node, tmp_path, SMALL, salt=1)
    image, _ = empty_target(LARGE)
    other, tensors = empty_target(SMALL)
    reader, second = killed.connect(image), healthy.connect(other)
    timer = threading.Timer(0.1, killed.node.send_signal, [signal.SIGKILL])
    timer.start()
    error = read_until_error(reader, image, 20)
    timer.join()
    second.read(0, other.layout.image_bytes, soon())
    reader.close()
    second.close()
    assert SourceUnavailable is type(error)
    assert [] == wrong_tensors(tensors, salt=1)


def test_a_stopped_source_times_out(start_node: StartNode, tmp_path: Path) -> None:
    """SIGSTOP during reads is SourceTimeout; once the source continues, a new reader reads everything."""
    source = start_source(start_node, tmp_path, LARGE)
    source.node.request("authorize", channel="second")
    image, _ = empty_target(LARGE)
    reader = source.connect(image)
    reader.read(0, 1 << 20, soon())
    source.node.send_signal(signal.SIGSTOP)
    error = read_until_error(reader, image, 1)
    reader.close()
    source.node.send_signal(signal.SIGCONT)
    fresh, tensors = empty_target(LARGE)
    second = connect(source.endpoint, fresh, stream_opener(source.path, "second"))
    second.read(0, fresh.layout.image_bytes, soon())
    second.close()
    assert SourceTimeout is type(error)
    assert [] == wrong_tensors(tensors)


def test_a_stopped_source_delays_no_connect(start_node: StartNode, tmp_path: Path) -> None:
    """Connecting to a source that does not respond ends at the deadline."""
    source = start_source(start_node, tmp_path, SMALL)
    source.node.send_signal(signal.SIGSTOP)
    image, _ = empty_target(SMALL)
    with pytest.raises(SourceTimeout):
        source.connect(image, seconds=1)


def test_a_source_survives_readers_that_are_killed(start_node: StartNode, tmp_path: Path) -> None:
    """A reader killed during a read leaves a source that serves the next one."""
    source = start_source(start_node, tmp_path, LARGE)
    source.node.request("authorize", channel="killed")
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(LARGE[0] + 24))
    target = start_node()
    target.request(
        "connect", reader="r", memory=str(memory), sizes=LARGE, parameters=dict(source.endpoint.parameters),
        segments=source.endpoint.segments, path=source.path, channel="killed", seconds=20,
    )  # fmt: skip
    timer = threading.Timer(0.1, target.send_signal, [signal.SIGKILL])
    timer.start()
    with contextlib.suppress(ChildProcessError):
        while True:
            target.request("read", reader="r", begin=0, end=LARGE[0], seconds=20, token=TOKEN)
    timer.join()
    source.node.request("revoke", channel="killed")
    image, tensors = empty_target(LARGE)
    reader = source.connect(image)
    reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    assert [] == wrong_tensors(tensors)


def read_without_grant(reader: NixlReader, local: int, remote: int) -> NixlReadState:
    """Read 64 bytes as a program could that has the keys of the source's agent; return the final state."""
    try:
        handle = reader.agent.start_read(reader.peer, [(local, 64, 0)], [(remote, 64, 0)])
    except SourceUnavailable:
        return NixlReadState.FAILED
    until = soon()
    while (state := reader.agent.state(handle)) is NixlReadState.RUNNING and time.monotonic() < until:
        pass
    return state


def test_without_revocation_a_reader_needs_no_grant(start_node: StartNode, tmp_path: Path) -> None:
    """The remaining risk: until its channel ends, a reader's host can read the weights without a grant."""
    source = start_source(start_node, tmp_path, SMALL)
    image, tensors = empty_target(SMALL)
    reader = source.connect(image)
    state = read_without_grant(reader, tensors[1].data_ptr(), source.endpoint.segments[0].address + 8192)
    reader.close()
    assert NixlReadState.DONE is state


def test_a_revoked_lease_ends_access(start_node: StartNode, tmp_path: Path) -> None:
    """After its channel was revoked, a reader reads nothing: neither with a grant nor around it."""
    source = start_source(start_node, tmp_path, SMALL)
    image, tensors = empty_target(SMALL)
    reader = source.connect(image)
    reader.read(0, 8192, soon())
    source.node.request("revoke", channel="channel")
    remote, local = source.endpoint.segments[0].address + 8192, tensors[1].data_ptr()
    state = read_without_grant(reader, local, remote)
    with pytest.raises(SourceUnavailable):
        reader.read(8192, 16384, soon())
    reader.close()
    assert NixlReadState.FAILED is state
    assert 0 == int(tensors[1].sum())


def test_changed_weights_are_not_read(start_node: StartNode, tmp_path: Path) -> None:
    """After the weights have changed, a read raises SourceWeightsChanged."""
    source = start_source(start_node, tmp_path, SMALL)
    image, _ = empty_target(SMALL)
    reader = source.connect(image)
    reader.read(0, 8192, soon())
    source.node.request("change_weights")
    with pytest.raises(SourceWeightsChanged):
        reader.read(8192, 16384, soon())
    reader.close()


def test_closing_ends_reads(start_node: StartNode, tmp_path: Path) -> None:
    """A reader closed during reads ends them with SourceUnavailable, and writes nothing later."""
    source = start_source(start_node, tmp_path, LARGE)
    image, tensors = empty_target(LARGE)
    reader = source.connect(image)
    timer = threading.Timer(0.1, reader.close)
    timer.start()
    error = read_until_error(reader, image, 20)
    timer.join()
    tensors[0].zero_()
    with pytest.raises(SourceUnavailable, match="closed"):
        reader.read(0, 1, soon())
    assert SourceUnavailable is type(error)
    assert 0 == int(tensors[0].sum())


@pytest.mark.parametrize("columns", [SIZE, SIZE // 2], ids=["in place", "copied"])
def test_an_update_ends_access_to_boxes(columns: int) -> None:
    """Before the weights change, a reader of their boxes loses its access, also without a grant.

    Within a host it may read until UCX has noticed, milliseconds later, that the source's agent is destroyed.
    """
    rank = BoxSeed(SETTINGS.model_copy(update={"transports": ("nixl",)}))
    part = box("v", columns=(0, columns))
    rank.images.open((part,))
    (served,) = rank.images._images.values()
    served.gathered.result(SOON_S)
    seed = served.opened.result()
    seed.set_lease_keys([KEY])
    layout_id = seed.image.layout.layout_id
    lease = LeaseClaims("fork", seed.identity.instance_id, layout_id, None, seed.generation, time.time() + SOON_S)
    channel, endpoint = seed.open_channel("fork", layout_id, ["nixl"], "127.0.0.1")

    def opener() -> ControlStream:
        near, far = stream_pair()
        threading.Thread(target=serve_control_stream, args=(seed, channel, far), daemon=True).start()
        return near

    tensor = allocate_boxes((part,))[part.name]
    transport, token = NixlTransport(SETTINGS), sign(lease, decode_key(KEY))
    reader = transport.connect(endpoint, image_from_tensors({part.name: tensor}), lambda: token, soon(), opener)
    reader.read(0, part.byte_count, soon())
    received = tensor.clone()
    tensor.zero_()
    with rank.seed.updating("v2"):
        until, address = soon(), endpoint.segments[0].address
        while read_without_grant(reader, tensor.data_ptr(), address) is not NixlReadState.FAILED:
            assert time.monotonic() < until
        with pytest.raises(SourceUnavailable):
            reader.read(0, part.byte_count, soon())
        tensor.zero_()
        for name, own in rank_image(2)[0].items():
            rank.own[name].copy_(own)
    reader.close()
    rank.seed.close()
    assert torch.equal(elements(checkpoint()["v"], part), received)
    assert 0 == int(tensor.count_nonzero())


class MalformedSource:
    """A control stream that describes an agent as a hostile or broken source might."""

    def __init__(self, pages: Sequence[object]) -> None:
        self._pages = pages
        self._requested = 0

    def send(self, message: bytes) -> None:
        self._requested = int(str(decode(message)["page"]))

    def receive(self, deadline: float) -> bytes:
        return encode({"page": self._pages[self._requested], "pages": len(self._pages)})  # type: ignore[dict-item]

    def close(self) -> None:
        pass


def local_endpoint(image: Image, **parameters: str) -> Endpoint:
    """Return an endpoint with the parameters of this machine."""
    both = {"version": STATE.version, "backend": "UCX", "protocol": "tcp", **parameters}
    return Endpoint("nixl", both, tuple(image.segments(0, image.layout.image_bytes)))


def description(**fields: object) -> list[str]:
    """Return the pages of a valid description, with some fields replaced."""
    agent = NixlAgent(Fabric("tcp", bind="127.0.0.1"))
    valid = AgentDescription(agent=agent.name, metadata=agent.metadata(), probe=4096, nonce=bytes(16))
    agent.close()
    if fields.pop("trailing", False):
        fields["metadata"] = valid.metadata + b"|"
    return list(PagedDescription.of(valid.model_copy(update=fields)).pages)


@pytest.mark.parametrize(
    "pages",
    [
        lambda: [1],
        lambda: ["not base64!"],
        lambda: [base64.b64encode(b"{}").decode()],
        lambda: description(metadata=b""),
        lambda: description(metadata=b"nixlSerDes|" + b"\xff" * 200),
        lambda: description(metadata=bytes(range(256)) * 4),
        lambda: description(agent="another"),
        lambda: description(trailing=True),
    ],
    ids=["number", "no-base64", "no-fields", "empty", "rubbish", "no-metadata", "another-name", "more-bytes"],
)
def test_malformed_metadata_is_corrupt(pages: Callable[[], list[object]]) -> None:
    """A malformed description is the source's fault, and this process survives it."""
    image, _ = empty_target(SMALL)
    made = pages()
    with pytest.raises(SourceCorrupt):
        connect(local_endpoint(image), image, lambda: MalformedSource(made))


def test_a_source_that_cannot_be_reached_is_unavailable() -> None:
    """An agent whose port drops every packet selects another transport, before its connection times out."""
    other = NixlAgent(Fabric("tcp", bind="127.0.0.1"))
    nonce = torch.arange(16, dtype=torch.uint8)
    other.register_regions([(nonce.data_ptr(), 16)])
    described = AgentDescription(
        agent=other.name, metadata=other.metadata(), probe=nonce.data_ptr(), nonce=bytes(nonce.tolist())
    )
    image, _ = empty_target(SMALL)
    with pytest.raises(TransportUnavailable, match="cannot read from the source"):
        connect(local_endpoint(image), image, lambda: MalformedSource(PagedDescription.of(described).pages), 2.0)
    other.close()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("version", "0.9.0", VersionMismatch),
        ("version", "", VersionMismatch),
        ("protocol", "rdma", TransportUnavailable),
        ("backend", "LIBFABRIC", TransportUnavailable),
    ],
)
def test_a_different_source_is_refused(name: str, value: str, error: type[RforkError]) -> None:
    """Two sides with different releases, networks or backends use another transport."""
    image, _ = empty_target(SMALL)
    with pytest.raises(TransportUnavailable) as raised:
        connect(local_endpoint(image, **{name: value}), image, lambda: MalformedSource([]))
    assert error is raised.type


def test_only_authorized_hosts_reach_an_agent() -> None:
    """The port of an agent drops connections until a host is allowed."""
    before = listening_ports()
    agent = NixlAgent(Fabric("tcp", bind="127.0.0.1"))
    ports = sorted(listening_ports() - before)
    refused = [accepts_connections("127.0.0.1", port, 0.3) for port in ports]
    agent.packet_filter.allow("reader", "127.0.0.1")
    accepted = [accepts_connections("127.0.0.1", port, 0.3) for port in ports]
    agent.close()
    assert 1 == len(ports)
    assert FIRST_PORT <= ports[0] <= LAST_PORT
    assert [False] == refused
    assert [True] == accepted


def test_an_agent_leaves_the_environment_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library of the process may use UCX with the user's variables."""
    monkeypatch.setenv("UCX_TLS", "all")
    before = dict(os.environ)
    NixlAgent(Fabric("tcp", bind="127.0.0.1")).close()
    assert before == dict(os.environ)


def test_tcp_is_refused_unless_allowed() -> None:
    """Without allow_unauthenticated_tcp a machine without RDMA neither exports nor connects."""
    image, _ = empty_target(SMALL)
    with pytest.raises(TransportUnavailable, match="any process on a reader's host could read"):
        NixlTransport(InstanceSettings()).export(image, FakeGate())
