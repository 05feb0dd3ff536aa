"""An engine's instance: weights that change, go away and come back, and what is given of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rfork.engines.hidden_state import HiddenState
from rfork.engines.served_model import ATTRIBUTE, ServedModel, served_model
from rfork.image.capture import capture
from rfork.receiver.report import ForkReport
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.source.seed import InstanceIdentity, Seed
from rfork.transport.http import HttpTransport
from rfork.weights_version import of_update, of_weights


def join_renewals(instance: ServedModel) -> None:
    """Wait for the threads that renew."""
    for thread in threading.enumerate():
        if thread.name == "rfork-renew":
            thread.join(30)


def current(module: nn.Module, instance: ServedModel) -> bool:
    """Whether what the seed tells is what the module holds."""
    manifest = instance.seed.manifest
    return manifest is not None and manifest.weights_id == capture(module).manifest().weights_id


@pytest.fixture
def module() -> nn.Module:
    """A model."""
    made = nn.Linear(16, 16)
    made.scale = 1.0  # type: ignore[assignment]
    return made


@pytest.fixture
def rank() -> Rank:
    """Its place in the server."""
    return Rank()


@pytest.fixture
def instance(module: nn.Module, rank: Rank) -> Iterator[ServedModel]:
    """Its instance, which gives it as version ``files:old``."""
    traits = HiddenState(module, (), ())
    image, settings = capture(module), InstanceSettings()
    identity = InstanceIdentity("model", rank, version="files:old", replica="replica-1")
    seed = Seed(image, identity, settings, [HttpTransport(settings)], manifest=image.manifest()).start()
    report = ForkReport("fork", "me", "model", "forked", image.layout.layout_id, "", 0, 0, 0, 0.0, {})
    made = ServedModel(module, seed, report, traits)
    setattr(module, ATTRIBUTE, made)
    yield made
    made.close(0.0)


def test_an_update_is_given_once_it_is_done(module: nn.Module, instance: ServedModel) -> None:
    """Nothing is given inside the block; afterwards the new weights and numbers are."""
    with instance.updating():
        within = instance.seed.manifest
        with torch.no_grad():
            module.get_parameter("weight").fill_(3.0)
        vars(module)["scale"] = 2.0
    join_renewals(instance)
    floats = vars(module)["rfork"]["floats"]
    assert (None, True, [2.0]) == (within, current(module, instance), next(iter(floats.values())).tolist())


def test_a_renewal_that_comes_late_gives_nothing(module: nn.Module, instance: ServedModel) -> None:
    """Where the next change has begun before the digest, the bytes may be anything."""
    instance.fence()
    instance._renewing.acquire()
    instance.renew()
    instance.fence()
    instance._renewing.release()
    join_renewals(instance)
    assert None is instance.seed.manifest
    instance.renew()
    join_renewals(instance)
    assert current(module, instance)


def test_weights_that_moved_are_given_from_where_they_are(module: nn.Module, instance: ServedModel) -> None:
    """Suspended and put elsewhere; also where the engine did not say so before."""
    found = []
    for suspends in (True, False):
        if suspends:
            instance.suspend()
        parameter = module.get_parameter("weight")
        parameter.data = parameter.data + 1
        instance.renew()
        join_renewals(instance)
        found.append((current(module, instance), instance.seed.image.shares_memory_with(capture(module))))
    assert [(True, True), (True, True)] == found


def test_another_layout_is_given_up(module: nn.Module, instance: ServedModel) -> None:
    """The engine serves on; what it has now is nobody's who had the model before."""
    found = []
    for other in (nn.Parameter(torch.zeros(3, 16)), None):
        instance.fence()
        module.register_parameter("weight", other)
        instance.renew()
        join_renewals(instance)
        found.append(instance.seed.manifest)
    assert [None, None] == found


@pytest.mark.parametrize("suspends", [True, False])
def test_what_the_engine_hung_on_the_model_since_is_not_looked_at(
    module: nn.Module, instance: ServedModel, suspends: bool
) -> None:
    """A workspace, or one that cannot be carried at all: an update gives the same tensors as before."""
    layout = instance.seed.image.layout
    module.workspace = torch.zeros(3)
    module.unread = torch.empty(2, device="meta")
    if suspends:
        instance.suspend()
    with instance.updating(), torch.no_grad():
        module.get_parameter("weight").fill_(3.0)
    join_renewals(instance)
    served_image, manifest = instance.seed.image, instance.seed.manifest
    assert layout == served_image.layout
    assert capture(module, like=layout).manifest() == manifest


def test_a_bug_in_a_renewal_leaves_the_engine_alone(instance: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given, and no thread dies of it."""

    def broken(_: HiddenState) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(HiddenState, "save", broken)
    instance.fence()
    instance.renew()
    join_renewals(instance)
    assert None is instance.seed.manifest


@pytest.mark.parametrize("call", ["fence", "suspend"])
def test_an_exporter_that_fails_does_not_fail_the_engine(
    module: nn.Module, instance: ServedModel, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The weights are not given meanwhile, and are once they are whole again."""

    def broken(_: Seed) -> None:
        raise OSError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Seed, "_disconnect_readers", broken)
        getattr(instance, call)()
        within = instance.seed.manifest
    instance.renew()
    join_renewals(instance)
    assert (None, True) == (within, current(module, instance))


def test_one_that_is_still_given_after_a_failure_is_closed(
    instance: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug before anything was cleared: better no seed than one of weights that change."""

    def broken(_: Seed) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Seed, "fence", broken)
    with instance.updating():
        ended = instance.seed._exports.is_shut_down
    assert ended


def test_a_closed_instance_does_nothing(module: nn.Module, instance: ServedModel) -> None:
    """Whatever the engine tells it, and however often it is closed."""
    instance.close(0.0)
    instance.close(0.0)
    generation = instance.seed.generation
    instance.fence()
    instance.suspend()
    instance.renew()
    assert (generation, instance, None) == (
        instance.seed.generation, served_model(module), served_model(nn.Linear(1, 1))
    )  # fmt: skip


def fill(module: nn.Module, value: float) -> None:
    """Write other weights."""
    with torch.no_grad():
        module.get_parameter("weight").fill_(value)


def of_bytes(module: nn.Module) -> str:
    """Return the version that weights have by their bytes alone."""
    return of_weights(capture(module).manifest().weights_id)


def update(module: nn.Module, instance: ServedModel, value: float, version: str | None = None) -> str | None:
    """Update the weights in place; the version that is served then."""
    with instance.updating(version):
        fill(module, value)
    join_renewals(instance)
    return instance.seed.version


several = pytest.mark.parametrize("rank", [Rank(tp=1, tp_size=2)])
"""The instance is one rank of several."""


def test_an_update_without_a_name_is_named_by_its_bytes(module: nn.Module, instance: ServedModel) -> None:
    """A server of one rank; bytes that are the same as before keep their name."""
    first = update(module, instance, 3.0)
    assert of_bytes(module) == first
    assert first == update(module, instance, 3.0)


def test_an_update_that_writes_the_same_bytes_keeps_the_version(module: nn.Module, instance: ServedModel) -> None:
    """New servers on the same files fork from it as before."""
    with instance.updating():
        pass
    join_renewals(instance)
    assert "files:old" == instance.seed.version


@several
def test_a_rank_of_several_is_named_by_the_count_of_its_updates(module: nn.Module, instance: ServedModel) -> None:
    """No rank knows the others' bytes, but all ranks of a replica see the same updates."""
    assert of_update("replica-1", 1) == update(module, instance, 3.0)
    assert of_update("replica-1", 2) == update(module, instance, 4.0)


@several
def test_updates_that_failed_count(module: nn.Module, instance: ServedModel) -> None:
    """They may have failed on one rank alone, and the next one's name must be equal on all."""
    instance.begin_update()
    instance.renew()
    join_renewals(instance)
    assert "files:old" == instance.seed.version
    assert of_update("replica-1", 2) == update(module, instance, 3.0)


@several
def test_an_update_is_named_by_its_number_at_its_begin(module: nn.Module, instance: ServedModel) -> None:
    """Another one that begins on other ranks meanwhile has a number of its own on all."""
    with instance.updating():
        instance.count_update()
        fill(module, 3.0)
    join_renewals(instance)
    assert of_update("replica-1", 1) == instance.seed.version
    assert of_update("replica-1", 3) == update(module, instance, 4.0)


@several
def test_an_update_with_a_name_has_that_name(module: nn.Module, instance: ServedModel) -> None:
    """That of the engine's weight version, or of the files that were read."""
    assert "step-5" == update(module, instance, 3.0, "step-5")


@several
def test_an_update_from_the_files_of_before_keeps_the_version(module: nn.Module, instance: ServedModel) -> None:
    """As after a sleep that threw the weights away."""
    assert "files:old" == update(module, instance, 3.0, "files:old")


@several
@pytest.mark.parametrize("version", [None, "step-5"])
def test_sleep_keeps_the_version_of_an_update(version: str | None, module: nn.Module, instance: ServedModel) -> None:
    """The weights come back as they were."""
    before = update(module, instance, 3.0, version)
    instance.suspend()
    instance.renew()
    join_renewals(instance)
    assert current(module, instance)
    assert before == instance.seed.version


@several
def test_an_update_that_is_overtaken_by_a_sleep_names_the_weights_after_it(
    module: nn.Module, instance: ServedModel
) -> None:
    """The digest did not come to its end before the memory went away."""
    with instance._renewing:
        instance.begin_update()
        fill(module, 3.0)
        instance.renew(updated=True)
        instance.suspend()
    join_renewals(instance)
    assert "files:old" == instance.seed.version
    instance.renew()
    join_renewals(instance)
    assert of_update("replica-1", 1) == instance.seed.version


@several
def test_an_update_that_is_overtaken_by_another_leaves_the_name_to_it(module: nn.Module, instance: ServedModel) -> None:
    """Whatever the first one was called."""
    with instance._renewing:
        instance.begin_update()
        fill(module, 3.0)
        instance.renew(updated=True, version="step-5")
        instance.begin_update()
    join_renewals(instance)
    fill(module, 4.0)
    instance.renew(updated=True)
    join_renewals(instance)
    assert of_update("replica-1", 2) == instance.seed.version
