"""One checkpoint in a directory, on a web server and in S3: the same tensors by the same calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from pydantic import SecretStr
from safetensors.torch import load_file
from torch import nn

import rfork
from benchmarks.seaweed import SeaweedServer
from rfork.errors import CheckpointError, StorageAccessDenied, StorageChanged, StorageNotFound
from rfork.image.capture import capture
from rfork.settings import StorageSettings
from rfork.storage.blob import HEAD_BYTES
from rfork.storage.checkpoint import Checkpoint, CheckpointChunks
from rfork.storage.location import Location
from rfork.storage.registry import open_store
from tests.storage_server import StorageServer


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> dict[str, bytes]:
    """The tensor files of the tiny model, in several shards."""
    return {path.name: path.read_bytes() for path in tiny_model.iterdir() if "safetensors" in path.name}


@pytest.fixture(params=["file", "http", "s3"])
def stored_checkpoint(
    request: pytest.FixtureRequest, tiny_model: Path, files: dict[str, bytes]
) -> Iterator[tuple[str, StorageSettings]]:
    """The URI of the checkpoint in each storage backend, and the settings that reach it."""
    with _open_stored_checkpoint(request, tiny_model, files) as made:
        yield made


@contextmanager
def _open_stored_checkpoint(
    request: pytest.FixtureRequest, tiny_model: Path, files: dict[str, bytes]
) -> Iterator[tuple[str, StorageSettings]]:
    match request.param:
        case "file":
            yield str(tiny_model), StorageSettings()
        case "http":
            with StorageServer({f"tiny/{name}": data for name, data in files.items()}) as server:
                yield server.url("tiny/"), StorageSettings()
        case _:
            seaweed: SeaweedServer = request.getfixturevalue("s3")
            settings = seaweed.settings()
            with closing(open_store(Location.parse("s3://models/load-anywhere/"), settings)) as store:
                for name, data in files.items():
                    with store.write(name) as writer:
                        writer.write([memoryview(data)])
            yield "s3://models/load-anywhere/", settings


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, torch.Tensor]:
    """The tensors that safetensors reads from the directory."""
    return {name: tensor for path in tiny_model.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> bool:
    return expected.keys() == actual.keys() and all(
        torch.equal(tensor, actual[name]) for name, tensor in expected.items()
    )


class ZeroModule(nn.Module):
    """A module with one parameter per tensor, under the same names."""

    def __init__(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            child: nn.Module = self
            for part in path:
                if part not in child._modules:
                    child.add_module(part, nn.Module())
                child = child.get_submodule(part)
            child.register_parameter(last, nn.Parameter(torch.zeros(tensor.shape, dtype=dtype)))


StoredCheckpoint = tuple[str, StorageSettings]


def test_every_call_returns_the_same(stored_checkpoint: StoredCheckpoint, expected: dict[str, torch.Tensor]) -> None:
    """As a dict, as a stream, individually, into an existing module, and into one without memory."""
    uri, settings = stored_checkpoint
    with rfork.open_tensors(uri, settings=settings) as lazy:
        singly = {name: lazy[name] for name in list(expected)[:3]}
    assert same({name: expected[name] for name in list(expected)[:3]}, singly)
    assert same(expected, rfork.load_tensors(uri, settings=settings))
    assert same(expected, dict(rfork.iter_tensors(uri, settings=settings)))
    module = ZeroModule(expected, torch.bfloat16)
    with rfork.no_init():
        empty = ZeroModule(expected, torch.float32)
    rfork.load(module, uri, settings=settings)
    report = rfork.load(empty, uri, settings=settings)
    assert same(expected, dict(module.state_dict()))
    assert same({name: tensor.float() for name, tensor in expected.items()}, dict(empty.state_dict()))
    assert sum(tensor.nbytes for tensor in expected.values()) == report.bytes


def test_chunks_of_an_image(stored_checkpoint: StoredCheckpoint, expected: dict[str, torch.Tensor]) -> None:
    """A cold start reads chunks from any store, and two instances that read one store agree on its origin."""
    uri, settings = stored_checkpoint
    module = ZeroModule(expected, torch.bfloat16)
    image = capture(module)
    checkpoint = Checkpoint.open(uri, settings)
    chunks = CheckpointChunks.open(checkpoint, module, image, [])
    with closing(CheckpointChunks.open(checkpoint, module, image, [])) as other:
        assert chunks.origin == other.origin
        assert chunks.uri == other.uri
    with closing(chunks):
        for begin, end in image.layout.chunks:
            with image.writable(begin, end) as views:
                chunks.read(begin, end, views)
    assert same(expected, dict(module.state_dict()))


def test_a_missing_checkpoint_is_one_line(stored_checkpoint: StoredCheckpoint) -> None:
    """A directory without a checkpoint, and a missing file, are reported in one line."""
    uri, settings = stored_checkpoint
    with pytest.raises(CheckpointError, match=r"nothing to load at .*nowhere/"):
        rfork.load_tensors(f"{uri.rstrip('/')}/nowhere/", settings=settings)
    with pytest.raises(StorageNotFound):
        rfork.load_tensors(f"{uri.rstrip('/')}/nowhere.safetensors", settings=settings)


def test_a_file_replaced_during_the_read_is_an_error(files: dict[str, bytes]) -> None:
    """Halves of two files are no model: the read fails."""
    served = StorageServer({f"m/{name}": data for name, data in files.items()})
    with served as server, rfork.open_tensors(server.url("m/")) as tensors:
        first = next(iter(tensors))
        for name, data in files.items():
            server.put(f"m/{name}", data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(StorageChanged):
            tensors[first]


def test_a_server_that_refuses_access(files: dict[str, bytes]) -> None:
    """Without its token nothing is found, and the error names the reason."""
    with StorageServer({f"m/{name}": data for name, data in files.items()}, token="secret") as server:
        with pytest.raises(StorageAccessDenied):
            rfork.load_tensors(server.url("m/"))
        found = rfork.load_tensors(server.url("m/"), settings=StorageSettings(http_token=SecretStr("secret")))
    assert len(found) > 10


def test_only_requested_tensors_are_transferred(files: dict[str, bytes], expected: dict[str, torch.Tensor]) -> None:
    """Some names of a remote checkpoint cost their bytes plus the headers'."""
    with StorageServer({f"m/{name}": data for name, data in files.items()}) as server:
        name = max(expected, key=lambda name: expected[name].nbytes)
        with rfork.open_tensors(server.url("m/"), settings=StorageSettings(hedge_ratio=0)) as tensors:
            before = len(server.requests_matching())
            tensors[name]
            ranges = [seen.range.removeprefix("bytes=").split("-") for seen in server.requests_matching()[before:]]
        requested_bytes = sum(int(last) - int(first) + 1 for first, last in ranges)
        prefetched_bytes = expected[name].nbytes - requested_bytes
        assert 1 == len(ranges)
        assert 0 <= prefetched_bytes < HEAD_BYTES
