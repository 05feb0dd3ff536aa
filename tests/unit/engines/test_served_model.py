"""ServedModel: weights that change, are released and return, and what is served of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore, Store

from rfork.engines.hidden_state import HiddenState
from rfork.engines.served_model import ATTRIBUTE, ServedModel, served_model
from rfork.engines.update_agreement import StoreRecords, UpdateAgreement
from rfork.image.capture import capture
from rfork.receiver.report import ForkReport
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.transport.http import HttpTransport
from rfork.weights_version import of_update, of_weights


def join_renewals(instance: ServedModel) -> None:
    """Wait for the renewal threads."""
    for thread in threading.enumerate():
        if thread.name == "rfork-renew":
            thread.join(30)


def agreement_with(ranks: int, store: Store | None = None) -> UpdateAgreement:
    """Return the agreement of the first of these ranks."""
    return UpdateAgreement(StoreRecords(store or HashStore(), "model", "main", 0, ranks))


@contextlib.contextmanager
def updating(instance: ServedModel, version: str | None = None) -> Iterator[None]:
    """Change the weights in place inside the block, to `version`."""
    instance.begin_update()
    yield
    instance.renew(updated=True, version=version)


def current(module: nn.Module, instance: ServedModel) -> bool:
    """Return whether the seed's manifest matches the module's weights."""
    manifest = instance.seed.manifest
    return manifest is not None and manifest.weights_id == capture(module).manifest().weights_id


@pytest.fixture
def module() -> nn.Module:
    """Return a model."""
    linear = nn.Linear(16, 16)
    linear.scale = 1.0  # type: ignore[assignment]
    return linear


@pytest.fixture
def rank() -> Rank:
    """Return its rank in the server."""
    return Rank()


@pytest.fixture
def instance(module: nn.Module, rank: Rank) -> Iterator[ServedModel]:
    """Return the served model, which serves version ``files:old``."""
    with serving(module, rank) as served:
        yield served


@contextlib.contextmanager
def serving(
    module: nn.Module, rank: Rank, agreement: Callable[[], UpdateAgreement | None] = lambda: agreement_with(1)
) -> Iterator[ServedModel]:
    """Serve a model inside the block."""
    hidden_state = HiddenState(module, (), ())
    image, settings = capture(module), InstanceSettings()
    identity = InstanceIdentity("model", rank, version="files:old", replica="replica-1")
    seed = Seed(image, identity, settings, Connections([HttpTransport(settings)]), manifest=image.manifest()).start()
    report = ForkReport("fork", "me", "model", "forked", image.layout.layout_id, "", 0, 0, 0, 0.0, {})
    served = ServedModel(module, seed, report, hidden_state, agreement=agreement())
    setattr(module, ATTRIBUTE, served)
    yield served
    served.close(0.0)


def test_an_update_is_served_after_the_block(module: nn.Module, instance: ServedModel) -> None:
    """Nothing is served inside the block; afterwards the new weights and floats are."""
    with updating(instance):
        within = instance.seed.manifest
        with torch.no_grad():
            module.get_parameter("weight").fill_(3.0)
        vars(module)["scale"] = 2.0
    join_renewals(instance)
    floats = vars(module)["rfork"]["floats"]
    assert within is None
    assert current(module, instance)
    assert [2.0] == next(iter(floats.values())).tolist()


def test_a_late_renewal_serves_nothing(module: nn.Module, instance: ServedModel) -> None:
    """If the next change begins before the digest, the bytes are undefined."""
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


def test_moved_weights_are_served_from_their_new_addresses(module: nn.Module, instance: ServedModel) -> None:
    """This holds if they were suspended first, and if the engine did not announce the move."""
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


def test_a_changed_layout_ends_seeding(module: nn.Module, instance: ServedModel) -> None:
    """The engine keeps serving; no instance that had the old model can use the new one."""
    found = []
    for other in (nn.Parameter(torch.zeros(3, 16)), None):
        instance.fence()
        module.register_parameter("weight", other)
        instance.renew()
        join_renewals(instance)
        found.append(instance.seed.manifest)
    assert [None, None] == found


class LoraLayer(nn.Module):
    """A layer that an engine puts around another one to serve adapters."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = torch.zeros(2, 16)


@pytest.mark.parametrize("suspends", [True, False])
def test_layers_wrapped_for_lora_keep_their_names(rank: Rank, suspends: bool) -> None:
    """A server that serves adapters still serves its base weights, also after they have changed."""
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with serving(module, rank) as instance:
        layer = module[1]
        module[1] = LoraLayer(layer)
        if suspends:
            instance.suspend()
        with updating(instance), torch.no_grad():
            module.get_parameter("1.base_layer.weight").fill_(3.0)
        join_renewals(instance)
        module[1] = layer
        assert current(module, instance)


@pytest.mark.parametrize("suspends", [True, False])
def test_tensors_attached_to_the_model_later_are_ignored(
    module: nn.Module, instance: ServedModel, suspends: bool
) -> None:
    """An update serves the same tensors as before, even if a new workspace cannot be captured."""
    layout = instance.seed.image.layout
    module.workspace = torch.zeros(3)
    module.unread = torch.empty(2, device="meta")
    if suspends:
        instance.suspend()
    with updating(instance), torch.no_grad():
        module.get_parameter("weight").fill_(3.0)
    join_renewals(instance)
    served_image, manifest = instance.seed.image, instance.seed.manifest
    assert layout == served_image.layout
    assert capture(module, like=layout).manifest() == manifest


def test_a_bug_in_a_renewal_does_not_affect_the_engine(instance: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is served, and no thread dies."""

    def broken(_: HiddenState) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(HiddenState, "save", broken)
    instance.fence()
    instance.renew()
    join_renewals(instance)
    assert None is instance.seed.manifest


@pytest.mark.parametrize("call", ["fence", "suspend"])
def test_a_failing_exporter_does_not_fail_the_engine(
    module: nn.Module, instance: ServedModel, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The weights are not served at first, and are served again once they are complete."""

    def broken(_: Seed) -> None:
        raise OSError("the device failed")

    with monkeypatch.context() as patched:
        patched.setattr(Seed, "_disconnect_readers", broken)
        getattr(instance, call)()
        within = instance.seed.manifest
    instance.renew()
    join_renewals(instance)
    assert within is None
    assert current(module, instance)


def test_a_seed_that_still_serves_after_a_failure_is_closed(
    instance: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No seed is better than one whose weights change."""

    def broken(_: Seed) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Seed, "fence", broken)
    with updating(instance):
        ended = instance.seed._exports.is_shut_down
    assert ended


def test_a_closed_served_model_does_nothing(module: nn.Module, instance: ServedModel) -> None:
    """All calls are ignored, including repeated closes."""
    instance.close(0.0)
    instance.close(0.0)
    generation = instance.seed.generation
    instance.fence()
    instance.suspend()
    instance.renew()
    assert generation == instance.seed.generation
    assert instance == served_model(module)
    assert served_model(nn.Linear(1, 1)) is None


def fill(module: nn.Module, value: float) -> None:
    """Overwrite the weights."""
    with torch.no_grad():
        module.get_parameter("weight").fill_(value)


def of_bytes(module: nn.Module) -> str:
    """Return the version that is derived from the bytes alone."""
    return of_weights(capture(module).manifest().weights_id)


def update(module: nn.Module, instance: ServedModel, value: float, version: str | None = None) -> str | None:
    """Update the weights in place and return the version served afterwards."""
    with updating(instance, version):
        fill(module, value)
    join_renewals(instance)
    return instance.seed.version


several = pytest.mark.parametrize("rank", [Rank(tp=1, tp_size=2)])
"""The model is one rank of several."""


def test_an_unnamed_update_is_named_by_its_bytes(module: nn.Module, instance: ServedModel) -> None:
    """On a server of one rank, unchanged bytes keep their version."""
    first = update(module, instance, 3.0)
    assert of_bytes(module) == first
    assert first == update(module, instance, 3.0)


def test_an_update_with_the_same_bytes_keeps_the_version(module: nn.Module, instance: ServedModel) -> None:
    """New servers on the same files can still fork from it."""
    with updating(instance):
        pass
    join_renewals(instance)
    assert "files:old" == instance.seed.version


@several
def test_a_rank_of_several_is_named_by_its_update_count(module: nn.Module, instance: ServedModel) -> None:
    """No rank knows the others' bytes, but all ranks of a replica see the same updates."""
    assert of_update("replica-1", 1) == update(module, instance, 3.0)
    assert of_update("replica-1", 2) == update(module, instance, 4.0)


@contextlib.contextmanager
def rank_of_two(module: nn.Module) -> Iterator[tuple[ServedModel, StoreRecords]]:
    """One of two ranks after an update, and the records of the other one, which has not completed it."""
    store = HashStore()
    other = StoreRecords(store, "model", "main", 1, 2)
    with serving(module, Rank(tp_size=2), lambda: agreement_with(2, store)) as instance:
        with updating(instance):
            fill(module, 3.0)
        yield instance, other


def test_a_rank_serves_an_update_once_all_ranks_have_completed_it(module: nn.Module) -> None:
    """Until then its weights are not served under any version."""
    with rank_of_two(module) as (instance, other):
        waiting = [thread for thread in threading.enumerate() if thread.name == "rfork-renew"]
        assert 1 == len(waiting)
        assert None is instance.seed.manifest
        other.record(1)
        join_renewals(instance)
        assert current(module, instance)
        assert of_update("replica-1", 1) == instance.seed.version


def test_a_rank_that_waits_for_the_others_follows_the_next_update(module: nn.Module) -> None:
    """The update that the other rank has missed is never served."""
    with rank_of_two(module) as (instance, other):
        with updating(instance):
            fill(module, 4.0)
        other.record(2)
        join_renewals(instance)
        assert current(module, instance)
        assert of_update("replica-1", 2) == instance.seed.version


def test_closing_ends_the_wait_for_the_other_ranks(module: nn.Module) -> None:
    """No thread is left."""
    with serving(module, Rank(tp_size=2), lambda: agreement_with(2)) as instance, updating(instance):
        fill(module, 3.0)
    join_renewals(instance)
    assert [] == [thread for thread in threading.enumerate() if thread.name == "rfork-renew"]


def test_ranks_that_cannot_agree_serve_updates_of_a_version_only(
    module: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing proves that the other ranks have the same update."""
    with serving(module, Rank(tp_size=2), lambda: None) as instance:
        with updating(instance):
            fill(module, 3.0)
        join_renewals(instance)
        assert None is instance.seed.manifest
        assert "cannot agree on an update" in caplog.text
        assert "step-5" == update(module, instance, 4.0, "step-5")


@several
def test_failed_updates_count(module: nn.Module, instance: ServedModel) -> None:
    """They may have failed on one rank only, and the next name must be equal on all ranks."""
    instance.begin_update()
    instance.renew()
    join_renewals(instance)
    assert "files:old" == instance.seed.version
    assert of_update("replica-1", 2) == update(module, instance, 3.0)


@several
def test_an_update_is_named_by_its_number_at_the_start(module: nn.Module, instance: ServedModel) -> None:
    """An update that begins on other ranks meanwhile has its own number on all ranks."""
    with updating(instance):
        instance.count_update()
        fill(module, 3.0)
    join_renewals(instance)
    assert of_update("replica-1", 1) == instance.seed.version
    assert of_update("replica-1", 3) == update(module, instance, 4.0)


@several
def test_a_named_update_has_that_name(module: nn.Module, instance: ServedModel) -> None:
    """It is the engine's weight version, or that of the files that were read."""
    assert "step-5" == update(module, instance, 3.0, "step-5")


@several
def test_an_update_from_the_same_files_keeps_the_version(module: nn.Module, instance: ServedModel) -> None:
    """An example is the reload after a sleep that discarded the weights."""
    assert "files:old" == update(module, instance, 3.0, "files:old")


@several
@pytest.mark.parametrize("version", [None, "step-5"])
def test_sleep_keeps_the_version_of_an_update(version: str | None, module: nn.Module, instance: ServedModel) -> None:
    """The weights are restored unchanged."""
    before = update(module, instance, 3.0, version)
    instance.suspend()
    instance.renew()
    join_renewals(instance)
    assert current(module, instance)
    assert before == instance.seed.version


@several
def test_an_update_interrupted_by_a_sleep_names_the_weights_after_it(module: nn.Module, instance: ServedModel) -> None:
    """The memory was released before the digest was complete."""
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
def test_an_update_interrupted_by_another_leaves_the_name_to_it(module: nn.Module, instance: ServedModel) -> None:
    """The name of the first update does not matter."""
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
