"""Version of the weights that an instance would load itself or has loaded since, and the name of its replica."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed
from safetensors.torch import save_file
from torch._C._distributed_c10d import FileStore

from rfork.engines import identity
from rfork.engines.identity import replica_of, version_of_reload
from rfork.engines.vllm.compat import loads_from
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.storage.versions.version import version_of, version_of_files

TWO = Rank(tp=1, tp_size=2)


@pytest.fixture(autouse=True)
def _reset_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the state as in a new process."""
    monkeypatch.setattr(identity, "_agreed_names", {})


@pytest.fixture
def other_rank(tmp_path: Path) -> Iterator[str]:
    """A process group whose other rank has already proposed this name."""
    store = FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    default = torch.distributed.distributed_c10d._get_default_store()
    default.compare_set(identity.STORE_KEY, "", "replica-of-the-first")
    yield "replica-of-the-first"
    torch.distributed.destroy_process_group()


def test_several_ranks_agree_on_the_first_name(other_rank: str) -> None:
    """They use the store of their process group."""
    assert other_rank == replica_of(InstanceSettings(), TWO)


def test_a_single_rank_draft_belongs_to_the_replica_of_its_model(other_rank: str) -> None:
    """Each rank of the main model has a copy of the draft."""
    replica_of(InstanceSettings(), TWO)
    assert other_rank == replica_of(InstanceSettings(), Rank(role="speculative"))


def test_a_single_rank_model_is_its_own_replica(other_rank: str) -> None:
    """This holds in a process group too: data-parallel copies need not have the same version."""
    assert other_rank != replica_of(InstanceSettings(), Rank())
    assert replica_of(InstanceSettings(), Rank()) == replica_of(InstanceSettings(), Rank())


def test_the_setting_names_the_replica_if_ranks_cannot_agree() -> None:
    """Without a process group and without the setting there is no name."""
    assert "server-7" == replica_of(InstanceSettings(replica="server-7"), TWO)
    assert replica_of(InstanceSettings(), TWO) is None


def test_a_restarted_replica_has_another_name() -> None:
    """It may have another version, so the setting is only a part of the name."""
    name = replica_of(InstanceSettings(replica="server-7"), Rank())
    assert name is not None
    assert name.startswith("server-7-")


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
