"""Format detection by a URI's name, the content of its folder, and the first bytes of a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from rfork.errors import CheckpointError, SettingsError, StorageAccessDenied, StorageCorrupt, StorageNotFound
from rfork.image.capture import image_from_tensors
from rfork.image.safetensors_header import header
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage.formats.detect import INDEX, SINGLE, open_checkpoint, open_source
from rfork.storage.location import Location
from tests.unit.storage.recording_store import RecordingBlob, RecordingStore

Files = Mapping[str, bytes]


def named(name: str) -> bytes:
    """Return a file with one tensor of that name."""
    return save({name: torch.ones(2)})


def index(**files: str) -> bytes:
    return json.dumps({"metadata": {"total_size": 8}, "weight_map": files}).encode()


def snapshot() -> bytes:
    image = image_from_tensors({"snapshot": torch.ones(2)})
    with image.readable(0, 8) as views:
        return header(image.layout) + b"".join(bytes(view) for view in views)


UseStore = Callable[[Files], RecordingStore]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> UseStore:
    """Simulate a web server with files at http://models/m/; it cannot be listed."""

    def use(files: Files) -> RecordingStore:
        store = RecordingStore("http://models/m/", files, SettingsError("a web server"))

        def open_store(folder: Location, settings: StorageSettings | None = None) -> RecordingStore:
            return store

        monkeypatch.setattr("rfork.storage.registry.open_store", open_store)
        return store

    return use


FOLDERS: dict[str, tuple[Files, list[str]]] = {
    "an index": ({INDEX: index(a="1.safetensors"), "1.safetensors": named("a"), SINGLE: named("b")}, ["a"]),
    "one file": ({SINGLE: named("b"), "other.safetensors": named("c")}, ["b"]),
    "a snapshot": ({"model-rank-000.safetensors": snapshot(), "other.safetensors": named("c")}, ["snapshot"]),
    "files of any name": (
        {"x.safetensors": named("c"), "y.safetensors": named("d"), "y.txt": b""},
        ["c", "d"],
    ),
}


@pytest.mark.parametrize(("files", "names"), FOLDERS.values(), ids=FOLDERS.keys())
def test_a_folder_is_detected_by_its_content(tmp_path: Path, files: Files, names: list[str]) -> None:
    """The first known name counts, with and without a slash at the end of the folder."""
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for uri in (tmp_path, str(tmp_path), f"{tmp_path}/", tmp_path.as_uri()):
        source = open_source(uri)
        source.close()
        assert names == list(source.specs)


@pytest.mark.parametrize("name", [INDEX, SINGLE, "1.safetensors"])
def test_a_file_can_be_named_directly(tmp_path: Path, name: str) -> None:
    """An index and a file can be named directly."""
    for file in (SINGLE, "1.safetensors"):
        (tmp_path / file).write_bytes(named("a"))
    (tmp_path / INDEX).write_bytes(index(a="1.safetensors"))
    source = open_checkpoint(tmp_path / name)
    source.close()
    assert ["a"] == list(source.specs)


def test_a_file_without_an_extension_is_detected(tmp_path: Path) -> None:
    """The first bytes decide, as for blobs of a Hugging Face cache."""
    (tmp_path / "3f9a").write_bytes(named("a"))
    source = open_source(tmp_path / "3f9a")
    source.close()
    assert ["a"] == list(source.specs)


@pytest.mark.parametrize(
    ("rank", "names"),
    [(None, ["0"]), (Rank(tp=1, tp_size=2), ["1"]), (Rank(tp=1, tp_size=2, pp=1, pp_size=2), ["3"])],
    ids=["the only one", "second of a group", "second stage"],
)
def test_each_rank_opens_its_own_file(tmp_path: Path, rank: Rank | None, names: list[str]) -> None:
    """The number in the file name is the rank."""
    for number in range(4):
        (tmp_path / f"model-rank-{number:03d}.safetensors").write_bytes(named(str(number)))
    source = open_source(tmp_path, rank=rank)
    source.close()
    assert names == list(source.specs)


def test_files_of_other_ranks_are_no_checkpoint(tmp_path: Path) -> None:
    """A folder that lacks the file of this rank is no checkpoint."""
    (tmp_path / "model-rank-001.safetensors").write_bytes(named("a"))
    with pytest.raises(CheckpointError, match=r"contains model-rank-001.safetensors \(1 in total\), but not the"):
        open_source(tmp_path)


@pytest.mark.parametrize("made", [True, False])
def test_an_error_lists_the_expected_names(tmp_path: Path, made: bool) -> None:
    """The error is one line that lists the expected names."""
    folder = tmp_path / "folder"
    if made:
        folder.mkdir()
        (folder / "readme").write_bytes(b"hello, this is no tensor file")
    searched_message = "expected model.safetensors.index.json, model.safetensors, model-rank-000.safetensors and"
    for uri in (folder, folder / "readme"):
        with pytest.raises(CheckpointError, match=rf"nothing to load at .*{uri.name}: {searched_message}"):
            open_source(uri)


def test_a_named_file_that_is_missing_is_not_found(tmp_path: Path) -> None:
    """A file that is named directly is missing; no other name is tried."""
    with pytest.raises(StorageNotFound, match=r"x\.safetensors"):
        open_source(tmp_path / "x.safetensors")


def test_well_known_names_are_requested_from_a_web_server(web: UseStore) -> None:
    """A server that cannot be listed is searched for well-known names."""
    store = web(
        {
            INDEX: index(a="1.safetensors", b="2.safetensors"),
            "1.safetensors": named("a"),
            "2.safetensors": named("b"),
        }
    )
    source = open_source("http://models/m/")
    assert ["a", "b"] == sorted(source.specs)
    source.close()
    assert [True] * 3 == [blob.closed for blob in store.blobs]
    web({"x.safetensors": named("a")})
    with pytest.raises(CheckpointError, match="nothing to load at http://models/m/"):
        open_source("http://models/m/")


def test_a_presigned_url_is_one_file(web: UseStore) -> None:
    """A URL with a query names exactly one file, and no name contains the query."""
    store = web({"get?token=secret": named("a"), "x.safetensors?token=secret": named("b")})
    for name in ("get", "x.safetensors"):
        source = open_source(f"http://models/m/{name}?token=secret")
        source.close()
        assert f"http://models/m/{name}" == source.uri
    assert all(blob.closed for blob in store.blobs)


def test_a_denied_file_raises_access_denied(web: UseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing is found and a request was denied, the error is the denial."""
    web({})

    def denied(self: RecordingStore, name: str, *, front: int = 0) -> RecordingBlob:
        raise StorageAccessDenied("403")

    monkeypatch.setattr(RecordingStore, "open", denied)
    with pytest.raises(StorageAccessDenied, match="403"):
        open_source("s3://bucket/m/")


def test_a_failed_open_closes_all_files(web: UseStore) -> None:
    """If the second of two shards is damaged, the first one is closed."""
    store = web(
        {
            INDEX: index(a="1.safetensors", b="2.safetensors"),
            "1.safetensors": named("a"),
            "2.safetensors": b"x" * 40,
        }
    )
    with pytest.raises(StorageCorrupt, match=r"2\.safetensors"):
        open_source("http://models/m/")
    assert [True] * 3 == [blob.closed for blob in store.blobs]
