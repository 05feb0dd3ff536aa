"""Several versions of one model side by side: each fork gets the right weights."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rfork
from rfork.engines.transformers import loaded_model
from rfork.errors import WrongVersion
from rfork.image.capture import capture
from rfork.image.memory import image_sha256
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.source.seed import Seed
from tests.conftest import StartRfork
from tests.processes import RforkProcess

READY = r'"event": ?"ready"'
ENVIRONMENT = {"RFORK_TRANSPORTS": "http"}
MODEL = "llama"
PAIR = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))

Report = dict[str, object]


def ready(process: RforkProcess) -> dict[str, str]:
    """Return the process's ready event."""
    return cast(dict[str, str], json.loads(process.wait_for(rf"^.*{READY}.*$").group()))


def result(process: RforkProcess) -> Report:
    """The report of a pull that succeeded."""
    assert 0 == process.wait()
    return cast(Report, json.loads(process.stdout))


def with_changed_weight(folder: Path, copy: Path) -> Path:
    """Return a copy of a model folder with different values in one weight."""
    shutil.copytree(folder, copy)
    shard = sorted(copy.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 1
    save_file(tensors, shard, metadata={"format": "pt"})
    return copy


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model twice under one name, with different weights: ``v1/llama`` and ``v2/llama``."""
    root = tmp_path_factory.mktemp("versions")
    first = Path(shutil.copytree(tiny_model, root / "v1" / MODEL))
    return first, with_changed_weight(tiny_model, root / "v2" / MODEL)


def sha256_of(folder: Path) -> str:
    """Return the hash of a folder's tensors, loaded without rfork."""
    return image_sha256(capture(loaded_model(folder)))


class VersionedFleet:
    """A planner, and the commands that use it."""

    def __init__(self, start: StartRfork, port: int) -> None:
        self._start = start
        self._port = port
        self.planner = self._planner()
        self.url = f"http://127.0.0.1:{port}"

    def _planner(self) -> RforkProcess:
        return self._start(
            "planner", "--port", str(self._port), "--json", until=READY,
            environment={"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5"},
        )  # fmt: skip

    def restart_planner(self) -> None:
        """Kill the planner and start an empty one."""
        self.planner.signal(signal.SIGKILL)
        self.planner.wait()
        self.planner = self._planner()

    def seed(self, folder: Path, *more: str) -> dict[str, str]:
        process = self._start(
            "seed", str(folder), "--planner", self.url, "--json", *more, until=READY, environment=ENVIRONMENT
        )
        return ready(process)

    def pull(self, folder: Path, *more: str) -> RforkProcess:
        return self._start(
            "pull", str(folder), "--planner", self.url, "--json", "--sha256", *more, environment=ENVIRONMENT
        )


@pytest.fixture
def fleet(rfork_process: StartRfork, free_port: int) -> VersionedFleet:
    """A fleet with an empty planner."""
    return VersionedFleet(rfork_process, free_port)


def copy_without_weights(folder: Path, copy: Path) -> Path:
    """Return a copy of a model folder without its weights."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*"))
    return copy


def test_new_weights_are_loaded_and_not_forked_from_old_ones(fleet: VersionedFleet, folders: tuple[Path, Path]) -> None:
    """The first target on new files has exactly those weights, and its report has the reason why it did not
    fork.
    """
    fleet.seed(folders[0])
    report = result(fleet.pull(folders[1]))
    assert sha256_of(folders[1]) == report["sha256"]
    assert any("first of version files:" in reason for reason in cast(list[str], report["reasons"]))


@pytest.mark.slow  # logic: tests/unit/planner/test_versions.py
def test_the_same_files_under_two_paths_are_forked(
    fleet: VersionedFleet, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A version does not depend on the path of the files."""
    fleet.seed(folders[0])
    copy = Path(shutil.copytree(folders[0], tmp_path / "elsewhere" / MODEL))
    report = result(fleet.pull(copy))
    assert "forked" == report["outcome"]
    assert ["peer"] == _error_kinds(report)


def _error_kinds(report: Report) -> list[str]:
    sources = cast(list[dict[str, str]], report["sources"])
    return ["peer" if ":" not in source["source_id"] else "storage" for source in sources]


@pytest.mark.slow  # logic: tests/unit/planner/test_versions.py
def test_a_stated_version_is_forked_without_files(
    fleet: VersionedFleet, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two versions are served, and the target names one."""
    for folder, version in zip(folders, ("v1", "v2"), strict=True):
        fleet.seed(folder, "--version", version)
    target = copy_without_weights(folders[0], tmp_path / MODEL)
    report = result(fleet.pull(target, "--version", "v2"))
    assert "v2" == report["version"]
    assert sha256_of(folders[1]) == report["sha256"]


@pytest.mark.slow  # logic: tests/unit/planner/test_version_choices.py
def test_a_target_without_files_and_version_is_refused_where_two_versions_are_served(
    fleet: VersionedFleet, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The error names both."""
    for folder, version in zip(folders, ("v1", "v2"), strict=True):
        fleet.seed(folder, "--version", version)
    pull = fleet.pull(copy_without_weights(folders[0], tmp_path / MODEL))
    code = pull.wait()
    assert code != 0
    assert "2 versions of llama are served (v1, v2)" in pull.transcript()


@pytest.mark.slow  # logic: tests/unit/planner/test_version_choices.py
def test_two_cold_targets_with_different_files_load_separately(
    fleet: VersionedFleet, folders: tuple[Path, Path]
) -> None:
    """They start concurrently under one name, and share nothing."""
    pulls = [fleet.pull(folder) for folder in folders]
    assert [sha256_of(folder) for folder in folders] == [result(pull)["sha256"] for pull in pulls]


@pytest.mark.slow  # logic: tests/unit/planner/test_versions.py
def test_a_checkpoint_that_is_replaced_while_its_seed_runs_is_another_version(
    fleet: VersionedFleet, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A target that starts later on the same folder has the new weights."""
    folder = Path(shutil.copytree(folders[0], tmp_path / MODEL))
    fleet.seed(folder)
    for shard in folders[1].glob("*.safetensors"):
        shutil.copy(shard, folder / f"{shard.name}.new")
        (folder / f"{shard.name}.new").rename(folder / shard.name)
    report = result(fleet.pull(folder))
    assert sha256_of(folders[1]) == report["sha256"]


class OneWeightModel(nn.Module):
    """A module with one weight of a given value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1 << 16,), float(value)))


@pytest.fixture
def settings(fleet: VersionedFleet) -> InstanceSettings:
    """Settings of instances within this process."""
    return InstanceSettings(planner=fleet.url, transports=("http",), deadline_s=60)


@pytest.mark.slow  # logic: tests/unit/planner/test_version_choices.py
def test_a_loader_is_used_where_two_versions_are_served(settings: InstanceSettings) -> None:
    """A target without a stated version gets the loader's weights."""

    def load(module: nn.Module) -> None:
        torch.nn.init.constant_(cast(OneWeightModel, module).weight, 3)

    with (
        serving(OneWeightModel(1), settings),
        serving(OneWeightModel(2), settings),
    ):
        target = OneWeightModel(0)
        report = rfork.fork(target, model="net", loader=load, settings=settings)
        seed = report.seed
        assert seed is not None
        seed.close()
    assert 3 == target.weight[0].item()
    assert "2 versions of net are served" in " ".join(report.reasons)


@pytest.mark.slow  # logic: tests/unit/planner/test_version_choices.py
def test_a_target_without_a_version_adopts_the_only_one_served(settings: InstanceSettings) -> None:
    """Its report names the version."""
    with serving(OneWeightModel(1), settings, "2026-11"):
        target = OneWeightModel(0)
        report = rfork.fork(target, model="net", settings=settings)
        if report.seed is not None:
            report.seed.close()
    assert "2026-11" == report.version
    assert 1 == target.weight[0].item()


@pytest.mark.slow  # logic: tests/unit/planner/test_versions.py
def test_an_updated_seed_has_another_version(settings: InstanceSettings) -> None:
    """Targets of the old version do not get the new weights, and targets of the new one do."""
    module, stale, fresh = OneWeightModel(1), OneWeightModel(0), OneWeightModel(0)
    with serving(module, settings, "v1") as seed:
        with seed.updating(version="v2"):
            torch.nn.init.constant_(module.weight, 2)
        assert seed.wait_report_acked(30)
        old = rfork.fork(stale, model="net", version="v1", loader=lambda it: _fill(it, 1), settings=settings)
        new = rfork.fork(fresh, model="net", version="v2", settings=settings)
        for report in (old, new):
            if report.seed is not None:
                report.seed.close()
    assert "v2" == seed.version
    assert 1 == stale.weight[0].item()
    assert 2 == fresh.weight[0].item()


def _fill(module: nn.Module, value: float) -> None:
    torch.nn.init.constant_(cast(OneWeightModel, module).weight, value)


@contextmanager
def serving(
    module: nn.Module, settings: InstanceSettings, version: str | None = None, rank: Rank | None = None
) -> Iterator[Seed]:
    """Register a seed with the planner before the block begins."""
    with rfork.seed(module, model="net", version=version, rank=rank, settings=settings) as seed:
        assert seed.wait_report_acked(30)
        yield seed


def of_replica(settings: InstanceSettings, name: str) -> InstanceSettings:
    """Return settings for the ranks of one replica."""
    return settings.model_copy(update={"replica": name})


@pytest.fixture
def replicas(fleet: VersionedFleet, settings: InstanceSettings) -> Iterator[None]:
    """A replica of two ranks of version 1."""
    first = of_replica(settings, "one")
    with serving(OneWeightModel(10), first, "v1", PAIR[0]), serving(OneWeightModel(11), first, "v1", PAIR[1]):
        yield


def test_all_ranks_of_a_replica_get_one_version_though_the_planner_is_killed_between_them(
    fleet: VersionedFleet, settings: InstanceSettings, replicas: None
) -> None:
    """The second rank registers with an empty planner, while another version is served too."""
    ranks = [OneWeightModel(0), OneWeightModel(0)]
    target = of_replica(settings, "target")
    reports = [rfork.fork(ranks[0], model="net", rank=PAIR[0], settings=target)]
    fleet.restart_planner()
    second = of_replica(settings, "two")
    with (
        serving(OneWeightModel(20), second, "v2", PAIR[0]),
        serving(OneWeightModel(21), second, "v2", PAIR[1]),
    ):
        reports.append(rfork.fork(ranks[1], model="net", rank=PAIR[1], settings=target))
    for report in reports:
        if report.seed is not None:
            report.seed.close()
    assert [10, 11] == [rank.weight[0].item() for rank in ranks]


@pytest.mark.slow  # logic: tests/unit/planner/test_version_rollouts.py
def test_a_rank_with_other_files_than_its_replica_does_not_start(settings: InstanceSettings, replicas: None) -> None:
    """One server never mixes two versions, whatever its nodes have on disk."""
    target = of_replica(settings, "target")
    report = rfork.fork(OneWeightModel(0), model="net", version="v1", rank=PAIR[0], settings=target)
    with pytest.raises(WrongVersion, match="replica target uses version v1"):
        rfork.fork(
            OneWeightModel(0),
            model="net",
            version="v2",
            rank=PAIR[1],
            loader=lambda it: _fill(it, 1),
            settings=target,
        )
    if report.seed is not None:
        report.seed.close()


@pytest.mark.slow  # logic: tests/unit/planner/test_version_rollouts.py
def test_replicas_that_start_during_a_rolling_update_are_of_one_version_each(
    settings: InstanceSettings, replicas: None
) -> None:
    """Ranks of both versions that start together each get their own version's weights."""
    second = of_replica(settings, "two")
    with (
        serving(OneWeightModel(20), second, "v2", PAIR[0]),
        serving(OneWeightModel(21), second, "v2", PAIR[1]),
    ):

        def start(replica: int, tp: int) -> float:
            module = OneWeightModel(0)
            chosen = of_replica(settings, f"target-{replica}")
            report = rfork.fork(module, model="net", version=f"v{1 + replica % 2}", rank=PAIR[tp], settings=chosen)
            if report.seed is not None:
                report.seed.close()
            return module.weight[0].item()

        with ThreadPoolExecutor(8) as pool:
            started = [[pool.submit(start, replica, tp) for tp in range(2)] for replica in range(4)]
            weights_by_replica = [[future.result() for future in replica] for replica in started]
    assert [[10, 11], [20, 21], [10, 11], [20, 21]] == weights_by_replica
