"""Other common loaders, each used as its documentation recommends.

Each loader's function is the `Prepare` of a contender: it imports the library in the process that runs it, before the
clock starts. If a loader cannot write into existing memory, its tensors are copied one by one as they arrive. Mapped
tensors are cloned if the process is to own them.

Settings tried, into new tensors of a dense image, on two cores with other load, twice each:

* Run:ai with 4, 8 and 16 threads, with its own choice of strategy and buffered, and its two io_uring strategies with 8
  threads. Kept: its own choice with 8 threads on a cold disk, and buffered with 16 threads, 2.5 times as fast, from the
  page cache.
* fastsafetensors with 2, 4 and 16 threads, bound to a NUMA node and not. Kept: the defaults.
* tensorizer with 1, 2 and 4 readers. Kept: the defaults.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.storage.cases import ALL_DESTINATIONS, SIDE_ROUNDS, Bucket, Load, LoadTarget, Medium, StorageContender
from benchmarks.storage.images import Tensors
from rfork.errors import RforkError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
CONNECTIONS = 8


def contenders() -> list[StorageContender]:
    """Return the other loaders, in the order of the table."""
    # Run:ai's own choice of strategy bypasses the page cache, so it is no faster when everything is cached.
    cold = {"RUNAI_STREAMER_CONCURRENCY": "8"}
    warm = {"RUNAI_STREAMER_CONCURRENCY": "16", "RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}
    in_s3 = {"RUNAI_STREAMER_CONCURRENCY": "16", "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    everywhere: tuple[Medium, ...] = ("cold", "warm", "s3")
    side_contenders = partial(StorageContender, max_rounds=SIDE_ROUNDS)
    return [
        StorageContender(
            "safetensors load_file", partial(load_file, backend="mmap"), destinations=ALL_DESTINATIONS, always=True
        ),
        side_contenders("safetensors pread", partial(load_file, backend="pread"), destinations=("fresh",)),
        StorageContender("safetensors safe_open", safe_open, destinations=("existing",)),
        StorageContender("Run:ai", run_ai, media=("cold",), environment=cold, always=True),
        StorageContender("Run:ai", run_ai, media=("warm",), environment=warm, always=True),
        StorageContender("Run:ai", run_ai, media=("s3",), environment=in_s3, always=True),
        side_contenders("fastsafetensors", fastsafetensors),
        side_contenders("torch.load mmap", torch_load, destinations=("fresh",), reads="pickled"),
        StorageContender("tensorizer", tensorizer, reads="tensorizer"),
        StorageContender(
            "tensorizer",
            tensorizer,
            media=("s3",),
            destinations=("fresh",),
            reads="tensorizer",
        ),
        StorageContender(
            "tensorizer, hashes",
            partial(tensorizer, verify=True),
            media=everywhere,
            destinations=("existing",),
            reads="tensorizer",
            verified=True,
        ),
        StorageContender("InstantTensor", instanttensor, media=("cold",), destinations=("fresh",)),
        StorageContender("boto3, safetensors", boto3_load, media=("s3",)),
        StorageContender("boto3 to disk", boto3_download, media=("s3",), destinations=("fresh",)),
    ]


def load_named(target: LoadTarget, named: NamedTensors, *, mapped: bool = False) -> Tensors:
    """Deliver all tensors to their destination: copied into existing ones, cloned if `mapped`, or unchanged."""
    if target.destination_tensors is None:
        clone = mapped and target.destination == "fresh"
        return {name: tensor.clone() for name, tensor in named} if clone else dict(named)
    for name, tensor in named:
        target.destination_tensors[name].copy_(tensor)
    return target.destination_tensors


def load_file(target: LoadTarget, *, backend: str) -> Load:
    """Load with safetensors' own function, file by file; `backend` is `mmap` (its default) or `pread`."""
    from safetensors.torch import load_file as load

    def run() -> Tensors:
        files = (load(path, backend=backend) for path in target.uris("safetensors"))
        return load_named(target, (item for file in files for item in file.items()), mapped=backend == "mmap")

    return run


def safe_open(target: LoadTarget) -> Load:
    """Load with safetensors' own function, tensor by tensor, like engines that load into a model."""
    from safetensors import safe_open as open_file

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for path in target.uris("safetensors"):
            with open_file(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    yield name, file.get_tensor(name)

    return lambda: load_named(target, tensors(), mapped=True)


def run_ai(target: LoadTarget) -> Load:
    """Load with Run:ai Model Streamer, all files in one request.

    The tensors that it yields are views of its ring buffer, so they are copied.
    """
    from runai_model_streamer import SafetensorsStreamer

    def run() -> Tensors:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(target.uris("safetensors"), owned=target.destination_tensors is None)
            return load_named(target, streamer.get_tensors())

    return run


def fastsafetensors(target: LoadTarget) -> Load:
    """Load with fastsafetensors into host memory, which it reads with pread on its own threads."""
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


def tensorizer(target: LoadTarget, *, verify: bool = False) -> Load:
    """Load with tensorizer and its default number of readers; `verify`: check the hashes of every tensor."""
    from tensorizer import TensorDeserializer, stream_io

    bucket = target.bucket

    def open_stream(uri: str) -> io.BufferedIOBase | str:
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
            with TensorDeserializer(open_stream(uri), device="cpu", verify_hash=verify) as file:
                yield from file.items()

    return lambda: load_named(target, tensors())


def instanttensor(target: LoadTarget) -> Load:
    """Load with InstantTensor, whose error states that it does not support CPUs."""
    from instanttensor import safe_open as open_files

    def run() -> Tensors:
        with open_files(target.uris("safetensors"), framework="pt", device="cpu") as file:
            return load_named(target, file.tensors())

    return run


def boto3_load(target: LoadTarget) -> Load:
    """Download in parallel with boto3 into memory, then load the bytes with safetensors."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from safetensors.torch import load

    bucket = _bucket_of(target)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        client = boto3.client("s3")
        config = TransferConfig(max_concurrency=CONNECTIONS)
        for path in target.stored.safetensors:
            data = io.BytesIO()
            client.download_fileobj(bucket.name, bucket.key("safetensors", path.name), data, Config=config)
            yield from load(data.getvalue()).items()

    return lambda: load_named(target, tensors())


def boto3_download(target: LoadTarget) -> Load:
    """Download in parallel with boto3 to disk, then load with safetensors from the page cache."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from safetensors.torch import load_file as load

    bucket = _bucket_of(target)

    def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        client = boto3.client("s3")
        config = TransferConfig(max_concurrency=CONNECTIONS)
        for path in target.stored.safetensors:
            file, key = folder / path.name, bucket.key("safetensors", path.name)
            client.download_file(bucket.name, key, str(file), Config=config)
            yield from load(file, backend="pread").items()
            file.unlink()

    def run() -> Tensors:
        with tempfile.TemporaryDirectory(dir=target.stored.folder) as folder:
            return load_named(target, tensors(Path(folder)))

    return run


def _bucket_of(target: LoadTarget) -> Bucket:
    """Return the bucket to read from. Raises RforkError for another medium."""
    if target.bucket is None:
        raise RforkError("this loader reads only S3")
    return target.bucket
