"""When the weights of vLLM's workers are served, tested without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rfork.engines.vllm import hooks
from rfork.engines.vllm.worker_steps import MAX_UNREAD, DeviceTimer
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
            settings=InstanceSettings(replica="mine"),
            identity=InstanceIdentity("model", Rank(), "mine-1"),
            record_step_latency=lambda seconds: self.calls.append(f"{seconds * 1000:g} ms"),
        )
        self.steps = RecordingSteps(self.calls)
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


class RecordingSteps:
    """Records the steps of the engine."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self._count = 0

    def begin(self) -> int:
        self._count += 1
        self._calls.append(f"begin {self._count}")
        return self._count

    def end(self, step: int) -> None:
        self._calls.append(f"end {step}")

    def cancel(self, step: int) -> None:
        self._calls.append(f"cancel {step}")

    def clear(self) -> None:
        self._calls.append("clear")


@dataclass
class Output:
    """The part of vLLM's ModelRunnerOutput that is read."""

    req_ids: list[str]


class AsyncOutput:
    """The same of an AsyncModelRunnerOutput, as returned with asynchronous scheduling."""

    def __init__(self, output: Output | Exception) -> None:
        self._output = output

    def get_output(self) -> Output:
        if isinstance(self._output, Exception):
            raise self._output
        return self._output


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
        self._weight_update_active = False
        self.fails = False
        self.model_config = SimpleNamespace(model="no such folder", model_weights="", revision=None)
        self.while_reading = lambda: None
        self.device: torch.device | None = torch.device("cpu")
        self.executed: object = None
        self.sampled: object = Output(["request"])

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

    def execute_model(self, scheduler_output: str) -> object:
        return self._launch(self.executed)

    def sample_tokens(self, grammar_output: str | None) -> object:
        return self._launch(self.sampled)

    @staticmethod
    def _launch(output: object) -> object:
        if isinstance(output, Exception):
            raise output
        return output

    def step(self) -> object:
        """Run one step like vLLM's engine; return its output, which may be asynchronous."""
        output = self.execute_model(scheduler_output="scheduled")
        return self.sample_tokens("grammar") if output is None else output

    def sleep(self, level: int = 1, *, deep: bool = False) -> None:
        self.slept = (level, deep)
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
        self._weight_update_active = True

    def start_draft_weight_update(self) -> None:
        self._weight_update_active = True

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


def test_a_synchronous_step_ends_with_its_samples(worker: Worker) -> None:
    """The worker has waited for the device when it returns the tokens."""
    assert worker.sampled is worker.step()
    worker.step()
    assert (["begin 1", "end 1", "begin 2", "end 2"], []) == worker.pop_calls()


def test_a_step_without_samples_ends_with_its_output(worker: Worker) -> None:
    """Pooling models return their output at once."""
    worker.executed = Output(["request"])
    assert worker.executed is worker.step()
    assert (["begin 1", "end 1"], []) == worker.pop_calls()


def test_an_asynchronous_step_ends_when_its_output_is_read(worker: Worker) -> None:
    """The next step is launched before, because the device still works."""
    outputs = []
    for _ in range(2):
        worker.sampled = AsyncOutput(Output(["request"]))
        outputs.append(worker.step())
    assert (["begin 1", "begin 2"], []) == worker.pop_calls()
    assert [["request"]] * 2 == [output.get_output().req_ids for output in outputs]  # type: ignore[attr-defined]
    assert (["end 1", "end 2"], []) == worker.pop_calls()


def test_an_asynchronous_pooling_step_ends_when_its_output_is_read(worker: Worker) -> None:
    """Its output comes from the first call."""
    worker.executed = output = AsyncOutput(Output(["request"]))
    worker.step()
    output.get_output()
    assert (["begin 1", "end 1"], []) == worker.pop_calls()


def test_a_call_without_scheduled_tokens_is_no_step(worker: Worker) -> None:
    """vLLM makes such calls to release finished requests."""
    worker.executed = Output([])
    worker.step()
    assert (["begin 1", "cancel 1"], []) == worker.pop_calls()


@pytest.mark.parametrize("part", ["executed", "sampled"])
def test_a_failed_step_is_not_counted(worker: Worker, part: str) -> None:
    """Either call may raise; the error reaches the engine."""
    setattr(worker, part, ValueError("out of memory"))
    with pytest.raises(ValueError, match="memory"):
        worker.step()
    assert (["begin 1", "cancel 1"], []) == worker.pop_calls()


def test_a_step_whose_output_cannot_be_read_is_not_counted(worker: Worker) -> None:
    """The error reaches the engine."""
    worker.sampled = output = AsyncOutput(ValueError("a rank timed out"))
    worker.step()
    with pytest.raises(ValueError, match="timed out"):
        output.get_output()
    assert (["begin 1", "cancel 1"], []) == worker.pop_calls()


class DeviceClock:
    """A device that reaches events as soon as they are recorded, or not while it is busy."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.is_busy = False

    def event(self) -> DeviceEvent:
        return DeviceEvent(self)


class DeviceEvent:
    """An event of a `DeviceClock`."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = self._clock.now_ms

    def query(self) -> bool:
        return not self._clock.is_busy

    def elapsed_time(self, end: DeviceEvent) -> float:
        return end.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    """The clock of a GPU whose events the hooks record."""
    clock = DeviceClock()
    monkeypatch.setattr(hooks, "DeviceTimer", lambda: DeviceTimer(clock.event))
    return clock


def run_gpu_steps(worker: Worker, gpu: DeviceClock, count: int) -> None:
    """Run steps that take the device 20 ms each, with a new output each."""
    sampled = worker.sampled
    for _ in range(count):
        worker.sampled = AsyncOutput(Output(["request"])) if isinstance(sampled, AsyncOutput) else sampled
        worker.execute_model("scheduled")
        gpu.now_ms += 20
        worker.sample_tokens(None)


@pytest.mark.parametrize(
    ("sampled", "unnoticed"),
    [(AsyncOutput(Output(["request"])), MAX_UNREAD + 1), (Output([]), 1)],
    ids=["tensor-parallel rank", "pipeline stage"],
)
def test_steps_whose_output_is_not_read_are_measured_on_the_device(
    worker: Worker, gpu: DeviceClock, sampled: object, unnoticed: int
) -> None:
    """vLLM reads the output of one rank. The others measure with events, without waiting for the device."""
    worker.device, worker.sampled = torch.device("cuda", 1), sampled
    run_gpu_steps(worker, gpu, unnoticed)
    assert "clear" == worker.pop_calls()[0][-1]
    run_gpu_steps(worker, gpu, 1)
    gpu.is_busy = True
    run_gpu_steps(worker, gpu, 1)
    assert ([], []) == worker.pop_calls()
    gpu.is_busy = False
    run_gpu_steps(worker, gpu, 1)
    assert (["20 ms", "20 ms"], []) == worker.pop_calls()


def test_a_rank_whose_output_is_read_again_uses_it(worker: Worker, gpu: DeviceClock) -> None:
    """The steps of a warm-up are never read."""
    worker.device, worker.sampled = torch.device("cuda", 1), AsyncOutput(Output(["request"]))
    run_gpu_steps(worker, gpu, MAX_UNREAD + 2)
    output = worker.sampled
    assert isinstance(output, AsyncOutput)
    output.get_output()
    worker.pop_calls()
    run_gpu_steps(worker, gpu, 1)
    assert [f"begin {MAX_UNREAD + 2}"] == worker.pop_calls()[0]


def test_steps_on_a_cpu_end_at_once_if_their_output_is_not_read(worker: Worker) -> None:
    """A CPU has finished when the call returns."""
    for _ in range(MAX_UNREAD + 1):
        worker.sampled = AsyncOutput(Output(["request"]))
        worker.step()
    assert f"end {MAX_UNREAD + 1}" == worker.pop_calls()[0][-1]


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


def test_arguments_of_a_newer_vllm_are_passed_on(worker: Worker) -> None:
    """Parameters that rfork does not know reach the method."""
    worker.sleep(level=2, deep=True)
    assert (2, True) == worker.slept


def test_an_older_worker_without_a_method_is_hooked(worker: Worker) -> None:
    """Only the methods that it has are wrapped."""
    content = {name: value for name, value in vars(Worker).items() if name not in {"discard", "reset_weights"}}
    older = type("Worker", (), content)
    hooks.install(older)
    assert not hasattr(older, "discard")
    worker = older()
    worker.sleep()
    worker.wake_up()
    assert (["suspend", "renew"], ["suspend", "renew"]) == worker.pop_calls()


def test_an_update_without_vllms_state_is_followed(worker: Worker) -> None:
    """rfork remembers which model an update changes."""
    del worker._weight_update_active
    worker.start_draft_weight_update()
    del worker._weight_update_active
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
    assert [worker.sampled] * 3 == [worker.step() for _ in range(3)]
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
