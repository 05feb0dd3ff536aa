"""Boxes of a seed's checkpoint tensors, served as images of their own, over gRPC and http on loopback."""

from __future__ import annotations

import gc
import json
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
import pytest
import torch

from rfork.errors import (
    LayoutMismatch,
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
    TransportUnavailable,
)
from rfork.image.capture import image_from_tensors
from rfork.peer import codec, servicer
from rfork.peer.base import BOX_IDLE_S, BoxImage
from rfork.peer.client import PeerClient
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.placement import box_tensors
from rfork.placement.box_tensors import allocate_boxes
from rfork.placement.boxes import Box, encode_boxes
from rfork.placement.intersection import Relocation
from rfork.placement.placement_map import PlacementMap
from rfork.receiver.session import ForkOptions, ForkSession, Network, module_of, query_source
from rfork.settings import InstanceSettings
from rfork.source import box_images
from rfork.source.box_images import ServedBoxes
from rfork.source.seed import InstanceIdentity, Seed
from rfork.testing.peers import InMemoryPeers
from rfork.transport.collective.gloo import GlooBackend
from rfork.transport.collective.nccl import NcclBackend
from tests.conftest import StartRfork
from tests.integration.box_seeds import BOXES, MEMORY_BYTES, MODEL, SIZE, BoxSeed, box, checkpoint, elements, rank_image
from tests.integration.peer_service.seeds import SOON_S, client, soon, token

StartBoxSeed = Callable[..., BoxSeed]
HTTP: Final = ("http",)
HALF: Final = (0, SIZE // 2)
"""Columns of a box that is not contiguous in a rank's tensors."""


@pytest.fixture
def start_seed() -> Iterator[StartBoxSeed]:
    """Starts seeds with boxes, and closes them."""
    started: list[BoxSeed] = []

    def start(settings: InstanceSettings | None = None, **options: int | str | None) -> BoxSeed:
        started.append(BoxSeed(settings or InstanceSettings(transports=HTTP), **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.seed.close()


@pytest.fixture
def rank(start_seed: StartBoxSeed) -> BoxSeed:
    """A seed of one rank, without a planner."""
    return start_seed()


class Gathers:
    """Gathers of boxes: `before` is called before each copy, `allocating` when an image is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.before: Callable[[], object] = lambda: None
        self.allocating: Callable[[], object] = lambda: None
        self.images: list[ServedBoxes] = []
        """All images that were opened, also those that failed."""
        gather, allocated = box_tensors.gather, box_images._allocated

        def counted(
            copies: Relocation, sources: Sequence[Mapping[str, torch.Tensor]], into: Mapping[str, torch.Tensor]
        ) -> None:
            self.count += 1
            self.before()
            gather(copies, sources, into)

        def allocate(boxes: Sequence[Box]) -> dict[str, torch.Tensor]:
            self.allocating()
            return allocated(boxes)

        def image(*fields: Any) -> ServedBoxes:
            self.images.append(ServedBoxes(*fields))
            return self.images[-1]

        monkeypatch.setattr(box_images, "gather", counted)
        monkeypatch.setattr(box_images, "_allocated", allocate)
        monkeypatch.setattr(box_images, "ServedBoxes", image)

    def failure(self) -> BaseException | None:
        """Return the error of the last image, once it is gathered or has failed."""
        return self.images[-1].gathered.exception(SOON_S)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> Gathers:
    """Calls of `gather`."""
    return Gathers(monkeypatch)


def open_boxes(rank: BoxSeed, *boxes: Box, peer: PeerClient | None = None) -> BoxImage:
    """Open boxes over gRPC."""
    caller = peer or client(rank.seed)
    try:
        return caller.open_boxes(encode_boxes(boxes or BOXES), soon())
    finally:
        if peer is None:
            caller.close()


def expected_layout_id(*boxes: Box) -> str:
    """Return the layout id of an image of boxes, as a target computes it."""
    return image_from_tensors(allocate_boxes(boxes or BOXES)).layout.layout_id


def opened_seed(rank: BoxSeed) -> Seed:
    """Return the seed of the only image of boxes, once they are gathered."""
    (served,) = rank.images._images.values()
    served.gathered.result(SOON_S)
    return served.opened.result()


def content_of(seed: Seed) -> dict[str, bytes]:
    """Return the bytes of each tensor of an image of boxes."""
    image = seed.image
    memory = torch.cat(image.tensor_slices(0, image.layout.image_bytes))
    found = {}
    for spec in image.layout.tensors:
        size = torch.Size(spec.shape).numel() * 4
        found[spec.name] = memory[spec.offset : spec.offset + size].numpy().tobytes()
    return found


def content_of_checkpoint(number: int, boxes: Sequence[Box] = BOXES) -> dict[str, bytes]:
    """Return the expected bytes of boxes."""
    tensors = checkpoint(number)
    return {each.name: elements(tensors[each.tensor], each).contiguous().numpy().tobytes() for each in boxes}


def test_a_target_forks_boxes(rfork_process: StartRfork, start_seed: StartBoxSeed) -> None:
    """With a planner process: the target finds the seed by its layout, and the image of the boxes by its own."""
    ready = r'"event": ?"ready"'
    environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5"}
    planner = rfork_process("planner", "--port", "0", "--json", until=ready, environment=environment)
    url = json.loads(planner.wait_for(rf"^.*{ready}.*$").group())["url"]
    source = InstanceSettings(planner=url, transports=HTTP, node_name="source")
    target = InstanceSettings(planner=url, transports=HTTP, node_name="target", drain_timeout_s=0)
    rank = start_seed(source)
    assert rank.seed.wait_registered(SOON_S)

    encoded_map = query_source(rank.seed.report(), target, soon(), lambda peer, until: peer.placement(until))
    opened = query_source(
        rank.seed.report(), target, soon(), lambda peer, until: peer.open_boxes(encode_boxes(BOXES), until)
    )
    tensors = allocate_boxes(BOXES)
    layout = image_from_tensors(tensors).layout
    assert layout.layout_id == opened.layout_id

    identity = InstanceIdentity(opened.model, version=opened.version, replica="boxes-target")
    report = ForkSession(
        module_of(tensors), identity, target, Network.of(target), ForkOptions(like=layout)
    ).run()  # fmt: skip
    assert report.seed is not None
    report.seed.close()
    assert "forked" == report.outcome
    weights = checkpoint()
    assert [] == [each.name for each in BOXES if not tensors[each.name].equal(elements(weights[each.tensor], each))]
    assert "scale" not in {row.own for row in PlacementMap.from_bytes(encoded_map) if not row.operation}


def test_an_image_of_boxes_describes_itself(rank: BoxSeed) -> None:
    """Its model, version and layout, which depends on the boxes only."""
    opened = open_boxes(rank)
    assert BoxImage(f"{MODEL}#boxes", "v1", expected_layout_id(), sum(each.byte_count for each in BOXES)) == opened
    assert content_of_checkpoint(1) == content_of(opened_seed(rank))


def test_the_placement_map_is_sent(rank: BoxSeed) -> None:
    """It arrives over gRPC as it was recorded."""
    peer = client(rank.seed)
    assert rank.placement_map == PlacementMap.from_bytes(peer.placement(soon()))
    peer.close()


def test_a_placement_map_in_many_parts(rank: BoxSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map that does not fit one message is sent in several."""
    monkeypatch.setattr(codec, "PLACEMENT_PART_BYTES", 100)
    peer = client(rank.seed)
    assert rank.images.map_bytes == peer.placement(soon())
    peer.close()


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (box("down", columns=(200, 300)), r"down\[0:512,200:300\].*no source has down\[0:512, 256:300\]"),
        (box("scale"), r"scale\[0:512,0:512\]"),
        (box("unknown"), r"unknown\[0:512,0:512\]"),
        (box("q")._replace(dtype="float64", itemsize=8), r"q\[0:512,0:512\].*float64.*float32"),
    ],
    ids=["half missing", "computed", "unknown tensor", "other dtype"],
)
def test_a_box_that_is_not_here_is_refused_by_name(rank: BoxSeed, wanted: Box, reason: str) -> None:
    """The error names the box, and no memory is kept for the other ones."""
    with pytest.raises(LayoutMismatch, match=reason):
        open_boxes(rank, box("v"), wanted)
    assert {} == rank.images._images


def test_an_invalid_request_is_refused(rank: BoxSeed) -> None:
    """Bytes that are no list of boxes are an error of the target."""
    peer = client(rank.seed)
    with pytest.raises(LayoutMismatch, match="invalid"):
        peer.open_boxes(b"no boxes", soon())
    peer.close()


def test_a_request_without_boxes_is_refused(rank: BoxSeed) -> None:
    """There is no image without tensors."""
    peer = client(rank.seed)
    with pytest.raises(LayoutMismatch, match="no box"):
        peer.open_boxes(encode_boxes(()), soon())
    peer.close()


def test_a_request_in_many_parts(rank: BoxSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of boxes that does not fit one message is sent in several."""
    monkeypatch.setattr(codec, "BOXES_PART_BYTES", 10)
    assert expected_layout_id() == open_boxes(rank).layout_id


def test_a_request_that_is_too_large_is_refused(rank: BoxSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the source, whatever the client checks."""
    monkeypatch.setattr(codec, "MAX_BOXES_BYTES", 100_000)
    parts = (peer_pb2.OpenBoxesRequest(content=bytes(60_000)) for _ in range(2))
    metadata = (("authorization", f"Bearer {token(rank.seed)}"),)
    with grpc.insecure_channel(rank.seed.report().address) as channel, pytest.raises(grpc.RpcError) as caught:
        peer_pb2_grpc.PeerStub(channel).OpenBoxes(parts, timeout=SOON_S, metadata=metadata)
    assert grpc.StatusCode.INVALID_ARGUMENT is caught.value.code()


def test_every_request_that_ends_lets_another_one_begin(
    start_seed: StartBoxSeed, gathers: Gathers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are limited: one that is invalid, refused or abandoned must not count for ever."""
    monkeypatch.setattr(servicer, "MAX_OPENINGS", 1)
    rank = start_seed()
    peer = client(rank.seed)
    with pytest.raises(LayoutMismatch):
        peer.open_boxes(b"no boxes", soon())
    with pytest.raises(LayoutMismatch):
        open_boxes(rank, box("unknown"), peer=peer)
    abandoned = threading.Event()
    gathers.allocating = lambda: abandoned.wait(SOON_S)
    with pytest.raises(SourceTimeout):
        peer.open_boxes(encode_boxes(BOXES), time.monotonic() + 0.5)
    abandoned.set()
    assert expected_layout_id(box("v")) == open_boxes(rank, box("v"), peer=peer).layout_id
    peer.close()


def test_peers_in_one_process(rank: BoxSeed) -> None:
    """The peer service for tests sends maps and opens boxes too, with a lease."""
    peers = InMemoryPeers()
    address = peers.serve(rank.seed)
    peer = peers.dial(address, lambda: token(rank.seed))
    assert rank.images.map_bytes == peer.placement(soon())
    assert expected_layout_id() == peer.open_boxes(encode_boxes(BOXES), soon()).layout_id
    unauthenticated = peers.dial(address, lambda: "")
    with pytest.raises(LeaseRejected):
        unauthenticated.placement(soon())
    with pytest.raises(LeaseRejected):
        unauthenticated.open_boxes(encode_boxes(BOXES), soon())


def test_concurrent_requests_open_one_image(rank: BoxSeed, gathers: Gathers) -> None:
    """The boxes are gathered once, for all requests and whatever their order."""
    reordered = (*BOXES[1:], BOXES[0])
    requested = threading.Barrier(5)  # the four requests, and one of them that opens the image

    def request(boxes: tuple[Box, ...]) -> BoxImage:
        threading.Thread(target=requested.wait).start()
        return rank.images.open(boxes)

    gathers.allocating = requested.wait
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(request, (BOXES, reordered, BOXES, reordered)))
    assert 1 == len(set(images))
    assert 1 == len(gathers.images)


def test_a_second_request_finds_the_image(rank: BoxSeed, gathers: Gathers) -> None:
    """A later target reads the same image."""
    first = open_boxes(rank)
    assert first == open_boxes(rank)
    assert 1 == len(gathers.images)


def test_other_calls_are_answered_while_an_image_is_opened(rank: BoxSeed, gathers: Gathers) -> None:
    """The event loop and the threads of channels stay free; a caller that gives up loses nothing."""
    started, released = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert released.wait(SOON_S)

    gathers.allocating = wait
    peer = client(rank.seed)
    layout = rank.seed.image.layout
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(peer.open_boxes, encode_boxes(BOXES), time.monotonic() + 1.0)
        assert started.wait(SOON_S)
        assert rank.seed.manifest == peer.manifest(layout, soon())
        channel_id, endpoint = peer.open(layout.layout_id, HTTP, soon())
        assert "http" == endpoint.transport
        peer.close_channel(channel_id, soon())
        with pytest.raises(SourceTimeout):
            request.result()
        released.set()
        assert expected_layout_id() == open_boxes(rank, peer=peer).layout_id
    peer.close()
    assert 1 == len(gathers.images)


def test_boxes_are_served_while_others_are_gathered(rank: BoxSeed, gathers: Gathers) -> None:
    """As chunks of a provisional image; the planner may assign all of them."""
    gathered, released = threading.Event(), threading.Event()

    def wait() -> None:
        if gathers.count == 2:
            gathered.set()
            assert released.wait(SOON_S)

    gathers.before = wait
    open_boxes(rank, box("q"), box("v"))
    assert gathered.wait(SOON_S)
    box_seed = gathers.images[-1].opened.result()
    assert ((0, 1),) == box_seed.chunk_state.verified
    assert box_seed.report().weights_id is None
    assert ((0, 2),) == box_seed.report().verified
    assert box_seed.report().provisional_id == box_seed.chunk_state.provisional_id
    released.set()
    assert gathers.failure() is None
    assert ((0, 2),) == box_seed.chunk_state.verified
    assert box_seed.image.manifest() == box_seed.manifest
    assert "serving" == box_seed.report().state


def test_a_gather_waits_for_the_engines_steps(rank: BoxSeed, gathers: Gathers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It requests every byte from the limiter of the seed's latency, as senders do."""
    granted: list[int] = []

    def acquire(_: Seed, max_bytes: int) -> int:
        granted.append(min(max_bytes, 1000))
        return granted[-1]

    monkeypatch.setattr(Seed, "acquire_copy", acquire)
    open_boxes(rank)
    assert gathers.failure() is None
    assert sum(box.byte_count for box in BOXES) == sum(granted)


def test_an_idle_image_is_closed(start_seed: StartBoxSeed, gathers: Gathers) -> None:
    """After its idle time; its port is closed, and its memory is available for others."""
    rank = start_seed(memory_bytes=1 << 19)
    open_boxes(rank, box("q", columns=HALF))
    address = opened_seed(rank).report().address

    rank.passed_s += BOX_IDLE_S / 2
    rank.images.close_idle()
    assert address == opened_seed(rank).report().address

    rank.passed_s += BOX_IDLE_S / 2
    rank.images.close_idle()
    peer = PeerClient(address, lambda: "", rank.seed.settings.tls)
    with pytest.raises(SourceUnavailable):
        peer.renew(soon())
    peer.close()
    open_boxes(rank, box("v", columns=HALF))
    assert 2 == len(gathers.images)


def test_memory_is_freed_without_the_garbage_collector(
    start_seed: StartBoxSeed, gathers: Gathers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of an idle image, of a gather that fails, and of an image whose seed does not start."""
    allocated: list[weakref.ref[mmap.mmap]] = []

    def allocate(size: int) -> torch.Tensor:
        mapping = mmap.mmap(-1, size)
        allocated.append(weakref.ref(mapping))
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def fail() -> None:
        raise ValueError("broken")

    monkeypatch.setattr(box_images, "allocate_host", allocate)
    rank = start_seed()
    gc.disable()
    try:
        rank.images.open(BOXES)
        assert gathers.failure() is None
        rank.passed_s += BOX_IDLE_S
        rank.images.close_idle()
        assert [None] == [mapping() for mapping in allocated]

        gathers.before = fail
        rank.images.open(BOXES)
        assert "broken" == str(gathers.failure())
        assert [None] * 2 == [mapping() for mapping in allocated]

        gathers.before = lambda: None
        monkeypatch.setattr(Seed, "start", lambda seed: fail())
        with pytest.raises(ValueError, match="broken"):
            rank.images.open(BOXES)
        assert [None] * 3 == [mapping() for mapping in allocated]
    finally:
        gc.enable()


def test_a_failed_gather_does_not_keep_the_weights(rank: BoxSeed, gathers: Gathers) -> None:
    """An engine that releases its weights gets their memory, although the error of a request still exists."""
    loaded, _ = rank_image(1)
    mappings = {name: mmap.mmap(-1, tensor.nbytes) for name, tensor in loaded.items()}
    own = {
        name: torch.frombuffer(mappings[name], dtype=torch.float32).view(tensor.shape).copy_(tensor)
        for name, tensor in loaded.items()
    }
    memory = [weakref.ref(mapping) for mapping in mappings.values()]
    rank.seed.resume(image_from_tensors(own))
    gathers.before = rank.seed.fence
    gc.disable()
    try:
        rank.images.open(BOXES)
        failure = gathers.failure()
        assert isinstance(failure, SourceWeightsChanged)
        assert failure.__traceback__ is not None
        rank.seed.suspend()
        del own, mappings
        assert [None] * 3 == [mapping() for mapping in memory]
    finally:
        gc.enable()


def test_a_request_keeps_an_image(rank: BoxSeed, gathers: Gathers) -> None:
    """The idle time begins with the last request or reader."""
    open_boxes(rank)
    assert gathers.failure() is None
    rank.passed_s += BOX_IDLE_S * 0.75
    open_boxes(rank)
    rank.passed_s += BOX_IDLE_S * 0.75
    rank.images.close_idle()
    open_boxes(rank)
    assert 1 == len(gathers.images)


def test_an_image_with_readers_is_kept(rank: BoxSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they read."""
    open_boxes(rank)
    opened_seed(rank)
    monkeypatch.setattr(Seed, "has_readers", property(lambda seed: True))
    rank.passed_s += 2 * BOX_IDLE_S
    rank.images.close_idle()
    assert not opened_seed(rank).image.is_released


def test_a_fence_during_a_gather_discards_it(rank: BoxSeed, gathers: Gathers) -> None:
    """The weights are about to change: what was gathered may be mixed."""
    gathers.before = rank.seed.fence
    open_boxes(rank)
    assert isinstance(gathers.failure(), SourceWeightsChanged)
    assert {} == rank.images._images


def test_weights_that_are_updated_during_a_gather_are_never_mixed(rank: BoxSeed, gathers: Gathers) -> None:
    """The image is closed before any box is served; the next one has all boxes and the version of the new weights."""
    ready, changed = threading.Event(), threading.Event()

    def update() -> None:
        assert ready.wait(SOON_S)
        with rank.seed.updating("v2"):
            for name, tensor in rank_image(2)[0].items():
                rank.own[name].copy_(tensor)
            changed.set()

    def wait_until_changed() -> None:
        ready.set()
        assert changed.wait(SOON_S)

    gathers.before = wait_until_changed
    updater = threading.Thread(target=update)
    updater.start()
    open_boxes(rank)
    updater.join()
    assert isinstance(gathers.failure(), SourceWeightsChanged)
    assert () == gathers.images[-1].opened.result().chunk_state.verified
    assert {} == rank.images._images

    assert "v2" == open_boxes(rank).version
    assert content_of_checkpoint(2) == content_of(opened_seed(rank))


def test_an_update_closes_the_images(rank: BoxSeed) -> None:
    """Its boxes lie in the weights; a request after the update opens an image of the new ones."""
    open_boxes(rank)
    first = opened_seed(rank)
    with rank.seed.updating("v2"):
        assert first.image.is_released
        assert first.suspended
        for name, tensor in rank_image(2)[0].items():
            rank.own[name].copy_(tensor)
    assert "v2" == open_boxes(rank).version
    assert content_of_checkpoint(2) == content_of(opened_seed(rank))


def test_contiguous_boxes_are_not_copied(start_seed: StartBoxSeed) -> None:
    """They are served from the weights' memory, so they need no other."""
    rank = start_seed(memory_bytes=1)
    boxes = (box("q", (3, 7)), box("v"))
    open_boxes(rank, *boxes)
    box_seed, own = opened_seed(rank), rank.own["qkv"]
    assert content_of_checkpoint(1, boxes) == content_of(box_seed)
    segments = box_seed.image.segments(0, box_seed.image.layout.image_bytes)
    begin, end = own.data_ptr(), own.data_ptr() + own.nbytes
    assert all(begin <= segment.address <= end - segment.length for segment in segments)


def test_images_do_not_keep_suspended_weights(rank: BoxSeed, gathers: Gathers) -> None:
    """An engine that releases its weights gets their memory, although boxes of them were served."""
    loaded, _ = rank_image(1)
    mapping = mmap.mmap(-1, loaded["qkv"].nbytes)
    own = {**loaded, "qkv": torch.frombuffer(mapping, dtype=torch.float32).view(-1, SIZE).copy_(loaded["qkv"])}
    memory = weakref.ref(mapping)
    rank.seed.resume(image_from_tensors(own))
    gc.disable()
    try:
        rank.images.open(BOXES)
        assert gathers.failure() is None
        rank.seed.suspend()
        del own, mapping
        assert memory() is None
    finally:
        gc.enable()


def test_changed_bytes_are_found(rank: BoxSeed, gathers: Gathers) -> None:
    """Bytes that were changed without an update are not served; the next requests get the name of the tensor."""
    rank.own["qkv"][-1, -1] += 1
    open_boxes(rank, box("v"))
    assert isinstance(gathers.failure(), SourceCorrupt)
    assert () == gathers.images[-1].opened.result().chunk_state.verified
    assert {} == rank.images._images
    with pytest.raises(SourceCorrupt, match=r"chunk \d+ of the image, with qkv"):
        open_boxes(rank, box("v"))
    with rank.seed.updating("v2"):
        pass
    assert "v2" == open_boxes(rank, box("v")).version


def test_bytes_that_change_during_a_gather_are_found(rank: BoxSeed, gathers: Gathers) -> None:
    """The digests are compared after the copies."""
    gathers.before = lambda: rank.own["qkv"].add_(1)
    open_boxes(rank)
    assert "qkv" in str(gathers.failure())
    assert {} == rank.images._images


def test_memory_is_limited(start_seed: StartBoxSeed) -> None:
    """Requests beyond the limit are refused while other images need the memory."""
    rank = start_seed(memory_bytes=(3 << 18))
    open_boxes(rank, box("q", columns=HALF))
    with pytest.raises(SourceBusy, match="RFORK_MAX_BOX_BYTES"):
        open_boxes(rank, box("v", columns=HALF))
    assert (1 << 18) == open_boxes(rank, box("v", (0, SIZE // 2), HALF)).image_bytes


def test_a_failed_request_returns_its_memory(start_seed: StartBoxSeed, gathers: Gathers) -> None:
    """The limit counts only what is served or gathered."""
    rank = start_seed(memory_bytes=1 << 19)

    def fail() -> None:
        raise RuntimeError("broken")

    gathers.before = fail
    open_boxes(rank, box("q", columns=HALF))
    assert "broken" == str(gathers.failure())
    gathers.before = lambda: None
    assert (1 << 19) == open_boxes(rank, box("q", columns=HALF)).image_bytes


def test_weights_in_other_memory(rank: BoxSeed) -> None:
    """After an engine has moved its weights, boxes are gathered from the new memory; the old one is not kept."""
    rank.seed.suspend()
    with pytest.raises(RforkError):
        open_boxes(rank)
    own, image = rank_image(2)
    rank.seed.resume(image, version=lambda manifest: "v2")
    for tensor in rank.own.values():
        tensor.untyped_storage().resize_(0)
    assert "v2" == open_boxes(rank).version
    assert content_of_checkpoint(2) == content_of(opened_seed(rank))
    assert own["qkv"].data_ptr() in image.regions.addresses


def test_tensors_outside_the_image_are_not_served(start_seed: StartBoxSeed) -> None:
    """Only the bytes of the image are verified: the map does not name others."""
    rank = start_seed()
    outside = {**rank.own, "down": rank.own["down"].clone()}
    rank.images.close()
    rank.images = box_images.BoxImages(
        rank.seed, rank.placement_map, outside, rank.seed.settings, memory_bytes=MEMORY_BYTES
    )
    rank.seed.boxes = rank.images
    assert {"qkv"} == {row.own for row in PlacementMap.from_bytes(rank.images.map_bytes) if not row.operation}
    with pytest.raises(LayoutMismatch, match="down"):
        open_boxes(rank, *BOXES)


def test_an_instance_without_a_map(rank: BoxSeed) -> None:
    """It answers with the reason."""
    boxes, rank.seed.boxes = rank.seed.boxes, None
    rank.seed.no_boxes_reason = "its loader reads values"
    peer = client(rank.seed)
    with pytest.raises(LayoutMismatch, match="no placement map: its loader reads values"):
        peer.placement(soon())
    with pytest.raises(LayoutMismatch, match="no placement map"):
        peer.open_boxes(encode_boxes(BOXES), soon())
    peer.close()
    rank.seed.boxes = boxes


def test_weights_without_a_version(start_seed: StartBoxSeed) -> None:
    """Targets could not know what they are."""
    with pytest.raises(LayoutMismatch, match="no version"):
        open_boxes(start_seed(version=None))


def test_incomplete_weights(rank: BoxSeed) -> None:
    """A fenced seed has no boxes until it publishes."""
    rank.seed.fence()
    with pytest.raises(SourceBusy, match="complete"):
        rank.images.open(BOXES)
    rank.seed.publish()
    assert "v1" == rank.images.open(BOXES).version


def test_a_draining_instance_opens_no_boxes(rank: BoxSeed) -> None:
    """It will exit soon."""
    rank.seed.drain(0)
    with pytest.raises(SourceBusy, match="draining"):
        rank.images.open(BOXES)


def test_closing_the_seed_closes_its_images(start_seed: StartBoxSeed) -> None:
    """Also one that is still gathered."""
    rank = start_seed()
    open_boxes(rank)
    box_seed = opened_seed(rank)
    rank.seed.close()
    assert box_seed.image.is_released
    with pytest.raises(SourceBusy):
        rank.images.open((box("q"),))


def test_closing_ends_a_gather(rank: BoxSeed, gathers: Gathers) -> None:
    """A gather ends at its next step."""
    closing = threading.Thread(target=rank.images.close)

    def close() -> None:
        if gathers.count == 1:
            closing.start()
            assert rank.images._closing.wait(SOON_S)

    gathers.before = close
    rank.images.open((box("q"), box("v")))
    assert "draining" in str(gathers.failure())
    closing.join()
    assert 1 == gathers.count


def test_copies_over_a_transport_for_gpus_are_refused(
    start_seed: StartBoxSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nccl serves no image in host memory. The refusal has the reason, and no memory is kept."""
    rank = start_seed(InstanceSettings(transports=("gloo",)))
    monkeypatch.setattr(GlooBackend, "device", NcclBackend.device)
    with pytest.raises(TransportUnavailable, match=r"nccl serves the memory of one GPU.*cpu"):
        open_boxes(rank, box("q", columns=HALF))
    assert {} == rank.images._images


def test_copies_are_served_over_another_transport_than_those_for_gpus(
    start_seed: StartBoxSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one of those that the instance names."""
    rank = start_seed(InstanceSettings(transports=("gloo", "http")))
    monkeypatch.setattr(GlooBackend, "device", NcclBackend.device)
    open_boxes(rank, box("q", columns=HALF))
    assert ("http",) == opened_seed(rank).report().transports


def test_boxes_share_the_egress_limit(start_seed: StartBoxSeed) -> None:
    """The limit is of the instance: readers of boxes and of its own image share it."""
    rank = start_seed(InstanceSettings(transports=HTTP, max_egress_bytes_per_s=1 << 20))
    open_boxes(rank)
    box_seed = opened_seed(rank)
    assert rank.seed._egress_limiter is box_seed._egress_limiter
    box_seed.close()
    assert not rank.seed._egress_limiter._closed.is_set()
