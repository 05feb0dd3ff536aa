"""The version of the weights that an instance would load by itself, or has loaded over its own."""

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
    """As huggingface_hub's: the revision that was asked for, with its commit."""

    resolved = COMMIT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder."""
    made = tmp_path / "model"
    made.mkdir()
    save_file({"weight": torch.zeros(4)}, made / "model.safetensors")
    return made


def test_a_reload_has_the_version_of_files_that_stayed_as_they_were(folder: Path) -> None:
    """They were the same before they were read and afterwards."""
    assert version_of(folder) == version_of_reload(folder)()


def test_a_reload_of_files_that_changed_meanwhile_has_none(folder: Path) -> None:
    """Nobody knows which were read."""
    after = version_of_reload(folder)
    save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    assert after() is None


def test_a_reload_of_files_that_cannot_be_read_has_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why; the engine's update goes on."""
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    after = version_of_reload(folder)
    assert after() is None
    assert "the version of the new weights is not known" in caplog.text


def model_config(model: str, revision: str | None = None, model_weights: str = "") -> SimpleNamespace:
    """As vLLM's."""
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
def test_where_vllm_loads_a_model_from(config: SimpleNamespace, expected: tuple[str, str | None]) -> None:
    """A folder, a hub id at the commit that vLLM found as it started, or an object store."""
    assert expected == loads_from(config)


def test_a_hub_id_that_vllm_resolved_is_of_its_commit() -> None:
    """Also before anything was downloaded."""
    assert f"commit:{COMMIT}" == version_of_files(*loads_from(model_config("org/llama", ResolvedRevision("main"))))
