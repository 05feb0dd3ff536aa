"""Versions of sources: the commit of a Hugging Face model, otherwise the fingerprint of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.settings import hub_cache
from rfork.storage.versions.fingerprint import fingerprint_of
from rfork.storage.versions.version import folder_of, hub_commit, version_of

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40
ID = "acme/tiny"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the folder of a commit in a Hugging Face cache, whose files are links to blobs."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--acme--tiny"
    folder = model / "snapshots" / COMMIT
    (folder / "sub").mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "blobs" / "abc").write_bytes(b"weights")
    (folder / "model.gguf").symlink_to("../../blobs/abc")
    (model / "refs" / "pr").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "refs" / "pr" / "1").write_text(f"{OTHER}\n")
    return folder


@pytest.mark.parametrize("below", [".", "model.gguf", "sub", "sub/missing.safetensors"])
def test_a_path_in_the_cache_has_its_commit(snapshot: Path, below: str) -> None:
    """The folder of a commit and everything below it, linked files included, have the commit."""
    assert COMMIT == hub_commit(snapshot / below)
    assert COMMIT == hub_commit((snapshot / below).as_uri())


@pytest.mark.parametrize(
    ("revision", "expected"),
    [(None, COMMIT), ("main", COMMIT), ("refs", None), ("pr/1", OTHER), (OTHER, OTHER), ("../main", None)],
)
def test_an_id_in_the_cache_has_its_commit(snapshot: Path, revision: str | None, expected: str | None) -> None:
    """A reference is resolved in the cache; a complete commit is its own version."""
    assert expected == hub_commit(ID, revision)


def test_a_cache_may_be_specified(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines may download to another folder."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert hub_commit(ID) is None
    assert COMMIT == hub_commit(ID, cache=tmp_path / "hub")


@pytest.mark.parametrize("source", ["acme/unknown", "../hub", "s3://b/models--a--b/snapshots/" + COMMIT, "a b"])
def test_other_sources_have_no_commit(snapshot: Path, source: str) -> None:
    """Ids outside of the cache, other paths and URIs of object stores have no commit."""
    assert hub_commit(source) is None


def test_a_path_that_leaves_the_cache_has_no_commit(snapshot: Path) -> None:
    """With `..` and links, a path may lead anywhere."""
    assert hub_commit(f"{snapshot}/sub/../model.gguf") is None


def test_a_local_folder_precedes_an_id(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines load a folder with the name of an id."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ID).mkdir(parents=True)
    (tmp_path / ID / "model.gguf").write_bytes(b"own")
    assert hub_commit(ID) is None
    assert fingerprint_of(tmp_path / ID) == version_of(ID)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HOME": "/d"}, "/d/.cache/huggingface/hub"),
    ],
)
def test_the_variables_of_huggingface_hub_define_the_cache(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables of huggingface_hub define the location."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Path(expected) == hub_cache()


def test_the_version_of_a_hub_model_is_its_commit(snapshot: Path) -> None:
    """Path and id have the same version."""
    assert f"commit:{COMMIT}" == version_of(snapshot)
    assert f"commit:{COMMIT}" == version_of(f"{snapshot}/")
    assert f"commit:{COMMIT}" == version_of(ID)
    assert f"commit:{OTHER}" == version_of(ID, revision="pr/1")


def test_an_id_that_is_not_in_the_cache_has_no_version(snapshot: Path) -> None:
    """Its version is known after the download."""
    assert version_of("acme/unknown") is None


def test_one_file_of_a_hub_model_has_its_fingerprint(snapshot: Path) -> None:
    """A commit of a repository may contain several sets of weights."""
    assert fingerprint_of(snapshot / "model.gguf") == version_of(snapshot / "model.gguf")


def test_the_version_of_other_folders_is_their_fingerprint(tmp_path: Path) -> None:
    """A folder of weight files has a fingerprint; one without has no version."""
    assert version_of(tmp_path) is None
    (tmp_path / "model.gguf").write_bytes(b"weights")
    assert fingerprint_of(tmp_path) == version_of(tmp_path)


def test_the_folder_of_an_id_is_in_the_cache(snapshot: Path) -> None:
    """None if its commit is not there."""
    assert snapshot == folder_of(ID)
    assert folder_of(ID, OTHER) is None


def test_the_folder_of_local_files(tmp_path: Path) -> None:
    """Itself, or that of a file."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    assert tmp_path == folder_of(tmp_path)
    assert tmp_path == folder_of(file)


def test_remote_files_have_no_folder() -> None:
    """They are not on this host."""
    assert folder_of("s3://bucket/model") is None
