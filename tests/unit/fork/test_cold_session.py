"""A cold start from end to end: what is offered, what is read, and what others get meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rfork.errors import SettingsError
from rfork.fork.fallback import Fallback, checkpoint_fallback, loader_fallback, snapshot_fallback
from rfork.fork.report import ForkReport
from rfork.fork.session import ForkSession
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.seed.seed import Identity
from rfork.storage.snapshot import write_snapshot
from rfork.transport.memory import MemoryTransport
from rfork.wire import Plan, StorageKind, StorageOffer, StorageRead
from tests.unit.fork.fleet import Fleet, Script, plan, route, settings
from tests.unit.fork.planner import FakePlanner

CHUNKS = 5
ALL = (0, CHUNKS)


class Model(nn.Module):
    """Four chunks of weights and a table that the model computes for itself."""

    def __init__(self, value: float, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        weight = (torch.arange(MIB * 1.0) + value).to(dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("table", torch.arange(8.0), persistent=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that holds Model(7.0)."""
    save_file({"weight": Model(7.0).weight.detach()}, tmp_path / "model.safetensors")
    return tmp_path


def load_twos(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("weight").fill_(2.0)


def elected(kind: StorageKind, uri: str = "") -> Plan:
    return plan(storage=[StorageRead(kind=kind, uri=uri, chunks=(ALL,))])


def forked(
    fleet: Fleet, module: nn.Module, planner: FakePlanner, ways: Sequence[Fallback], **changed: str
) -> ForkReport:
    chosen = settings().model_copy(update=changed)
    report = ForkSession(
        module,
        Identity("model", instance_id="target"),
        chosen,
        [MemoryTransport(fleet.network)],
        planner=planner.client(),
        dial=fleet.peers.dial,
        fallbacks=ways,
        serve_peer=fleet.peers.service,
    ).run()
    assert report.seed is not None
    report.seed.close()
    return report


def planning(*plans: Plan) -> FakePlanner:
    return FakePlanner(Script([partial(copy, each) for each in plans]))


def offers(planner: FakePlanner) -> list[tuple[str, str]]:
    return [(offer.kind, offer.uri) for offer in planner.requests[0].instance.storage]


def test_the_elected_reads_its_checkpoint(fleet: Fleet, checkpoint: Path) -> None:
    """Chunk by chunk, with what the model computed for itself; the planner is told what was read."""
    planner, module = planning(elected("checkpoint", checkpoint.as_uri())), Model(1.0)
    report = forked(fleet, module, planner, [checkpoint_fallback(checkpoint)])
    name = f"checkpoint:{checkpoint.as_uri()}"
    assert (True, list(range(8))) == (
        torch.equal(Model(7.0).weight, module.weight),
        module.get_buffer("table").tolist(),
    )
    assert ("forked", None, report.image_bytes, capture(module).manifest().weights_id, CHUNKS) == (
        report.outcome,
        report.fallback,
        report.storage_bytes,
        report.weights_id,
        report.chunks_verified,
    )
    assert [("forked", {name: report.image_bytes})] == [
        (finish.outcome, finish.sources) for _, finish in planner.finishes
    ]
    assert f"from {name}" in report.line()


def test_what_is_offered(fleet: Fleet, checkpoint: Path, tmp_path: Path) -> None:
    """A snapshot, a checkpoint and a loader, in the order they were given."""
    held = capture(Model(7.0))
    path = tmp_path / "snapshot.safetensors"
    write_snapshot(held, held.manifest(), path)
    ways = [snapshot_fallback(path.as_uri()), checkpoint_fallback(checkpoint), loader_fallback(load_twos)]
    planner = planning(elected("snapshot", path.as_uri()))
    report = forked(fleet, Model(1.0), planner, ways)
    uris = [("snapshot", path.as_uri()), ("checkpoint", checkpoint.as_uri()), ("loader", "")]
    told = planner.requests[0].instance.storage
    known = [offer.weights_id for offer in told]
    assert (uris, [held.manifest().weights_id, None, None]) == (offers(planner), known)
    assert (held.manifest().weights_id, report.image_bytes) == (report.weights_id, report.storage_bytes)


def test_a_checkpoint_that_has_to_be_converted_is_a_loader(fleet: Fleet, checkpoint: Path) -> None:
    """Where types differ it is offered, and read, as a whole."""
    planner, module = planning(elected("loader", checkpoint.as_uri())), Model(1.0, dtype=torch.bfloat16)
    report = forked(fleet, module, planner, [checkpoint_fallback(checkpoint)])
    assert ([("loader", checkpoint.as_uri())], "forked", report.image_bytes) == (
        offers(planner),
        report.outcome,
        report.storage_bytes,
    )
    assert torch.equal(Model(7.0).weight.to(torch.bfloat16), module.weight)


def test_a_checkpoint_that_is_missing_is_not_offered(fleet: Fleet, tmp_path: Path) -> None:
    """What cannot work is not promised to others; the seed that there is gives."""
    seed = fleet.source("seed", capture(Model(0.0)))
    planner = planning(plan(route(seed, ALL)))
    report = forked(fleet, Model(1.0), planner, [checkpoint_fallback(tmp_path / "nothing")])
    assert ([], "forked", 0) == (offers(planner), report.outcome, report.storage_bytes)


def test_whoever_reads_its_own_offers_nothing(fleet: Fleet, checkpoint: Path) -> None:
    """With `cold_start` own, the checkpoint is only the fallback that it always was."""
    planner, module = planning(plan(reason="nobody")), Model(1.0)
    report = forked(fleet, module, planner, [checkpoint_fallback(checkpoint)], cold_start="own")
    assert ([], "fallback", 0, True) == (
        offers(planner),
        report.outcome,
        report.storage_bytes,
        torch.equal(Model(7.0).weight, module.weight),
    )


def test_the_elected_runs_its_loader(fleet: Fleet) -> None:
    """What the loader left is digested, and given; it counts as read from storage, not as a fallback."""
    planner, module = planning(elected("loader")), Model(1.0)
    report = forked(fleet, module, planner, [loader_fallback(load_twos)])
    assert ("forked", None, report.image_bytes, {"loader:": report.image_bytes}) == (
        report.outcome,
        report.fallback,
        report.storage_bytes,
        planner.finishes[0][1].sources,
    )
    assert (True, capture(module).manifest().weights_id) == (
        bool((module.weight == 2.0).all()),
        report.weights_id,
    )


def test_a_loader_that_fails_falls_back(fleet: Fleet, checkpoint: Path) -> None:
    """The planner hears of it; when it knows nothing else, the ways that are left are tried."""

    def broken(module: nn.Module) -> None:
        raise ZeroDivisionError("a bug")

    planner, module = planning(elected("loader"), plan(reason="nobody else")), Model(1.0)
    report = forked(fleet, module, planner, [loader_fallback(broken), checkpoint_fallback(checkpoint)])
    assert ("fallback", f"checkpoint {checkpoint}", True) == (
        report.outcome,
        report.fallback,
        torch.equal(Model(7.0).weight, module.weight),
    )
    assert [("target", "storage", "UserError")] == planner.script.faults


def test_a_loader_that_puts_new_tensors_in_place_makes_no_seed(fleet: Fleet) -> None:
    """The module is loaded; those that wait are told that nothing comes from here."""

    def rebind(module: nn.Module) -> None:
        module.load_state_dict(Model(2.0).state_dict(), assign=True)

    planner, module = planning(elected("loader")), Model(1.0)
    report = forked(fleet, module, planner, [loader_fallback(rebind)])
    assert report.seed is not None
    assert ("fallback", "loader", 1, None, True) == (
        report.outcome,
        report.fallback,
        report.seed.generation,
        report.seed.manifest,
        torch.equal(Model(2.0).weight, module.weight),
    )


def test_a_snapshot_is_a_fallback_too(fleet: Fleet, tmp_path: Path) -> None:
    """Without a source and without an election it is read whole, each chunk verified."""
    held, path = capture(Model(7.0)), tmp_path / "snapshot.safetensors"
    write_snapshot(held, held.manifest(), path)
    planner, module = planning(plan(reason="nobody")), Model(1.0)
    report = forked(fleet, module, planner, [snapshot_fallback(path.as_uri())])
    assert (f"snapshot {path.as_uri()}", held.manifest().weights_id) == (report.fallback, report.weights_id)


def test_a_rotten_snapshot_is_no_fallback(fleet: Fleet, tmp_path: Path) -> None:
    """A chunk that does not match its digest fails the snapshot; the next way is tried."""
    held, path = capture(Model(7.0)), tmp_path / "snapshot.safetensors"
    write_snapshot(held, held.manifest(), path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    planner, module = planning(plan(reason="nobody")), Model(1.0)
    ways = [snapshot_fallback(path.as_uri()), loader_fallback(load_twos)]
    report = forked(fleet, module, planner, ways)
    assert ("loader", True) == (report.fallback, bool((module.weight == 2.0).all()))


def test_a_snapshot_uri_that_cannot_be_used_is_the_user_s(fleet: Fleet) -> None:
    """A setting that makes no sense ends the fork with a word on it, not with a silent fallback."""
    with pytest.raises(SettingsError, match="s3://"):
        forked(fleet, Model(1.0), planning(plan()), [snapshot_fallback("s3://bucket/model")])


def test_an_offer_that_lasts_only_while_it_forks(fleet: Fleet, checkpoint: Path) -> None:
    """A seed offers no storage: it holds the image."""
    seed = fleet.source("seed", capture(Model(0.0)))
    planner = planning(plan(route(seed, ALL)))
    report = forked(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)])
    assert report.seed is not None
    expected = StorageOffer(
        kind="checkpoint",
        uri=checkpoint.as_uri(),
        origin=planner.requests[0].instance.storage[0].origin,
    )
    assert ((expected,), ()) == (planner.requests[0].instance.storage, report.seed.storage)
