"""Contenders of `benchmarks.gpu.pull` without another process: host memory, files, other loaders, digests.

The files are in memory already: in a disk's page cache, just written, or in /dev/shm.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import rfork
from benchmarks.gpu.common import VerificationError, synchronized, timed_on_device
from benchmarks.gpu.pull_target import GpuPullTarget, Tensors, copy_all
from benchmarks.harness import Contender
from rfork import settings
from rfork.errors import RforkError
from rfork.image.memory import Image
from rfork.settings import StorageSettings
from rfork.storage.io.reader import Extent, fill
from rfork.storage.local import LocalStore
from rfork.storage.location import Location

SHM = Path("/dev/shm")
SPARE_BYTES = 1 << 30
MAX_PINNED_FRACTION = 4
"""Reciprocal of the share of host memory that is page-locked at most, for the plain copy from it."""
FILE = "model.safetensors"
Loaded = tuple[Tensors, Callable[[], None]]


@contextmanager
def temporary_folder_in(parent: Path, nbytes: int) -> Iterator[Path]:
    """Make a folder for files of `nbytes`. Raises RforkError if there is too little space."""
    if shutil.disk_usage(parent).free < nbytes + min(SPARE_BYTES, nbytes):
        raise RforkError(f"not enough space in {parent}")
    with TemporaryDirectory(prefix="rfork-gpu-", dir=parent) as folder:
        yield Path(folder)


def pinned(target: GpuPullTarget) -> Contender:
    """Copy from page-locked memory, tensor by tensor: the speed of the copy engine."""
    cuda = target.device.type == "cuda"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cuda and target.bytes > memory // MAX_PINNED_FRACTION:
        raise RforkError("the host has too little memory to lock")
    pinned_memory = torch.empty(target.bytes, dtype=torch.uint8, pin_memory=cuda)
    into = list(target.image.regions)
    out = list(torch.split(pinned_memory, [region.numel() for region in into]))
    copy_all(out, into)
    synchronized(target.device)

    def copy() -> None:
        copy_all(into, out)

    return target.run_checked(copy)


def engine_fill(target: GpuPullTarget, path: Path) -> Contender:
    """Read a snapshot file into the tensors with rfork's reading engine, unverified."""
    chosen = settings.load(StorageSettings)
    store = LocalStore(Location.parse(path.parent), chosen)

    def run() -> None:
        with closing(store.open(path.name)) as blob:
            offset = blob.size - target.bytes
            extents: list[Extent] = []
            for region in target.image.regions:
                extents.append(Extent(blob, offset, region))
                offset += region.numel()
            fill(extents, chosen)

    return target.run_checked(run)


def restored(target: GpuPullTarget, path: Path) -> Contender:
    """Load a snapshot into the module with `rfork.load`: the same engine, and every chunk verified."""

    def run() -> None:
        if not rfork.load(target.module, path).verified:
            raise RforkError("the snapshot was not verified")

    return target.run_checked(run)


def load_file(target: GpuPullTarget, path: Path) -> Contender:
    """Load with safetensors' own function onto the device."""
    from safetensors.torch import load_file as load

    def run() -> Loaded:
        # On the CPU it maps the file and has not read anything yet.
        loaded = load(path, device=str(target.device))
        if target.device.type == "cpu":
            loaded = {name: tensor.clone() for name, tensor in loaded.items()}
        return loaded, _nothing

    return target.run_checked_load(run)


def run_ai(target: GpuPullTarget, path: Path) -> Contender:
    """Load with Run:ai Model Streamer, moving each tensor to the device when it arrives, as engines do."""
    from runai_model_streamer import SafetensorsStreamer

    def run() -> Loaded:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path)])
            return {name: part.to(target.device, copy=True) for name, part in streamer.get_tensors()}, _nothing

    return target.run_checked_load(run)


def fastsafetensors(target: GpuPullTarget, path: Path) -> Contender:
    """Load with fastsafetensors, through host memory."""
    from fastsafetensors import SafeTensorsFileLoader

    def run() -> Loaded:
        loader = SafeTensorsFileLoader(None, str(target.device), nogds=True)
        loader.add_filenames({0: [str(path)]})
        buffers = loader.copy_files_to_device()

        def release() -> None:
            buffers.close()
            loader.close()

        return {name: buffers.get_tensor(name) for name in loader.get_keys()}, release

    return target.run_checked_load(run)


def tensorizer(target: GpuPullTarget, folder: Path) -> Contender:
    """Load with tensorizer at its defaults; it writes and reads its own format."""
    from tensorizer import TensorDeserializer

    path = folder / "model.tensors"
    rfork.save(target.module, path)

    def run() -> Loaded:
        with TensorDeserializer(str(path), device=str(target.device)) as file:
            return dict(file.items()), _nothing

    return target.run_checked_load(run)


def digests(target: GpuPullTarget, original: Image) -> Contender:
    """Compute and compare a manifest of the original, as a seed does."""

    def run() -> float:
        found: tuple[bytes, ...] = ()

        def digest() -> None:
            nonlocal found
            found = original.manifest().digests

        seconds = timed_on_device(digest, target.device)
        if found != target.expected:
            raise VerificationError("the digests")
        return seconds

    return run


def memory_read(target: GpuPullTarget, original: Image) -> Contender:
    """Sum all words: one read of the device's memory."""
    words = [region[: region.numel() // 8 * 8].view(torch.int64) for region in original.regions]

    def read() -> None:
        for part in words:
            part.sum()

    return lambda: timed_on_device(read, target.device)


def _nothing() -> None:
    """Release nothing: there is nothing but the tensors."""
