"""Other common loaders, each used as its documentation recommends.

Each function here is the `Prepare` of a contender: it imports the library in the process that runs, before
the clock starts. A loader that cannot write into existing memory loads, and its tensors are copied one by one
as they arrive; mapped tensors are cloned if they are to be the process's own.

Settings tried, into new tensors of a dense image, on two cores with other load, twice each: Run:ai with 4, 8
and 16 threads, with its own choice and buffered, and its two io_uring strategies with 8 (kept: its own choice
with 8 on a cold disk, buffered with 16 from the page cache, 2.5 times as fast there); fastsafetensors with 2,
4 and 16 threads, bound to a NUMA node and not; tensorizer with 1, 2 and 4 readers. The last two run at their
defaults, as nothing else was clearly faster.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.storage_cases import (
    ALL_DESTINATIONS,
    SIDE_ROUNDS,
    Bucket,
    Load,
    LoadTarget,
    Medium,
    StorageContender,
)
from benchmarks.storage_images import Tensors
from rfork.errors import RforkError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
CONNECTIONS = 8


def load_named(target: LoadTarget, named: NamedTensors, *, mapped: bool = False) -> Tensors:
    """Deliver all tensors to their destination: copied into existing ones, cloned if `mapped`, or unchanged."""
    if target.destination_tensors is None:
        clone = mapped and target.destination == "fresh"
        return {name: tensor.clone() for name, tensor in named} if clone else dict(named)
    for name, tensor in named:
        target.destination_tensors[name].copy_(tensor)
    return target.destination_tensors


def contenders() -> list[StorageContender]:
    """Return every peer, in the order of the table."""
    # Its own choice bypasses the page cache, so it is no faster when everything is cached.
    cold = {"RUNAI_STREAMER_CONCURRENCY": "8"}
    warm = {"RUNAI_STREAMER_CONCURRENCY": "16", "RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}
    in_s3 = {"RUNAI_STREAMER_CONCURRENCY": "16", "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    everywhere: tuple[Medium, ...] = ("cold", "warm", "s3")
    side_contenders = partial(StorageContender, max_rounds=SIDE_ROUNDS)
    return [
        StorageContender(
            "safetensors load_file", partial(load_file, "mmap"), destinations=ALL_DESTINATIONS, quick=True
        ),
        side_contenders("safetensors pread", partial(load_file, "pread"), destinations=("fresh",)),
        StorageContender("safetensors safe_open", safe_open, destinations=("existing",)),
        StorageContender("Run:ai", run_ai, media=("cold",), environment=cold, quick=True),
        StorageContender("Run:ai", run_ai, media=("warm",), environment=warm, quick=True),
        StorageContender("Run:ai", run_ai, media=("s3",), environment=in_s3, quick=True),
        side_contenders("fastsafetensors", fastsafetensors),
        side_contenders("torch.load mmap", torch_load, destinations=("fresh",), reads="pickled"),
        StorageContender("tensorizer", partial(tensorizer, False), reads="tensorizer"),
        StorageContender(
            "tensorizer",
            partial(tensorizer, False),
            media=("s3",),
            destinations=("fresh",),
            reads="tensorizer",
        ),
        StorageContender(
            "tensorizer, hashes",
            partial(tensorizer, True),
            media=everywhere,
            destinations=("existing",),
            reads="tensorizer",
            verified=True,
        ),
        StorageContender("InstantTensor", instanttensor, media=("cold",), destinations=("fresh",)),
        StorageContender("boto3, safetensors", boto3_load, media=("s3",)),
        StorageContender("boto3 to disk", boto3_download, media=("s3",), destinations=("fresh",)),
    ]


def load_file(backend: str, target: LoadTarget) -> Load:
    """Load with safetensors' own function, file by file; `mmap` (its default) or `pread`."""
    from safetensors.torch import load_file as load

    def run() -> Tensors:
        files = (load(path, backend=backend) for path in target.uris("safetensors"))
        return load_named(target, (item for file in files for item in file.items()), mapped=backend == "mmap")

    return run


def safe_open(target: LoadTarget) -> Load:
    """Load with safetensors' own function, tensor by tensor, as engines do that load into a model."""
    from safetensors import safe_open as opened

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for path in target.uris("safetensors"):
            with opened(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    yield name, file.get_tensor(name)

    return lambda: load_named(target, tensors(), mapped=True)


def run_ai(target: LoadTarget) -> Load:
    """Load with Run:ai Model Streamer, all files in one request; yielded tensors are views of its ring, and
    copied.
    """
    from runai_model_streamer import SafetensorsStreamer

    def run() -> Tensors:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(target.uris("safetensors"), owned=target.destination_tensors is None)
            return load_named(target, streamer.get_tensors())

    return run


def fastsafetensors(target: LoadTarget) -> Load:
    """Load with fastsafetensors on a CPU: pread with its own threads."""
    from fastsafetensors import SafeTensorsFileLoader

    def run() -> Tensors:
        loader = SafeTensorsFileLoader(None, "cpu", nogds=True)
        loader.add_filenames({0: target.uris("safetensors")})
        buffers = loader.copy_files_to_device()
        try:
            return load_named(target, ((name, buffers.get_tensor(name)) for name in loader.get_keys()))
        finally:
            buffers.close()
            loader.close()

    return run


def torch_load(target: LoadTarget) -> Load:
    """Load state dicts with torch.load, mapped."""

    def run() -> Tensors:
        files = (torch.load(path, mmap=True, weights_only=True) for path in target.uris("pickled"))
        return load_named(target, (item for file in files for item in file.items()), mapped=True)

    return run


def tensorizer(verify: bool, target: LoadTarget) -> Load:
    """Load with tensorizer and its default number of readers; with `verify` every tensor's hashes are
    checked.
    """
    from tensorizer import TensorDeserializer, stream_io

    bucket = target.bucket

    def opened(uri: str) -> io.BufferedIOBase | str:
        if bucket is None:
            return uri
        stream: io.BufferedIOBase = stream_io.open_stream(
            uri,
            "rb",
            s3_access_key_id=bucket.environment["AWS_ACCESS_KEY_ID"],
            s3_secret_access_key=bucket.environment["AWS_SECRET_ACCESS_KEY"],
            s3_region_name=bucket.environment["AWS_DEFAULT_REGION"],
        )
        return stream

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for uri in target.uris("tensorizer"):
            with TensorDeserializer(opened(uri), device="cpu", verify_hash=verify) as file:
                yield from file.items()

    return lambda: load_named(target, tensors())


def instanttensor(target: LoadTarget) -> Load:
    """Load with InstantTensor; it reports itself that it does not support CPUs."""
    from instanttensor import safe_open as opened

    def run() -> Tensors:
        with opened(target.uris("safetensors"), framework="pt", device="cpu") as file:
            return load_named(target, file.tensors())

    return run


def boto3_load(target: LoadTarget) -> Load:
    """Download in parallel with boto3 into memory, then load the bytes with safetensors."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from safetensors.torch import load

    bucket = _in_s3(target)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        client = boto3.client("s3")
        parallel = TransferConfig(max_concurrency=CONNECTIONS)
        for path in target.stored.safetensors:
            data = io.BytesIO()
            client.download_fileobj(bucket.name, bucket.key("safetensors", path.name), data, Config=parallel)
            yield from load(data.getvalue()).items()

    return lambda: load_named(target, tensors())


def boto3_download(target: LoadTarget) -> Load:
    """Download in parallel with boto3 to disk, then load_file with safetensors, from the page cache."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from safetensors.torch import load_file as load

    bucket = _in_s3(target)

    def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        client = boto3.client("s3")
        parallel = TransferConfig(max_concurrency=CONNECTIONS)
        for path in target.stored.safetensors:
            file, key = folder / path.name, bucket.key("safetensors", path.name)
            client.download_file(bucket.name, key, str(file), Config=parallel)
            yield from load(file, backend="pread").items()
            file.unlink()

    def run() -> Tensors:
        with tempfile.TemporaryDirectory(dir=target.stored.folder) as folder:
            return load_named(target, tensors(Path(folder)))

    return run


def _in_s3(target: LoadTarget) -> Bucket:
    if target.bucket is None:
        raise RforkError("this loader reads only S3")
    return target.bucket
