"""Name of the replica that a process belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed
from torch._C._distributed_c10d import FileStore

from rfork.engines import replica
from rfork.engines.replica import replica_of
from rfork.schema import Rank
from rfork.settings import InstanceSettings

TWO = Rank(tp=1, tp_size=2)


@pytest.fixture(autouse=True)
def _reset_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the state as in a new process."""
    monkeypatch.setattr(replica, "_agreed_names", {})


@pytest.fixture
def other_rank(tmp_path: Path) -> Iterator[str]:
    """A process group whose other rank has already proposed this name."""
    store = FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    default = torch.distributed.distributed_c10d._get_default_store()
    default.compare_set(replica.STORE_KEY, "", "replica-of-the-first")
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
