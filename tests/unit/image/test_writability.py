"""Tensors over read-only mappings are detected before they are written."""

from __future__ import annotations

import mmap
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rfork
from rfork.errors import TargetError
from rfork.image.capture import capture
from rfork.image.host_memory import host_view
from rfork.image.memory import check_writable, first_overlap
from rfork.transport.http.range_request import HttpLocation, IdleTimeout, read_body_into
from rfork.transport.http.stream import ScatterCursor, Stream
from rfork.transport.shared_memory.file_layout import FileRun
from rfork.transport.shared_memory.memfd import memory_file
from rfork.transport.shared_memory.reader import SharedMemoryReader


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
    idle_timeout = IdleTimeout(HttpLocation.parse("http://127.0.0.1:1/x"), 5.0, time.monotonic() + 5)
    with pytest.raises(TargetError, match="not writable"):
        read_body_into(cast(Stream, PipeStream()), cursor, 32, idle_timeout)


def test_shared_memory_does_not_blame_the_source(module: nn.Module, protected: torch.Tensor) -> None:
    """The transport that copies from a source's memory file does not blame the source either."""
    image = capture(module)
    segment = next(one for one in image.segments(0, 64) if one.address == protected.data_ptr())
    reader = cast(SharedMemoryReader, SimpleNamespace(_image=image))
    descriptor = memory_file()
    os.ftruncate(descriptor.number, 64)
    with pytest.raises(TargetError, match="not writable"):
        SharedMemoryReader._copy(reader, descriptor, FileRun(segment.begin, 0, segment.length))


def test_the_first_overlap_is_found() -> None:
    """It is the first address in both."""
    merged = ((10, 20), (30, 40))
    extents = [[(0, 10)], [(0, 11)], [(19, 25)], [(20, 30)], [(20, 31)], [(40, 50)], [(5, 50)]]
    expected = [None, 10, 19, None, 30, None, 10]
    assert expected == [first_overlap(extent, merged) for extent in extents]
