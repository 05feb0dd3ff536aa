"""Limits of the media for `benchmarks.storage`: no tensors, and the fewest calls that transfer the bytes."""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import torch

from benchmarks.storage.cases import SIDE_ROUNDS, Load, LoadTarget, StorageContender
from benchmarks.storage.images import Tensors
from rfork.errors import RforkError

BLOCK_BYTES = 16 << 20
JOBS, DEPTH = 4, 2
COPIERS, CONNECTIONS = 2, 8
FIO, DIRECT_IO_LIMIT = "limit: fio", "limit: O_DIRECT, huge pages"

Disk = Callable[[Sequence[Path]], tuple[float, int]]
"""Reads files past the page cache with four readers: seconds, and bytes that were read."""
FileRange = tuple[Path, int, int]
"""A file, and the begin and end offset of a range in it."""


def contenders() -> list[StorageContender]:
    """Return the limits that run as loaders do; those of the disk are in `disks`."""
    return [
        StorageContender("limit: preadv", preadv, "limit", media=("warm",), raw=True, always=True),
        StorageContender("limit: memcpy", memcpy, "shown", ("warm",), ("existing",), raw=True, max_rounds=SIDE_ROUNDS),
        StorageContender("limit: ranged GETs", ranged, "limit", media=("s3",), raw=True, always=True),
    ]


def disks() -> dict[str, Disk]:
    """Return the readers that measure the disk: fio if installed, and one with huge pages, which fio lacks."""
    fio = {FIO: lambda paths: _fio(list(split_jobs(paths)))} if shutil.which("fio") else {}
    return {**fio, DIRECT_IO_LIMIT: lambda paths: _direct(list(split_jobs(paths)))}


def split_jobs(paths: Sequence[Path]) -> Iterator[FileRange]:
    """Split the files into JOBS parts of complete blocks: a single file is cut, several are one part each."""
    each = -(-JOBS // len(paths))
    for path in paths:
        blocks = path.stat().st_size // BLOCK_BYTES
        for part in range(each):
            begin, end = (blocks * index // each * BLOCK_BYTES for index in (part, part + 1))
            if end > begin:
                yield path, begin, end


def preadv(target: LoadTarget) -> Load:
    """Read from the page cache with two threads."""
    paths = {path.name: path for path in target.stored.safetensors}

    def read(name: str, offset: int, view: memoryview) -> None:
        descriptor = os.open(paths[name], os.O_RDONLY)
        try:
            done = os.preadv(descriptor, [view], offset)
        finally:
            os.close(descriptor)
        if done != len(view):
            raise RforkError(f"{name} ended too early")

    return _blockwise(target, COPIERS, lambda: read)


def memcpy(target: LoadTarget) -> Load:
    """Copy from this process's own memory with two threads."""
    destination = {
        path.name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        for path in target.stored.safetensors
    }

    def copy(name: str, offset: int, view: memoryview) -> None:
        into = ctypes.addressof(ctypes.c_char.from_buffer(view))
        ctypes.memmove(into, destination[name].data_ptr() + offset, len(view))

    return _blockwise(target, COPIERS, lambda: copy)


def ranged(target: LoadTarget) -> Load:
    """Read presigned URLs with HTTP range requests over eight bare connections, received in place."""
    if target.bucket is None:
        raise RforkError("there is no bucket to read")
    urls = {name: urlsplit(url) for name, url in target.bucket.presigned.items()}

    def connect() -> Callable[[str, int, memoryview], None]:
        first = next(iter(urls.values()))
        connection = socket.create_connection((first.hostname or "", first.port or 80))

        def get(name: str, offset: int, view: memoryview) -> None:
            url = urls[name]
            connection.sendall(
                f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n"
                f"Range: bytes={offset}-{offset + len(view) - 1}\r\n\r\n".encode()
            )
            head = b""
            while b"\r\n\r\n" not in head:
                more = connection.recv(1 << 16)
                if not more:
                    raise RforkError("the server closed the connection")
                head += more
            head, _, begun = head.partition(b"\r\n\r\n")
            if b" 206 " not in head.partition(b"\r\n")[0]:
                raise RforkError(head.partition(b"\r\n")[0].decode("latin-1"))
            view[: len(begun)] = begun
            rest = view[len(begun) :]
            if len(rest) and connection.recv_into(rest, len(rest), socket.MSG_WAITALL) != len(rest):
                raise RforkError("the server closed the connection")

        return get

    return _blockwise(target, CONNECTIONS, connect)


def _blockwise(target: LoadTarget, threads: int, start: Callable[[], Callable[[str, int, memoryview], None]]) -> Load:
    """Read all files block by block: `start` returns a `read(name, offset, view)` for each thread."""
    sizes = {path.name: path.stat().st_size for path in target.stored.safetensors}
    blocks = [(name, offset) for name, size in sizes.items() for offset in range(0, size, BLOCK_BYTES)]

    def run() -> Tensors:
        files = target.destination_tensors or {
            name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()
        }
        views = {name: tensor.numpy().data for name, tensor in files.items()}
        order = iter(blocks)  # one step of an iterator is atomic

        def work(_: int) -> None:
            read = start()
            for name, offset in order:
                read(name, offset, views[name][offset : offset + BLOCK_BYTES])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        return files

    return run


def _fio(parts: Sequence[FileRange]) -> tuple[float, int]:
    jobs = itertools.chain.from_iterable(
        [f"--name=part{index}", f"--filename={path}", f"--offset={begin}", f"--size={end - begin}"]
        for index, (path, begin, end) in enumerate(parts)
    )
    done = subprocess.run(
        [
            "fio", "--output-format=json", "--readonly", "--thread", "--rw=read", "--direct=1",
            "--ioengine=libaio", f"--iodepth={DEPTH}", f"--bs={BLOCK_BYTES}", "--group_reporting", *jobs,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RforkError(f"fio failed: {done.stderr.strip().splitlines()[-1:]}")
    read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    return int(read["runtime"]) / 1e3, int(read["io_bytes"])


def _direct(parts: Sequence[FileRange]) -> tuple[float, int]:
    def read(part: FileRange) -> None:
        path, begin, end = part
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            # Private memory: that of a file cannot use huge pages.
            with mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
                block.madvise(mmap.MADV_HUGEPAGE)
                for offset in range(begin, end, BLOCK_BYTES):
                    if os.preadv(descriptor, [block], offset) != BLOCK_BYTES:
                        raise RforkError(f"{path.name} ended too early")
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(JOBS) as pool:
        began = time.perf_counter()
        list(pool.map(read, parts))
        return time.perf_counter() - began, sum(end - begin for _, begin, end in parts)
