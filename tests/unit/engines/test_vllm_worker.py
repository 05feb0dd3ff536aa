"""When the weights of vLLM's workers are given, and when not, without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rfork.engines.vllm import hooks
from rfork.engines.vllm.weight_lifecycle import WeightLifecycle, attach_lifecycle, lifecycle_of
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.source.seed import InstanceIdentity
from rfork.storage.versions.version import version_of


class FakeInstance:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seed = SimpleNamespace(
            settings=InstanceSettings(replica="mine"), identity=InstanceIdentity("model", Rank(), "mine-1")
        )
        self.fails = False

    def fence(self) -> None:
        self.calls.append("fence")

    def suspend(self) -> None:
        if self.fails:
            raise OSError("the exporter is gone")
        self.calls.append("suspend")

    def begin_update(self) -> None:
        self.calls.append("update")

    def count_update(self) -> None:
        self.calls.append("count")

    def renew(self, *, updated: bool, version: str | None) -> None:
        renamed = "updated" if version is None else version
        self.calls.append(f"renew {renamed}" if updated else "renew")

    def close(self, drain_s: float | None = None) -> None:
        self.calls.append(f"close {drain_s}")

    @contextmanager
    def serving(self) -> Iterator[None]:
        self.calls.append("serving")
        yield


class Model(nn.Module):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in weights}


class Worker:
    """As vLLM's worker, as far as it is wrapped."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace()
        self.model, self.draft = Model(), Model()
        self.instances = {"target": FakeInstance(), "draft": FakeInstance()}
        attach_lifecycle(self.model, self.instances["target"])  # type: ignore[arg-type]
        attach_lifecycle(self.draft, self.instances["draft"])  # type: ignore[arg-type]
        self._weight_update_active = self._weight_update_is_draft = False
        self.fails = False
        self.model_config = SimpleNamespace(model="no such folder", model_weights="", revision=None)
        self.while_reading = lambda: None

    def take_calls(self) -> tuple[list[str], list[str]]:
        """To the target's instance and the draft's since it was last asked."""
        calls = tuple(list(instance.calls) for instance in self.instances.values())
        for instance in self.instances.values():
            instance.calls.clear()
        return calls[0], calls[1]

    def get_model(self) -> nn.Module:
        return self.model

    def get_draft_model(self) -> nn.Module | None:
        return self.draft

    def execute_model(self, scheduler_output: int) -> int:
        return scheduler_output + 1

    def sleep(self, level: int = 1) -> None:
        if self.fails:
            raise OSError("more memory in use than before")

    def wake_up(self, tags: list[str] | None = None) -> None: ...
    def discard(self, tags: tuple[str, ...]) -> None: ...
    def reset_weights(self) -> None: ...
    def shutdown(self) -> None: ...

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        self.model.load_weights(weights_iterator or [])
        if self.fails:
            raise OSError("no such checkpoint")
        if weights_path is not None:
            self.model_config.model = weights_path
        self.while_reading()

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("a weight update is already active")
        self._weight_update_active, self._weight_update_is_draft = True, False

    def start_draft_weight_update(self) -> None:
        self._weight_update_active = self._weight_update_is_draft = True

    def update_weights(self, update_info: dict[str, str]) -> None:
        if self.fails:
            self._weight_update_active = False
            raise OSError("the trainer is gone")

    def finish_weight_update(self) -> None:
        self._weight_update_active = False


@pytest.fixture
def worker() -> Worker:
    """One whose class is wrapped, and no other's."""
    worker_class = type("Worker", (Worker,), dict(vars(Worker)))
    hooks.install(worker_class)
    hooks.install(worker_class)
    made: Worker = worker_class()
    return made


def test_steps_are_the_seed_s_work(worker: Worker) -> None:
    """Each step of the engine is told to the instance of the model, and answered as ever."""
    assert [2, 3] == [worker.execute_model(1), worker.execute_model(scheduler_output=2)]
    assert (["serving", "serving"], []) == worker.take_calls()


def test_sleeping_weights_are_not_given(worker: Worker) -> None:
    """Both models are let go of before they sleep, and given again once their weights are awake."""
    worker.sleep()
    assert (["suspend"], ["suspend"]) == worker.take_calls()
    worker.wake_up(["kv_cache"])
    assert ([], []) == worker.take_calls()
    worker.wake_up(tags=["weights"])
    assert (["renew"], ["renew"]) == worker.take_calls()


@pytest.mark.parametrize("away", ["sleep", "discard"])
def test_weights_that_sleep_threw_away_are_given_once_they_are_loaded(worker: Worker, away: str) -> None:
    """After level 2 memory is back before the weights are: each model is given after its own update."""
    if away == "sleep":
        worker.sleep(level=2)
    else:
        worker.discard(("weights",))
    worker.wake_up()
    assert (["suspend"], ["suspend"]) == worker.take_calls()
    worker.reload_weights([])
    assert (["update", "renew updated"], []) == worker.take_calls()
    worker.start_draft_weight_update()
    worker.update_weights({})
    worker.finish_weight_update()
    assert ([], ["update", "renew updated"]) == worker.take_calls()


def test_weights_that_are_zeroed_are_not_given(worker: Worker) -> None:
    """vLLM overwrites them only to have them loaded anew."""
    worker.reset_weights()
    worker.sleep()
    worker.wake_up()
    assert (["fence", "suspend"], ["suspend", "renew"]) == worker.take_calls()


def test_an_update_is_one_however_many_parts_it_has(worker: Worker) -> None:
    """Nothing is given between its begin and its end; loads inside it are no updates of their own."""
    worker.start_weight_update()
    worker.model.load_weights([])
    worker.update_weights({})
    worker.model.load_weights([])
    assert (["update"], []) == worker.take_calls()
    worker.finish_weight_update()
    assert (["renew updated"], []) == worker.take_calls()


def test_an_update_that_this_rank_refuses_is_counted(worker: Worker) -> None:
    """It begins on ranks where the one before has failed, and a number has to name one update on all."""
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match="already active"):
        worker.start_weight_update()
    worker.finish_weight_update()
    assert (["update", "count", "renew updated"], []) == worker.take_calls()


@pytest.mark.parametrize("update_method", ["reload", "transfer"])
def test_after_an_update_that_failed_nothing_is_given(worker: Worker, update_method: str) -> None:
    """The weights may be anything, asleep or awake, until an update that does not fail."""
    worker.fails = True
    if update_method == "transfer":
        worker.start_weight_update()
    changed: Callable[[list[object]], None] = getattr(
        worker, {"reload": "reload_weights", "transfer": "update_weights"}[update_method]
    )
    with pytest.raises(OSError, match=r"no such|gone"):
        changed([])
    worker.fails = False
    worker.sleep()
    worker.wake_up()
    assert ["update", "suspend"] == worker.take_calls()[0]
    worker.reload_weights([])
    assert ["update", "renew updated"] == worker.take_calls()[0]


def test_weights_that_are_loaded_behind_the_worker_are_noticed(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a call is answered as ever; nobody says which is the last, so a whole update has to follow."""
    caplog.set_level("WARNING", "rfork")
    for name in "ab":
        assert {name} == worker.model.load_weights([(name, torch.zeros(1))])
    worker.sleep()
    worker.wake_up()
    assert (["fence", "fence", "suspend"], ["suspend", "renew"]) == worker.take_calls()
    assert ["not a seed until a whole update: weights were loaded piece by piece"] == caplog.messages
    worker.reload_weights([])
    assert (["update", "renew updated"], []) == worker.take_calls()


def test_an_update_while_asleep_is_named_once_awake(worker: Worker) -> None:
    """The weights that are served after the wake are those of the update, and after another sleep as well."""
    worker.sleep(level=2)
    worker.reload_weights([])
    worker.wake_up()
    assert ["suspend", "update", "renew updated"] == worker.take_calls()[0]
    worker.sleep()
    worker.wake_up()
    assert ["suspend", "renew"] == worker.take_calls()[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder."""
    made = tmp_path / "model"
    made.mkdir()
    save_file({"weight": torch.zeros(4)}, made / "model.safetensors")
    return made


def test_a_reload_from_another_folder_has_the_version_of_its_files(worker: Worker, folder: Path) -> None:
    """As a server that is started on that folder."""
    worker.reload_weights(weights_path=str(folder))
    assert ["update", f"renew {version_of(folder)}"] == worker.take_calls()[0]


def test_a_reload_has_the_version_of_the_files_that_replaced_the_old_ones(worker: Worker, folder: Path) -> None:
    """Without a path vLLM reads the folder that it was started on, as it is by now."""
    worker.model_config.model = str(folder)
    old = version_of(folder)
    save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    worker.reload_weights()
    assert ["update", f"renew {version_of(folder)}"] == worker.take_calls()[0]
    assert old != version_of(folder)


def test_a_reload_of_files_that_change_meanwhile_has_no_version_of_theirs(worker: Worker, folder: Path) -> None:
    """Nobody knows which of them were read."""
    worker.while_reading = lambda: save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    worker.reload_weights(None, str(folder))
    assert ["update", "renew updated"] == worker.take_calls()[0]


def test_a_reload_of_the_caller_s_tensors_has_no_version_of_files(worker: Worker, folder: Path) -> None:
    """Wherever the server was started."""
    worker.model_config.model = str(folder)
    worker.reload_weights([("weight", torch.ones(4))])
    assert ["update", "renew updated"] == worker.take_calls()[0]


def test_sleep_that_fails_is_told(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knows where the weights are then: they are given again once they were woken."""
    caplog.set_level("WARNING", "rfork")
    worker.fails = True
    with pytest.raises(OSError, match="more memory"):
        worker.sleep()
    assert 2 * ["not a seed until it is woken: vLLM could not put its weights to sleep"] == caplog.messages
    worker.fails = False
    worker.wake_up()
    assert 2 * (["suspend", "renew"],) == worker.take_calls()


def test_the_engine_sleeps_whatever_becomes_of_its_seed(worker: Worker) -> None:
    """An exporter that fails ends the seed, not the engine's request; the other one sleeps as ever."""
    worker.instances["target"].fails = True
    worker.sleep()
    worker.wake_up()
    worker.reload_weights([])
    assert (["close 0.0"], ["suspend", "renew"]) == worker.take_calls()


def test_the_end_closes_both(worker: Worker) -> None:
    """Without waiting, where the API server has; else for as long as vLLM waits for its worker."""
    worker.instances["draft"].seed.settings = InstanceSettings()
    worker.shutdown()
    assert (["close 0.0"], ["close 4.0"]) == worker.take_calls()


def test_models_of_others_are_left_alone() -> None:
    """A model that rfork did not bring up has no care, and nothing is in its way."""
    assert [None, None] == [lifecycle_of(None), lifecycle_of(nn.Linear(1, 1))]
    assert isinstance(attach_lifecycle(nn.Linear(1, 1), FakeInstance()), WeightLifecycle)  # type: ignore[arg-type]
