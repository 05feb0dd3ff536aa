"""The name of the replica that a process is a rank of."""

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
    """As in a new process."""
    monkeypatch.setattr(replica, "_agreed_names", {})


@pytest.fixture
def other_rank(tmp_path: Path) -> Iterator[str]:
    """A process group whose other rank has proposed this name before."""
    store = FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    default = torch.distributed.distributed_c10d._get_default_store()
    default.compare_set(replica.STORE_KEY, "", "replica-of-the-first")
    yield "replica-of-the-first"
    torch.distributed.destroy_process_group()


def test_ranks_of_several_agree_on_the_first_one_s_name(other_rank: str) -> None:
    """By the store of their process group."""
    assert other_rank == replica_of(InstanceSettings(), TWO)


def test_a_draft_of_one_rank_is_of_its_model_s_replica(other_rank: str) -> None:
    """Each rank of the main model holds a copy of the draft."""
    replica_of(InstanceSettings(), TWO)
    assert other_rank == replica_of(InstanceSettings(), Rank(role="speculative"))


def test_a_model_of_one_rank_is_a_replica_of_its_own(other_rank: str) -> None:
    """Also in a process group: data-parallel copies need not have one version."""
    assert other_rank != replica_of(InstanceSettings(), Rank())
    assert replica_of(InstanceSettings(), Rank()) == replica_of(InstanceSettings(), Rank())


def test_the_setting_names_the_replica_where_ranks_cannot_agree() -> None:
    """Without a process group; without the setting nothing does."""
    assert "server-7" == replica_of(InstanceSettings(replica="server-7"), TWO)
    assert replica_of(InstanceSettings(), TWO) is None


def test_a_replica_that_starts_again_has_another_name() -> None:
    """Its weights may be of another version then: the setting is a part of the name alone."""
    name = replica_of(InstanceSettings(replica="server-7"), Rank())
    assert name is not None
    assert name.startswith("server-7-")
