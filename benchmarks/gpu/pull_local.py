"""What of `benchmarks.gpu.pull` needs no other process: the host's memory, files, other loaders, digests.

Files lie where they are in memory already: on a disk's page cache, just written, or in /dev/shm.
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
from benchmarks.gpu.case import WrongBytes, clocked, settled
from benchmarks.gpu.pull_target import Target, Tensors, copy_all
from benchmarks.harness import Contender
from rfork import settings
from rfork.errors import RforkError
from rfork.image.memory import Image
from rfork.settings import StorageSettings
from rfork.storage.local.files import LocalStore
from rfork.storage.location import Location
from rfork.storage.reading.engine import Extent, fill

SHM = Path("/dev/shm")
SPARE = 1 << 30
MOST_PINNED = 4
"""One part in so many of the host's memory is locked at most, for the plain copy from it."""
FILE = "model.safetensors"
Loaded = tuple[Tensors, Callable[[], None]]


@contextmanager
def folder_in(place: Path, nbytes: int) -> Iterator[Path]:
    """A folder for files of so many bytes. Raises RforkError where there is no room."""
    if shutil.disk_usage(place).free < nbytes + min(SPARE, nbytes):
        raise RforkError(f"no room in {place}")
    with TemporaryDirectory(prefix="rfork-gpu-", dir=place) as folder:
        yield Path(folder)


def pinned(target: Target) -> Contender:
    """Plain copies from page-locked memory, a tensor each: what the copy engine can do."""
    cuda = target.device.type == "cuda"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cuda and target.bytes > memory // MOST_PINNED:
        raise RforkError("the host has too little memory to lock")
    whole = torch.empty(target.bytes, dtype=torch.uint8, pin_memory=cuda)
    into = list(target.image.regions)
    out = list(torch.split(whole, [region.numel() for region in into]))
    copy_all(out, into)
    settled(target.device)

    def copy() -> None:
        copy_all(into, out)

    return target.checked(copy)


def engine_fill(target: Target, path: Path) -> Contender:
    """rfork's reading engine from a snapshot's file into the tensors, nothing verified."""
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

    return target.checked(run)


def restored(target: Target, path: Path) -> Contender:
    """`rfork.load` of a snapshot into the module: the same engine, and every chunk verified."""

    def run() -> None:
        if not rfork.load(target.module, path).verified:
            raise RforkError("the snapshot was not verified")

    return target.checked(run)


def load_file(target: Target, path: Path) -> Contender:
    """safetensors' own, onto the device."""
    from safetensors.torch import load_file as load

    def run() -> Loaded:
        # It maps files for the CPU, and has then read nothing.
        loaded = load(path, device=str(target.device))
        if target.device.type == "cpu":
            loaded = {name: tensor.clone() for name, tensor in loaded.items()}
        return loaded, _nothing

    return target.checked_new(run)


def run_ai(target: Target, path: Path) -> Contender:
    """Run:ai Model Streamer, each tensor to the device as it comes, as engines do."""
    from runai_model_streamer import SafetensorsStreamer

    def run() -> Loaded:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path)])
            return {
                name: part.to(target.device, copy=True) for name, part in streamer.get_tensors()
            }, _nothing

    return target.checked_new(run)


def fastsafetensors(target: Target, path: Path) -> Contender:
    """fastsafetensors, through the host's memory."""
    from fastsafetensors import SafeTensorsFileLoader

    def run() -> Loaded:
        loader = SafeTensorsFileLoader(None, str(target.device), nogds=True)
        loader.add_filenames({0: [str(path)]})
        buffers = loader.copy_files_to_device()

        def release() -> None:
            buffers.close()
            loader.close()

        return {name: buffers.get_tensor(name) for name in loader.get_keys()}, release

    return target.checked_new(run)


def tensorizer(target: Target, folder: Path) -> Contender:
    """tensorizer, at its defaults; it writes and reads its own format."""
    from tensorizer import TensorDeserializer

    path = folder / "model.tensors"
    rfork.save(target.module, path)

    def run() -> Loaded:
        with TensorDeserializer(str(path), device=str(target.device)) as file:
            return dict(file.items()), _nothing

    return target.checked_new(run)


def digests(target: Target, original: Image) -> Contender:
    """A manifest as a seed computes it, of the original, which nobody writes to; compared."""

    def run() -> float:
        found: tuple[bytes, ...] = ()

        def digest() -> None:
            nonlocal found
            found = original.manifest().digests

        seconds = clocked(digest, target.device)
        if found != target.right:
            raise WrongBytes("the digests")
        return seconds

    return run


def memory_read(target: Target, original: Image) -> Contender:
    """The sum of all words: one read of the device's memory."""
    words = [region[: region.numel() // 8 * 8].view(torch.int64) for region in original.regions]

    def read() -> None:
        for part in words:
            part.sum()

    return lambda: clocked(read, target.device)


def _nothing() -> None:
    """There is nothing to let go of but the tensors."""
