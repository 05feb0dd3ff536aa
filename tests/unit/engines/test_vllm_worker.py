"""When the weights of vLLM's workers are served, tested without vLLM."""

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
from rfork.engines.weight_lifecycle import WeightLifecycle, attach_lifecycle, lifecycle_of
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.source.seed import InstanceIdentity
from rfork.storage.versions.version import version_of


class FakeInstance:
    """Records the calls made on a served model."""

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
            raise OSError("the exporter failed")
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
    """The wrapped part of vLLM's worker."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace()
        self.model, self.draft = Model(), Model()
        self.instances = {"target": FakeInstance(), "draft": FakeInstance()}
        attach_lifecycle(self.model, self.instances["target"], observe_loads=True)  # type: ignore[arg-type]
        attach_lifecycle(self.draft, self.instances["draft"], observe_loads=True)  # type: ignore[arg-type]
        self._weight_update_active = self._weight_update_is_draft = False
        self.fails = False
        self.model_config = SimpleNamespace(model="no such folder", model_weights="", revision=None)
        self.while_reading = lambda: None

    def pop_calls(self) -> tuple[list[str], list[str]]:
        """Return and clear the recorded calls of the main model and the draft."""
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
            raise OSError("the trainer is unreachable")

    def finish_weight_update(self) -> None:
        self._weight_update_active = False


@pytest.fixture
def worker() -> Worker:
    """A worker whose class only this test wraps."""
    worker_class = type("Worker", (Worker,), dict(vars(Worker)))
    hooks.install(worker_class)
    hooks.install(worker_class)
    created: Worker = worker_class()
    return created


def test_steps_are_measured_as_the_seeds_work(worker: Worker) -> None:
    """Each step of the engine is measured for its model and returns its result unchanged."""
    assert 2 == worker.execute_model(1)
    assert 3 == worker.execute_model(scheduler_output=2)
    assert (["serving", "serving"], []) == worker.pop_calls()


def test_sleeping_weights_are_not_served(worker: Worker) -> None:
    """Serving of both models stops before they sleep and resumes once their weights are awake."""
    worker.sleep()
    assert (["suspend"], ["suspend"]) == worker.pop_calls()
    worker.wake_up(["kv_cache"])
    assert ([], []) == worker.pop_calls()
    worker.wake_up(tags=["weights"])
    assert (["renew"], ["renew"]) == worker.pop_calls()


@pytest.mark.parametrize("away", ["sleep", "discard"])
def test_weights_discarded_by_sleep_are_served_after_loading(worker: Worker, away: str) -> None:
    """After level 2, memory returns before the weights: each model is served after its own update."""
    if away == "sleep":
        worker.sleep(level=2)
    else:
        worker.discard(("weights",))
    worker.wake_up()
    assert (["suspend"], ["suspend"]) == worker.pop_calls()
    worker.reload_weights([])
    assert (["update", "renew updated"], []) == worker.pop_calls()
    worker.start_draft_weight_update()
    worker.update_weights({})
    worker.finish_weight_update()
    assert ([], ["update", "renew updated"]) == worker.pop_calls()


def test_zeroed_weights_are_not_served(worker: Worker) -> None:
    """vLLM overwrites them only to load them again."""
    worker.reset_weights()
    worker.sleep()
    worker.wake_up()
    assert (["fence", "suspend"], ["suspend", "renew"]) == worker.pop_calls()


def test_an_update_in_several_parts_is_one_update(worker: Worker) -> None:
    """Nothing is served between its start and its end; loads inside it are not separate updates."""
    worker.start_weight_update()
    worker.model.load_weights([])
    worker.update_weights({})
    worker.model.load_weights([])
    assert (["update"], []) == worker.pop_calls()
    worker.finish_weight_update()
    assert (["renew updated"], []) == worker.pop_calls()


def test_an_update_refused_by_this_rank_is_counted(worker: Worker) -> None:
    """It begins on ranks where the previous one failed, and a number must mean one update on all ranks."""
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match="already active"):
        worker.start_weight_update()
    worker.finish_weight_update()
    assert (["update", "count", "renew updated"], []) == worker.pop_calls()


@pytest.mark.parametrize("update_method", ["reload", "transfer"])
def test_nothing_is_served_after_a_failed_update(worker: Worker, update_method: str) -> None:
    """The weights are undefined, asleep or awake, until an update succeeds."""
    worker.fails = True
    if update_method == "transfer":
        worker.start_weight_update()
    changed: Callable[[list[object]], None] = getattr(
        worker, {"reload": "reload_weights", "transfer": "update_weights"}[update_method]
    )
    with pytest.raises(OSError, match=r"no such|unreachable"):
        changed([])
    worker.fails = False
    worker.sleep()
    worker.wake_up()
    assert ["update", "suspend"] == worker.pop_calls()[0]
    worker.reload_weights([])
    assert ["update", "renew updated"] == worker.pop_calls()[0]


def test_weights_loaded_without_the_worker_are_detected(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """The call works as before; a complete update must follow, because the last call is not marked."""
    caplog.set_level("WARNING", "rfork")
    for name in "ab":
        assert {name} == worker.model.load_weights([(name, torch.zeros(1))])
    worker.sleep()
    worker.wake_up()
    assert (["fence", "fence", "suspend"], ["suspend", "renew"]) == worker.pop_calls()
    event = "not seeding until the next complete weight update: only a part of the weights was loaded"
    assert [event] == caplog.messages
    worker.reload_weights([])
    assert (["update", "renew updated"], []) == worker.pop_calls()


def test_an_update_while_asleep_names_the_weights_after_waking(worker: Worker) -> None:
    """The weights served after waking are those of the update, and stay so after another sleep."""
    worker.sleep(level=2)
    worker.reload_weights([])
    worker.wake_up()
    assert ["suspend", "update", "renew updated"] == worker.pop_calls()[0]
    worker.sleep()
    worker.wake_up()
    assert ["suspend", "renew"] == worker.pop_calls()[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint folder."""
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    save_file({"weight": torch.zeros(4)}, model_dir / "model.safetensors")
    return model_dir


def test_a_reload_from_another_folder_has_the_version_of_its_files(worker: Worker, folder: Path) -> None:
    """It equals the version of a server started on that folder."""
    worker.reload_weights(weights_path=str(folder))
    assert ["update", f"renew {version_of(folder)}"] == worker.pop_calls()[0]


def test_a_reload_has_the_version_of_the_replaced_files(worker: Worker, folder: Path) -> None:
    """Without a path vLLM reads the current content of the folder it was started on."""
    worker.model_config.model = str(folder)
    old = version_of(folder)
    save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    worker.reload_weights()
    assert ["update", f"renew {version_of(folder)}"] == worker.pop_calls()[0]
    assert old != version_of(folder)


def test_a_reload_from_changing_files_has_no_file_version(worker: Worker, folder: Path) -> None:
    """It is unknown which files were read."""
    worker.while_reading = lambda: save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    worker.reload_weights(None, str(folder))
    assert ["update", "renew updated"] == worker.pop_calls()[0]


def test_a_reload_of_the_callers_tensors_has_no_file_version(worker: Worker, folder: Path) -> None:
    """The folder that the server was started on does not matter."""
    worker.model_config.model = str(folder)
    worker.reload_weights([("weight", torch.ones(4))])
    assert ["update", "renew updated"] == worker.pop_calls()[0]


def test_a_failed_sleep_is_logged(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """The state of the weights is unknown, so they are served again only after waking."""
    caplog.set_level("WARNING", "rfork")
    worker.fails = True
    with pytest.raises(OSError, match="more memory"):
        worker.sleep()
    assert 2 * ["not seeding until the weights wake up: the engine failed to put them to sleep"] == caplog.messages
    worker.fails = False
    worker.wake_up()
    assert 2 * (["suspend", "renew"],) == worker.pop_calls()


def test_the_engine_sleeps_whatever_happens_to_its_seed(worker: Worker) -> None:
    """A failing exporter ends the seed but not the engine's request; the other model sleeps as usual."""
    worker.instances["target"].fails = True
    worker.sleep()
    worker.wake_up()
    worker.reload_weights([])
    assert (["close 0.0"], ["suspend", "renew"]) == worker.pop_calls()


def test_a_change_that_cannot_be_followed_ends_seeding(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """If a hook fails, as with another vLLM, the engine proceeds, and no weights of unknown state are served."""
    vars(worker)["get_draft_model"] = None
    worker.sleep()
    assert (["close 0.0"], ["close 0.0"]) == worker.pop_calls()
    assert "Worker.sleep" in caplog.text
    worker.wake_up()
    worker.reload_weights([])
    assert "renew" not in str(worker.pop_calls())


def test_steps_that_cannot_be_measured_do_not_end_seeding(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """They run, and the failure is logged once."""
    vars(worker)["get_model"] = None
    assert [2, 3, 4] == [worker.execute_model(step) for step in (1, 2, 3)]
    assert ([], []) == worker.pop_calls()
    assert 1 == caplog.text.count("hook failed")


def test_the_shutdown_closes_both_models(worker: Worker) -> None:
    """It does not wait if the API server has drained them, else at most as long as vLLM waits for its worker."""
    worker.instances["draft"].seed.settings = InstanceSettings()
    worker.shutdown()
    assert (["close 0.0"], ["close 4.0"]) == worker.pop_calls()


def test_models_of_other_loaders_are_not_affected() -> None:
    """A model that rfork did not load has no lifecycle, and its methods run unchanged."""
    assert lifecycle_of(None) is None
    assert lifecycle_of(nn.Linear(1, 1)) is None
    assert isinstance(attach_lifecycle(nn.Linear(1, 1), FakeInstance()), WeightLifecycle)  # type: ignore[arg-type]
