"""What of vLLM's plug-in holds without vLLM: when weights are given, names, hook points, and the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from rfork.engines.points import Point
from rfork.engines.vllm import facts, front, hooks, points
from rfork.engines.vllm.care import Care, care_of, look_after
from rfork.engines.vllm.naming import model_name
from rfork.engines.vllm.options import in_time, settings_of
from rfork.errors import EngineMismatch, SettingsError
from rfork.seed.seed import Identity
from rfork.settings import Settings
from rfork.wire import Rank


class FakeInstance:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.seed = SimpleNamespace(
            settings=Settings(replica="mine"), identity=Identity("model", Rank(), "mine-1")
        )
        self.fails = False

    def fence(self) -> None:
        self.told.append("fence")

    def suspend(self) -> None:
        if self.fails:
            raise OSError("the exporter is gone")
        self.told.append("suspend")

    def renew(self) -> None:
        self.told.append("renew")

    def close(self, drain_s: float | None = None) -> None:
        self.told.append(f"close {drain_s}")

    @contextmanager
    def serving(self) -> Iterator[None]:
        self.told.append("serving")
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
        look_after(self.model, self.instances["target"])  # type: ignore[arg-type]
        look_after(self.draft, self.instances["draft"])  # type: ignore[arg-type]
        self._weight_update_active = self._weight_update_is_draft = False
        self.fails = False

    def told(self) -> tuple[list[str], list[str]]:
        """To the target's instance and the draft's since it was last asked."""
        said = tuple(list(instance.told) for instance in self.instances.values())
        for instance in self.instances.values():
            instance.told.clear()
        return said[0], said[1]

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

    def reload_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_weights(weights.items())
        if self.fails:
            raise OSError("no such checkpoint")

    def start_weight_update(self) -> None:
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
    kind = type("Worker", (Worker,), dict(vars(Worker)))
    hooks.install(kind)
    hooks.install(kind)
    made: Worker = kind()
    return made


def test_steps_are_the_seed_s_work(worker: Worker) -> None:
    """Each step of the engine is told to the instance of the model, and answered as ever."""
    assert [2, 3] == [worker.execute_model(1), worker.execute_model(scheduler_output=2)]
    assert (["serving", "serving"], []) == worker.told()


def test_sleeping_weights_are_not_given(worker: Worker) -> None:
    """Both models are let go of before they sleep, and given again once their weights are awake."""
    worker.sleep()
    assert (["suspend"], ["suspend"]) == worker.told()
    worker.wake_up(["kv_cache"])
    assert ([], []) == worker.told()
    worker.wake_up(tags=["weights"])
    assert (["renew"], ["renew"]) == worker.told()


@pytest.mark.parametrize("away", ["sleep", "discard"])
def test_weights_that_sleep_threw_away_are_given_once_they_are_loaded(worker: Worker, away: str) -> None:
    """After level 2 memory is back before the weights are: each model is given after its own update."""
    if away == "sleep":
        worker.sleep(level=2)
    else:
        worker.discard(("weights",))
    worker.wake_up()
    assert (["suspend"], ["suspend"]) == worker.told()
    worker.reload_weights({})
    assert (["fence", "renew"], []) == worker.told()
    worker.start_draft_weight_update()
    worker.update_weights({})
    worker.finish_weight_update()
    assert ([], ["fence", "renew"]) == worker.told()


def test_weights_that_are_zeroed_are_not_given(worker: Worker) -> None:
    """vLLM overwrites them only to have them loaded anew."""
    worker.reset_weights()
    worker.sleep()
    worker.wake_up()
    assert (["fence", "suspend"], ["suspend", "renew"]) == worker.told()


def test_an_update_is_one_however_many_parts_it_has(worker: Worker) -> None:
    """Nothing is given between its begin and its end; loads inside it are no updates of their own."""
    worker.start_weight_update()
    worker.model.load_weights([])
    worker.update_weights({})
    worker.model.load_weights([])
    assert (["fence"], []) == worker.told()
    worker.finish_weight_update()
    assert (["renew"], []) == worker.told()


@pytest.mark.parametrize("way", ["reload", "transfer"])
def test_after_an_update_that_failed_nothing_is_given(worker: Worker, way: str) -> None:
    """The weights may be anything, asleep or awake, until an update that does not fail."""
    worker.fails = True
    if way == "transfer":
        worker.start_weight_update()
    changed: Callable[[dict[str, str]], None] = getattr(
        worker, {"reload": "reload_weights", "transfer": "update_weights"}[way]
    )
    with pytest.raises(OSError, match=r"no such|gone"):
        changed({})
    worker.fails = False
    worker.sleep()
    worker.wake_up()
    assert ["fence", "suspend"] == worker.told()[0]
    worker.reload_weights({})
    assert ["fence", "renew"] == worker.told()[0]


def test_weights_that_are_loaded_behind_the_worker_are_noticed(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a call is answered as ever; nobody says which is the last, so a whole update has to follow."""
    caplog.set_level("WARNING", "rfork")
    for name in "ab":
        assert {name} == worker.model.load_weights([(name, torch.zeros(1))])
    worker.sleep()
    worker.wake_up()
    assert (["fence", "fence", "suspend"], ["suspend", "renew"]) == worker.told()
    assert ["not a seed until a whole update: weights were loaded piece by piece"] == caplog.messages
    worker.reload_weights({})
    assert (["fence", "renew"], []) == worker.told()


@pytest.mark.parametrize("rank", [Rank(tp_size=2), Rank(pp_size=2), Rank(ep_size=2)])
def test_one_of_several_ranks_is_not_given_after_an_update(worker: Worker, rank: Rank) -> None:
    """A fork could take one rank's weights from before it and another's from after; sleep changes nothing."""
    worker.instances["target"].seed.identity = Identity("model", rank, "mine-1")
    worker.sleep()
    worker.wake_up()
    assert (["suspend", "renew"], ["suspend", "renew"]) == worker.told()
    worker.reload_weights({})
    worker.sleep()
    worker.wake_up()
    assert ["fence", "suspend"] == worker.told()[0]


def test_sleep_that_fails_is_told(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knows where the weights are then: they are given again once they were woken."""
    caplog.set_level("WARNING", "rfork")
    worker.fails = True
    with pytest.raises(OSError, match="more memory"):
        worker.sleep()
    assert 2 * ["not a seed until it is woken: vLLM could not put its weights to sleep"] == caplog.messages
    worker.fails = False
    worker.wake_up()
    assert 2 * (["suspend", "renew"],) == worker.told()


def test_the_engine_sleeps_whatever_becomes_of_its_seed(worker: Worker) -> None:
    """An exporter that fails ends the seed, not the engine's request; the other one sleeps as ever."""
    worker.instances["target"].fails = True
    worker.sleep()
    worker.wake_up()
    worker.reload_weights({})
    assert (["close 0.0"], ["suspend", "renew"]) == worker.told()


def test_the_end_closes_both(worker: Worker) -> None:
    """Without waiting, where the API server has; else for as long as vLLM waits for its worker."""
    worker.instances["draft"].seed.settings = Settings()
    worker.shutdown()
    assert (["close 0.0"], ["close 4.0"]) == worker.told()


def test_models_of_others_are_left_alone() -> None:
    """A model that rfork did not bring up has no care, and nothing is in its way."""
    assert [None, None] == [care_of(None), care_of(nn.Linear(1, 1))]
    assert isinstance(look_after(nn.Linear(1, 1), FakeInstance()), Care)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "revision", "told", "draft", "expected"),
    [
        ("org/model", None, None, False, "org/model"),
        ("org/model", "v2", None, False, "org/model@v2"),
        ("org/model", None, "mine", False, "mine"),
        ("org/draft", None, "mine", True, "mine/org/draft"),
        ("org/draft", None, None, True, "org/draft"),
    ],
)
def test_names(model: str, revision: str | None, told: str | None, draft: bool, expected: str) -> None:
    """A hub's id is as it is; a setting names the target, and parts drafts."""
    assert expected == model_name(model, revision, told, draft)


def test_options_of_the_command_line_are_settings() -> None:
    """They win over the environment; a name that is none is one clear error."""
    told = settings_of(SimpleNamespace(model_loader_extra_config={"planner": "http://a:1", "drain_s": 3}))
    assert ("http://a:1", 3.0) == (told.planner, told.drain_s)
    with pytest.raises(SettingsError, match="no setting 'planer'") as caught:
        settings_of(SimpleNamespace(model_loader_extra_config={"planer": "http://a:1"}))
    assert "did you mean 'planner'?" == caught.value.hint
    with pytest.raises(SettingsError, match="RFORK_DRAIN_S"):
        settings_of(SimpleNamespace(model_loader_extra_config={"drain_s": -1}))


def test_deadline_leaves_time_to_load(caplog: pytest.LogCaptureFixture) -> None:
    """It is half of vLLM's at most, and that is told; a shorter one is as it was."""
    caplog.set_level("INFO", "rfork")
    assert 300.0 == in_time(Settings(deadline_s=600), 600).deadline_s
    assert 1 == len(caplog.messages)
    assert 200.0 == in_time(Settings(deadline_s=200), 600).deadline_s
    assert 1 == len(caplog.messages)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("model.layers.0.self_attn.attn.kv_cache.0", False),
        ("model.layers.0.self_attn.rotary_emb.cos_sin_cache", False),
        ("deepstack_input_embeds.0", False),
        ("per_layer_embeddings", False),
        ("model.positions", False),
        ("language_model.model.hidden_states", False),
        ("language_model.model.per_layer_inputs", False),
        ("model.layers.3.self_attn.indexer.topk_indices_buffer", False),
        ("model.layers.3.self_attn.impl._topk_indices_buffer", False),
        ("model.candidate_block_buffer", False),
        ("model._mtp_hidden_buffer", False),
        ("_ds_buffers.1", False),
        ("model.embed_positions.weight", True),
        ("model.embed_tokens_per_layer.weight", True),
        ("model.layers.0.per_layer_projection.weight", True),
        ("visual.deepstack_merger_list.0.norm.weight", True),
        ("model.layers.0.self_attn.qkv_proj.weight", True),
    ],
)
def test_what_forwards_write_is_no_weight(name: str, given: bool) -> None:
    """Names that vLLM 0.32 hangs such tensors on models by, and weights that sound alike."""
    assert given == (not any(fnmatchcase(name, pattern) for pattern in facts.NO_WEIGHTS))


class Configuration:
    """As a model's configuration, of which only this is used."""

    def __init__(self, **told: object) -> None:
        self.hf_config = self
        self._told = told

    def to_dict(self) -> dict[str, object]:
        return self._told


TEXT = {"_name_or_path": "/a", "id2label": {0: "a"}}
PLAIN = {"rope_theta": 1e4, "_name_or_path": "/a", "text_config": TEXT}


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (PLAIN, True),
        (dict(reversed(PLAIN.items())), True),
        ({**PLAIN, "_name_or_path": "/b", "transformers_version": "9"}, True),
        ({**PLAIN, "text_config": {**TEXT, "_name_or_path": "/b"}}, True),
        ({**PLAIN, "rope_theta": 1e6}, False),
        ({**PLAIN, "text_config": {"id2label": {0: "b"}}}, False),
    ],
)
def test_configuration_is_a_fact(other: dict[str, object], same: bool) -> None:
    """What --hf-overrides changes parts two images; where a configuration lies does not."""
    known = facts.configuration(Configuration(**PLAIN))
    assert same == (known == facts.configuration(Configuration(**other)))
    odd = [Configuration(value=object()) for _ in range(2)]
    assert 1 == len({facts.configuration(config) for config in odd})


def test_choice_of_kernels_is_a_fact() -> None:
    """By vLLM's variables, and by its configuration."""

    def told(deep: bool, moe: str) -> str:
        config = SimpleNamespace(kernel_config=SimpleNamespace(moe_backend=moe))
        return facts.kernels(config, SimpleNamespace(VLLM_USE_DEEP_GEMM=deep))

    assert told(True, "auto") == told(True, "auto")
    assert 3 == len({told(True, "auto"), told(False, "auto"), told(True, "marlin")})


def test_hook_points_that_moved_are_told_in_one_line() -> None:
    """With the version there is and those that were tested; all of what moved, and nothing else."""
    known = Point("rfork.engines.vllm.naming.model_name", ("model", "revision"))
    wrong = (
        known,
        Point("rfork.engines.vllm.naming.model_name", ("path",)),
        Point("rfork.engines.vllm.naming.Worker.sleep"),
        Point("rfork.no_such_module.Worker"),
    )
    points.check("1.2.3", (known,), tested=("1.2.3",))
    with pytest.raises(EngineMismatch) as caught:
        points.check("9.9.9", wrong, tested=("1.2.3",))
    assert (
        "vLLM 9.9.9 is not as rfork knows it (tested: 1.2.3): "
        "rfork.engines.vllm.naming.model_name has no parameter path; rfork.engines.vllm.naming.Worker.sleep "
        "is gone (module 'rfork.engines.vllm.naming' has no attribute 'Worker'); "
        "rfork.no_such_module.Worker is gone (module 'rfork' has no attribute 'no_such_module')"
    ) == str(caught.value)


class Manager:
    """As vLLM's, as far as it is wrapped."""

    def __init__(self, vllm_config: SimpleNamespace) -> None:
        self.stopped: list[float | None] = []
        self.name_of_children = os.environ.get("RFORK_REPLICA")

    def finished_procs(self) -> dict[str, int]:
        return {}

    def shutdown(self, timeout: float | None = None) -> None:
        self.stopped.append(timeout)


def test_a_server_s_seeds_are_seen_off_before_its_engines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with the name that its engines were told; servers with another load format are left alone."""
    utils = ModuleType("vllm.v1.engine.utils")
    kind = type("CoreEngineProcManager", (Manager,), dict(vars(Manager)))
    vars(utils)["CoreEngineProcManager"] = kind
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setenv("RFORK_REPLICA", "")
    seen: list[str | None] = []
    monkeypatch.setattr(front, "see_off", lambda settings: seen.append(settings.replica))
    front.watch_over_servers()
    front.watch_over_servers()

    def config(load_format: str) -> SimpleNamespace:
        load = SimpleNamespace(load_format=load_format, model_loader_extra_config={})
        return SimpleNamespace(load_config=load)

    other = kind(vllm_config=config("auto"))
    other.shutdown(timeout=1.0)
    ours = kind(vllm_config=config("rfork"))
    second = kind(vllm_config=config("rfork"))
    ours.shutdown(2.0)
    ours.shutdown()
    assert ([1.0], [2.0, None]) == (other.stopped, ours.stopped)
    assert [ours.name_of_children] == seen
    second.shutdown()
    assert [ours.name_of_children, second.name_of_children] == seen
    assert [True, True] == [str(name).startswith("vllm-") for name in seen]
    assert 2 == len(set(seen))
    assert "" == os.environ["RFORK_REPLICA"]


def test_seeing_off_survives_a_planner_that_is_gone() -> None:
    """A server ends whether or not its planner answers."""
    told = {"planner": "http://127.0.0.1:9", "planner_timeout_s": 0.2, "replica": "mine", "drain_s": 0}
    front.see_off(settings_of(SimpleNamespace(model_loader_extra_config=told)))
