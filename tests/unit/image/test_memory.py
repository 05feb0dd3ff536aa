"""The image in memory: segments, views, digests and manifests of the tensors' own bytes; read-only mappings."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rfork
from rfork.errors import TargetError
from rfork.image.capture import capture, image_from_tensors
from rfork.image.digest import digest_bytes
from rfork.image.host_memory import HUGE_PAGE, advise_huge_pages, host_view
from rfork.image.memory import Image, Segment, check_writable, first_overlap
from rfork.net.http_heads import ResponseHead
from rfork.net.response import HttpResponse, ReadTimeout
from rfork.net.stream import ScatterCursor, Stream
from rfork.transport.same_host.memory_file import fill, memory_file

MIB = 1 << 20


def scattered(*sizes: int) -> Image:
    """Return an image of uint8 tensors of random bytes, each with its own storage."""
    generator = torch.Generator().manual_seed(7)
    return image_from_tensors(
        {
            f"t{index}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
            for index, size in enumerate(sizes)
        }
    )


def content(image: Image) -> bytes:
    with image.readable(0, image.layout.image_bytes) as views:
        return b"".join(views)


def test_views_are_the_tensors_own_memory() -> None:
    """Bytes written to the views of a range appear in the tensors, and nothing else changes."""
    tensors = {"a": torch.zeros(4, dtype=torch.uint8), "b": torch.zeros(4, dtype=torch.uint8)}
    with image_from_tensors(tensors).writable(2, 6) as views:
        for view in views:
            view[:] = b"\x09" * view.nbytes
    assert [0, 0, 9, 9] == tensors["a"].tolist()
    assert [9, 9, 0, 0] == tensors["b"].tolist()


def test_views_are_plain_bytes() -> None:
    """The views have format 'B' and together the size of the range."""
    with scattered(10, 20).readable(5, 15) as views:
        assert [("B", 5), ("B", 5)] == [(view.format, view.nbytes) for view in views]


def test_an_exception_leaves_the_block_unchanged() -> None:
    """An exception raised inside a writable block reaches the caller."""
    with pytest.raises(ConnectionError), scattered(8).writable(0, 8):
        raise ConnectionError


def test_neighbours_in_memory_and_image_are_one_segment() -> None:
    """Tensors of one buffer in image order are one segment; in another order they are not."""
    buffer = torch.zeros(12, dtype=torch.uint8)
    address = buffer.data_ptr()
    in_order = image_from_tensors({"a": buffer[:4], "b": buffer[4:8], "c": buffer[8:]})
    assert [Segment(1, address + 1, 10)] == in_order.segments(1, 11)
    crossed = image_from_tensors({"a": buffer[4:8], "b": buffer[:4]})
    assert [Segment(0, address + 4, 4), Segment(4, address, 4)] == crossed.segments(0, 8)


def test_neighbours_of_two_storages_are_one_segment_too() -> None:
    """Adjacent storages (slices of one mapped file) are read as one run."""
    raw = bytearray(range(16))
    one = torch.frombuffer(raw, dtype=torch.uint8, offset=0, count=8)
    two = torch.frombuffer(raw, dtype=torch.uint8, offset=8, count=8)
    image = image_from_tensors({"a": one, "b": two})
    assert [(0, 16)] == [(begin, length) for begin, _, length in image.segments(0, 16)]
    assert bytes(range(16)) == content(image)


def test_an_image_keeps_its_memory_alive() -> None:
    """The image's bytes outlive the tensors it was created from."""
    image = image_from_tensors({"a": torch.full((MIB,), 5, dtype=torch.uint8)})
    torch.zeros(MIB, dtype=torch.uint8)
    assert b"\x05" * MIB == content(image)


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 9), (9, 9)])
def test_ranges_outside_the_image_are_rejected(begin: int, end: int) -> None:
    """Such a range is an error, never a shorter result."""
    with pytest.raises(ValueError, match="not within"):
        scattered(8).segments(begin, end)


def test_an_empty_range_has_no_segments() -> None:
    """An empty range, also at the image's end, has no memory."""
    assert [] == scattered(8).segments(8, 8)
    assert [] == scattered(8).segments(0, 0)


def test_regions_must_match_the_layout_size() -> None:
    """Regions of another size than the layout's are a bug of the caller."""
    with pytest.raises(ValueError, match="8 bytes, the layout 9"):
        Image(scattered(9).layout, [torch.zeros(8, dtype=torch.uint8)])


def test_the_device_is_that_of_the_bytes() -> None:
    """An image of CPU tensors is on the CPU, and so is an empty one."""
    assert "cpu" == scattered(3).device.type
    assert "cpu" == image_from_tensors({}).device.type


def test_the_digest_of_a_chunk_depends_on_its_bytes() -> None:
    """It does not depend on the tensors that contain them."""
    image = scattered(MIB - 5, 700_000, 3, MIB)
    full = content(image)
    expected = [digest_bytes([memoryview(full)[begin:end]]) for begin, end in image.layout.chunks]
    assert expected == [image.digest(index) for index in range(len(image.layout.chunks))]


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_a_manifest_has_each_chunk_digest_in_order(threads: int | None) -> None:
    """The manifest is equal for any number of threads, and progress adds up to the image."""
    image = scattered(MIB, MIB, MIB, 17)
    done: list[int] = []
    manifest = image.manifest(done.append, threads)
    assert tuple(image.digest(index) for index in range(4)) == manifest.digests
    assert [MIB, MIB, MIB, 17] == done


def test_one_flipped_bit_changes_the_weights_id() -> None:
    """A manifest computed after one bit flipped differs only in that chunk."""
    tensor = torch.zeros(3 * MIB, dtype=torch.uint8)
    image = image_from_tensors({"a": tensor})
    before = image.manifest()
    tensor[MIB + 77] ^= 4
    after = image.manifest()
    assert [True, False, True] == [one == two for one, two in zip(before.digests, after.digests, strict=True)]
    assert before.weights_id != after.weights_id


def test_huge_pages_are_requested_for_complete_pages_only() -> None:
    """Advice covers the 2 MiB pages completely inside the memory."""
    tensor = torch.empty(5 * HUGE_PAGE, dtype=torch.uint8)
    assert advise_huge_pages(tensor.data_ptr(), tensor.nbytes) in (0, 4 * HUGE_PAGE, 5 * HUGE_PAGE)
    assert 0 == advise_huge_pages(tensor.data_ptr(), 4096)


def test_no_advice_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge pages are requested only on Linux."""
    monkeypatch.setattr("sys.platform", "darwin")
    assert 0 == advise_huge_pages(0, 1 << 30)


@pytest.fixture
def protected(tmp_path: Path) -> Iterator[torch.Tensor]:
    """Return eight numbers in a read-only mapped file."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors and warns about it
        yield torch.frombuffer(memory, dtype=torch.float32, count=8)


@pytest.fixture
def module(protected: torch.Tensor) -> nn.Module:
    """Return a module with a buffer in read-only memory between two others."""
    layers = nn.Module()
    layers.register_buffer("first", torch.zeros(4))
    layers.register_buffer("mapped", protected)
    layers.register_buffer("other", torch.zeros(4))
    return layers


def test_a_tensor_over_a_read_only_file_is_named(module: nn.Module) -> None:
    """The target is at fault, and the error names the tensor."""
    with pytest.raises(TargetError, match="tensor 'mapped' is in read-only memory"):
        check_writable(capture(module))


def test_ordinary_memory_is_writable() -> None:
    """A normally built model passes."""
    check_writable(capture(nn.Linear(300, 300)))


def test_excluded_tensors_are_not_checked(module: nn.Module) -> None:
    """A tensor that the image excludes is not written."""
    check_writable(capture(module, exclude=["mapped"]))


def test_a_fork_fails_before_it_contacts_the_planner(module: nn.Module) -> None:
    """No planner is contacted, and no source is blamed."""
    with pytest.raises(TargetError, match="'mapped' is in read-only memory"):
        rfork.fork(module, model="m", planner="http://127.0.0.1:9")


def test_a_load_into_read_only_memory_fails(module: nn.Module, tmp_path: Path) -> None:
    """No file is read into read-only memory."""
    path = tmp_path / "model.safetensors"
    save_file({"first": torch.ones(4), "mapped": torch.ones(8), "other": torch.ones(4)}, path)
    with pytest.raises(TargetError, match="'mapped' is in read-only memory"):
        rfork.load(module, path)


class PipeStream:
    """A stream that reads from a pipe like a socket stream."""

    def receive_into(self, cursor: ScatterCursor, max_bytes: int, timeout: float) -> int:
        reading, writing = os.pipe()
        try:
            os.write(writing, bytes(max_bytes))
            return os.readv(reading, cursor.window(max_bytes, 1))
        finally:
            os.close(reading)
            os.close(writing)


def test_http_does_not_blame_the_source(protected: torch.Tensor) -> None:
    """Memory that the kernel cannot write (EFAULT) is the target's fault."""
    cursor = ScatterCursor([host_view(protected.data_ptr(), 32)])
    head = ResponseHead(206, "1.1", {})
    response = HttpResponse(cast(Stream, PipeStream()), ReadTimeout(5.0), head, b"")
    with pytest.raises(TargetError, match="not writable"):
        response.fill(cursor, 32)


def test_shared_memory_does_not_blame_the_source(module: nn.Module, protected: torch.Tensor) -> None:
    """The transport that copies from a source's memory file does not blame the source either."""
    image = capture(module)
    segment = next(one for one in image.segments(0, 64) if one.address == protected.data_ptr())
    descriptor = memory_file()
    os.ftruncate(descriptor.number, 64)
    with pytest.raises(TargetError, match="not writable"):
        fill(image, segment.begin, segment.begin + segment.length, descriptor.number, 0)


def test_the_first_overlap_is_found() -> None:
    """It is the first address in both."""
    merged = ((10, 20), (30, 40))
    extents = [[(0, 10)], [(0, 11)], [(19, 25)], [(20, 30)], [(20, 31)], [(40, 50)], [(5, 50)]]
    expected = [None, 10, 19, None, 30, None, 10]
    assert expected == [first_overlap(extent, merged) for extent in extents]
