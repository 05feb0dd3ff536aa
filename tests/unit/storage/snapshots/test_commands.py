"""`rfork snapshot` on a disk: detection of snapshots, repair of damage, and errors of usage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from rfork.cli.app import app
from rfork.engines import transformers
from rfork.storage.module_io.save import save
from rfork.storage.versions.fingerprint import fingerprint_of

NAME = "model-rank-000.safetensors"
TENSORS = {"a": torch.arange(1000.0)}
RunSnapshot = Callable[..., str]


@pytest.fixture
def run() -> RunSnapshot:
    """Run `rfork snapshot ARGUMENTS`, check the exit code `code`, and return its output."""

    def invoke(*arguments: str | Path, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["snapshot", *map(str, arguments)])
        assert code == done.exit_code, done.output
        assert isinstance(done.exception, SystemExit | None)
        return done.output

    return invoke


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


FOREIGN_FILES = {
    "app": b"binary",
    "app.manifest.json": b'{"name": "pwa"}',
    "notes.manifest.json": b'{"about": "rfork-manifest-v1"}',
    "other.safetensors": b"unrelated",
    "other.safetensors.manifest.json": b'{"format": "theirs"}',
}


def test_other_files_are_no_snapshots(tmp_path: Path, run: RunSnapshot) -> None:
    """Whatever their names are, they are not listed, verified or removed."""
    for name, content in FOREIGN_FILES.items():
        (tmp_path / name).write_bytes(content)
    run("rm", tmp_path, code=6)
    run("rm", tmp_path / "other.safetensors", code=6)
    assert FOREIGN_FILES.keys() == names(tmp_path)
    save(TENSORS, tmp_path)
    listed = json.loads(run("ls", tmp_path, "--json"))["snapshots"]
    assert [(tmp_path / NAME).as_uri()] == [each["uri"] for each in listed]
    assert "removed 1 snapshot" in run("rm", tmp_path)
    run("rm", tmp_path, "--leftovers")
    assert FOREIGN_FILES.keys() == names(tmp_path)


def test_a_damaged_manifest_belongs_to_a_snapshot(tmp_path: Path, run: RunSnapshot) -> None:
    """It is recognised by its rank's name or its content, and can be removed by folder or by name."""
    for name, cut in ((NAME, 1), ("own.safetensors", 60)):
        save(TENSORS, tmp_path / name)
        manifest = tmp_path / f"{name}.manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:cut])
    listed = json.loads(run("ls", tmp_path, "--json"))["snapshots"]
    assert ["is not a manifest"] * 2 == [each["problem"].partition(": ")[0][-17:] for each in listed]
    assert "is not a manifest" in run("ls", tmp_path / NAME)
    run("rm", tmp_path / NAME)
    run("rm", tmp_path)
    assert set() == names(tmp_path)


@pytest.mark.parametrize("shared", [False, True], ids=["file", "shared"])
def test_a_snapshot_without_data_is_damaged(tmp_path: Path, run: RunSnapshot, shared: bool) -> None:
    """Named by its file it is reported as in a listing of its folder."""
    folder = tmp_path / "rev-1"
    save(TENSORS, folder, shared=shared)
    assert "DAMAGED" not in run("ls", folder / NAME)
    data = next((tmp_path / "chunks").glob("*/*")) if shared else folder / NAME
    data.unlink()
    assert "DAMAGED" in run("ls", folder / NAME)
    assert "DAMAGED" in run("ls", folder)


def test_a_damaged_shared_chunk_is_repaired(tmp_path: Path, run: RunSnapshot) -> None:
    """Writing the snapshot again, as `verify` recommends, repairs the chunk for the other snapshot too."""
    for revision in ("rev-1", "rev-2"):
        save(TENSORS, tmp_path / revision, shared=True)
    for chunk in (tmp_path / "chunks").glob("*/*"):
        data = bytearray(chunk.read_bytes())
        data[-1] ^= 1
        chunk.write_bytes(data)
    assert "--check" in run("verify", tmp_path, code=6)
    save(TENSORS, tmp_path / "rev-1", shared=True)
    run("verify", tmp_path, code=6)
    save(TENSORS, tmp_path / "rev-1", shared=True, check=True)
    assert 2 == run("verify", tmp_path).count(" ok: ")


@pytest.mark.parametrize("command", ["ls", "verify", "rm"])
@pytest.mark.parametrize("name", ["plain.safetensors", "none.safetensors", "plain.safetensors/x.safetensors"])
def test_a_missing_snapshot_is_reported(tmp_path: Path, run: RunSnapshot, command: str, name: str) -> None:
    """A plain file, a missing folder and a path below a file are no snapshots."""
    save_file(TENSORS, tmp_path / "plain.safetensors")
    assert f"no snapshot at {(tmp_path / name).as_uri()}" in run(command, tmp_path / name, code=6)
    assert {"plain.safetensors"} == names(tmp_path)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("is a single snapshot", ["rm", "--leftovers", "a.safetensors"]),
        ("No such command 'lss'", ["lss", "/models"]),
        ("read-only", ["write", "http://127.0.0.1:1/models/", "--from", "nowhere"]),
        ("not a valid name", ["write", "model.pt", "--from", "nowhere"]),
        ("--rank cannot be combined with --from", ["write", "models", "--from", "nowhere", "--rank", "0"]),
        ("--check requires --shared", ["write", "models", "--from", "nowhere", "--check"]),
    ],
)
def test_invalid_usage_is_refused_immediately(
    tmp_path: Path, run: RunSnapshot, message: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before any weights are loaded or fetched."""
    monkeypatch.chdir(tmp_path)
    assert message in run(*arguments, code=2)
    assert set() == names(tmp_path)


@pytest.fixture
def tiny_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a folder of weight files that loads as one linear layer."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    monkeypatch.setattr(transformers, "loaded_model", lambda _: torch.nn.Linear(2, 2))
    return folder


def test_a_snapshot_of_a_folder_has_the_version_of_the_folder(
    tmp_path: Path, tiny_folder: Path, run: RunSnapshot
) -> None:
    """It is listed with the fingerprint of the files that it was written from."""
    version = fingerprint_of(tiny_folder)
    assert version is not None
    target = tmp_path / "snapshot"
    assert f"version {version}" in run("write", target, "--from", tiny_folder)
    assert f"version {version}" in run("ls", target)
    assert version == json.loads(run("ls", target, "--json"))["snapshots"][0]["version"]
    assert version == fingerprint_of(target)


def test_a_stated_version_is_recorded(
    tmp_path: Path, tiny_folder: Path, run: RunSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option has precedence over the variable, and the variable over the folder's version."""
    monkeypatch.setenv("RFORK_VERSION", "v1")
    run("write", tmp_path / "a", "--from", tiny_folder)
    run("write", tmp_path / "b", "--from", tiny_folder, "--version", "v2")
    assert "v1" == fingerprint_of(tmp_path / "a")
    assert "v2" == fingerprint_of(tmp_path / "b")


def test_an_unusable_version_is_refused_before_weights_are_loaded(
    tmp_path: Path, tiny_folder: Path, run: RunSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of several lines is an error of usage."""
    monkeypatch.delattr(transformers, "loaded_model")
    assert "RFORK_VERSION" in run("write", tmp_path / "a", "--from", tiny_folder, "--version", "a\nb", code=2)


def test_a_folder_that_changes_during_the_load_is_refused(
    tmp_path: Path, tiny_folder: Path, run: RunSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded version is that of the loaded weights, or there is no snapshot."""

    def loaded_model(folder: Path) -> torch.nn.Module:
        save_file({"a": torch.zeros(7)}, folder / "model.safetensors")
        return torch.nn.Linear(2, 2)

    monkeypatch.setattr(transformers, "loaded_model", loaded_model)
    assert "changed while its weights were loaded" in run("write", tmp_path / "a", "--from", tiny_folder, code=6)
    assert not (tmp_path / "a").exists()
