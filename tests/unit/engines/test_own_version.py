"""Version of the weights that an instance would load itself, or has loaded over its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rfork.engines.version_selection import version_of_files, version_of_reload
from rfork.engines.vllm.compat import loads_from
from rfork.storage.versions.version import version_of

COMMIT = "0123456789" * 4


class ResolvedRevision(str):
    """Like huggingface_hub's: the requested revision with its commit."""

    resolved = COMMIT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint folder."""
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    save_file({"weight": torch.zeros(4)}, model_dir / "model.safetensors")
    return model_dir


def test_a_reload_of_unchanged_files_has_their_version(folder: Path) -> None:
    """The files were equal before and after they were read."""
    assert version_of(folder) == version_of_reload(folder)()


def test_a_reload_of_changing_files_has_no_version(folder: Path) -> None:
    """It is unknown which files were read."""
    after = version_of_reload(folder)
    save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    assert after() is None


def test_a_reload_of_unreadable_files_has_no_version(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reason is logged, and the engine's update continues."""
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    after = version_of_reload(folder)
    assert after() is None
    assert "version of the new weights unknown" in caplog.text


def model_config(model: str, revision: str | None = None, model_weights: str = "") -> SimpleNamespace:
    """Return a configuration like vLLM's."""
    return SimpleNamespace(model=model, revision=revision, model_weights=model_weights)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (model_config("/models/llama"), ("/models/llama", None)),
        (model_config("org/llama", "v2"), ("org/llama", "v2")),
        (model_config("org/llama", ResolvedRevision("main")), ("org/llama", COMMIT)),
        (model_config("/cache/6f2a", None, "s3://bucket/llama"), ("s3://bucket/llama", None)),
        (SimpleNamespace(model="org/llama", revision=None), ("org/llama", None)),
    ],
    ids=["folder", "revision", "resolved", "object store", "older vLLM"],
)
def test_the_location_that_vllm_loads_a_model_from(config: SimpleNamespace, expected: tuple[str, str | None]) -> None:
    """It is a folder, a hub id at the commit that vLLM resolved at its start, or an object store."""
    assert expected == loads_from(config)


def test_a_hub_id_resolved_by_vllm_has_the_version_of_its_commit() -> None:
    """This holds before anything is downloaded."""
    assert f"commit:{COMMIT}" == version_of_files(*loads_from(model_config("org/llama", ResolvedRevision("main"))))
