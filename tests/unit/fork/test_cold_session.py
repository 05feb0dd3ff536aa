"""A cold start from end to end: what is offered, what is read, and what others get meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rfork.errors import NothingLeft, SettingsError, SourceStalled
from rfork.fields import StorageKind
from rfork.fork.asking import COMPARE_S
from rfork.fork.fallback import Derived, Fallback, checkpoint_fallback, loader_fallback, snapshot_fallback
from rfork.fork.report import ForkReport
from rfork.fork.session import ForkSession
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.peer.answers import PeerHost
from rfork.peer.memory import MemoryPeer, MemoryService
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.storage.snapshots.writer import write_snapshot
from rfork.transport.memory import Faults, MemoryTransport
from rfork.wire import Plan, Rank, StorageOffer, StorageRead
from tests.unit.fork.fleet import NEVER_S, Fleet, Script, plan, route, settings
from tests.unit.fork.planner import FakePlanner

CHUNKS = 5
NOBODY = plan(reason="nobody holds it")
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
    fleet: Fleet, module: nn.Module, planner: FakePlanner, ways: Sequence[Fallback], **changed: str | float
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
    return [(offer.kind, offer.uri) for offer in planner.requests[-1].instance.storage]


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
    planner = planning(NOBODY, elected("snapshot", path.as_uri()))
    report = forked(fleet, Model(1.0), planner, ways)
    uris = [("snapshot", path.as_uri()), ("checkpoint", checkpoint.as_uri()), ("loader", "")]
    told = planner.requests[-1].instance.storage
    known = [offer.weights_id for offer in told]
    assert (uris, [held.manifest().weights_id, None, None]) == (offers(planner), known)
    assert (held.manifest().weights_id, report.image_bytes) == (report.weights_id, report.storage_bytes)


def test_a_checkpoint_that_has_to_be_converted_is_a_loader(fleet: Fleet, checkpoint: Path) -> None:
    """Where types differ it is offered, and read, as a whole."""
    planner = planning(NOBODY, elected("loader", checkpoint.as_uri()))
    module = Model(1.0, dtype=torch.bfloat16)
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


def test_a_way_that_cannot_be_offered_is_told_in_the_report(
    fleet: Fleet, checkpoint: Path, tmp_path: Path
) -> None:
    """The next way is read in its stead, and the report says why."""
    planner = planning(NOBODY, elected("checkpoint", checkpoint.as_uri()))
    ways = [snapshot_fallback(tmp_path / "nothing.safetensors"), checkpoint_fallback(checkpoint)]
    report = forked(fleet, Model(1.0), planner, ways)
    assert ("forked", report.image_bytes, ["StorageMissing"]) == (
        report.outcome,
        report.storage_bytes,
        [reason.partition(":")[0] for reason in report.reasons],
    )


def test_whoever_reads_its_own_offers_nothing(fleet: Fleet, checkpoint: Path) -> None:
    """With `cold_start` own, the checkpoint is only the fallback that it always was."""
    planner, module = planning(plan(reason="nobody")), Model(1.0)
    report = forked(fleet, module, planner, [checkpoint_fallback(checkpoint)], cold_start="own")
    assert ([], "fallback", 1, True) == (
        offers(planner),
        report.outcome,
        len(planner.requests),
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


def test_what_failed_is_offered_no_more(fleet: Fleet, checkpoint: Path) -> None:
    """Of two ways the one that failed is gone from what the planner is told next."""

    def broken(module: nn.Module) -> None:
        raise ZeroDivisionError("a bug")

    planner = planning(plan(), elected("loader"), plan(reason="nobody else"))
    forked(fleet, Model(1.0), planner, [loader_fallback(broken), checkpoint_fallback(checkpoint)])
    offered = [[offer.kind for offer in request.instance.storage] for request in planner.requests]
    assert [[], ["loader", "checkpoint"], ["checkpoint"]] == offered


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


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        pytest.param("ftp://host/model", "ftp://", id="kind"),
        pytest.param("s3://bucket/" + "a" * 2048, "2048", id="length"),
        pytest.param("s3://bucket/a\nb.safetensors", "told to the planner", id="letters"),
    ],
)
def test_a_snapshot_uri_that_cannot_be_used_is_the_user_s(uri: str, told: str) -> None:
    """A setting that makes no sense ends the fork with a word on it, not with a silent fallback."""
    with pytest.raises(SettingsError, match=told):
        snapshot_fallback(uri)


@pytest.mark.parametrize(
    ("uri", "rank", "told"),
    [
        ("s3://bucket/model/", Rank(tp=1, tp_size=2), "s3://bucket/model/model-rank-001.safetensors"),
        ("https://host/a%20b.safetensors?sig=secret", Rank(), "https://host/a%20b.safetensors"),
        ("/models/x.safetensors", Rank(role="draft"), "file:///models/x.safetensors"),
        ("/models/x", Rank(role="draft"), "file:///models/x/draft-rank-000.safetensors"),
    ],
)
def test_a_snapshot_is_told_by_its_file(uri: str, rank: Rank, told: str) -> None:
    """Each rank's own in a folder; what a presigned URL is signed with is told to nobody."""
    way = snapshot_fallback(uri, rank=rank)
    assert (told, f"snapshot {told}") == (way.uri, way.name)


def test_an_offer_that_lasts_only_while_it_forks(fleet: Fleet, checkpoint: Path) -> None:
    """A seed offers no storage: it holds the image."""
    seed = fleet.source("seed", capture(Model(0.0)))
    planner = planning(NOBODY, plan(route(seed, ALL)))
    report = forked(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)])
    assert report.seed is not None
    expected = StorageOffer(
        kind="checkpoint",
        uri=checkpoint.as_uri(),
        origin=planner.requests[-1].instance.storage[0].origin,
    )
    assert ((expected,), ()) == (planner.requests[-1].instance.storage, report.seed.storage)


def test_a_fork_that_has_a_source_opens_no_files(fleet: Fleet, checkpoint: Path) -> None:
    """A disk that hangs costs nothing where it is not needed."""
    opened: list[nn.Module] = []

    def hang(module: nn.Module, image: Image, derived: Derived) -> None:
        opened.append(module)

    seed = fleet.source("seed", capture(Model(0.0)))
    planner = planning(plan(route(seed, ALL)))
    report = forked(fleet, Model(1.0), planner, [Fallback("hung", load_twos, open=hang)])
    assert ("forked", [], 1, ()) == (
        report.outcome,
        opened,
        len(planner.requests),
        planner.requests[0].instance.storage,
    )


def test_files_are_offered_once_nobody_gives(fleet: Fleet, checkpoint: Path) -> None:
    """One more question for a cold group, and the faults are told only once."""
    planner = planning(NOBODY, elected("checkpoint", checkpoint.as_uri()))
    report = forked(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)])
    told = [[offer.kind for offer in request.instance.storage] for request in planner.requests]
    assert ("forked", [[], ["checkpoint"]]) == (report.outcome, told)


def test_files_that_cannot_be_opened_in_time_are_not_offered(fleet: Fleet, checkpoint: Path) -> None:
    """One disk that hangs holds up neither the fork for ever nor the offer of another."""
    go_on = threading.Event()

    def hang(module: nn.Module, image: Image, derived: Derived) -> None:
        go_on.wait(NEVER_S)

    planner = planning(NOBODY, elected("checkpoint", checkpoint.as_uri()))
    ways = [Fallback("hung", load_twos, open=hang), checkpoint_fallback(checkpoint)]
    report = forked(fleet, Model(1.0), planner, ways, storage_stall_s=0.5)
    go_on.set()
    assert ("forked", [("checkpoint", checkpoint.as_uri())]) == (report.outcome, offers(planner))


def test_what_a_fallback_reads_is_told(fleet: Fleet, checkpoint: Path) -> None:
    """Its whole image counts under the name of its files, in the report and to the planner."""
    planner = planning(NOBODY)
    report = forked(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)], patience_s=0.0)
    sources = {f"checkpoint:{checkpoint.as_uri()}": report.image_bytes}
    assert ("fallback", report.image_bytes, sources) == (
        report.outcome,
        report.storage_bytes,
        planner.finishes[0][1].sources,
    )


def test_what_came_before_a_fallback_is_told_too(fleet: Fleet, checkpoint: Path) -> None:
    """Chunks of a source that died stay in the report beside what was loaded instead."""
    seed = fleet.source("seed", capture(Model(7.0)), Faults(dies_after=2 * MIB))
    planner = planning(plan(route(seed, ALL)), NOBODY)
    report = forked(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)], patience_s=0.0, window=1)
    assert [("checkpoint", report.image_bytes), ("seed", 2 * MIB)] == [
        (share.source_id.partition(":")[0], share.verified_bytes) for share in report.sources
    ]


def test_what_a_failed_fork_read_is_told(fleet: Fleet) -> None:
    """A fork that ends without its weights names what its sources gave all the same."""
    seed = fleet.source("seed", capture(Model(7.0)), Faults(dies_after=2 * MIB))
    planner = planning(plan(route(seed, ALL)), NOBODY)
    with pytest.raises(NothingLeft):
        forked(fleet, Model(1.0), planner, [], patience_s=0.0, window=1)
    assert [("failed", {"seed": 2 * MIB}, 2 * MIB)] == [
        (finish.outcome, finish.sources, finish.bytes_read) for _, finish in planner.finishes
    ]


def test_several_that_are_told_to_load_their_own(fleet: Fleet) -> None:
    """Each loads, gives to nobody, and none waits for another."""
    planners = [planning(elected("loader")) for _ in range(3)]
    modules = [Model(1.0) for _ in planners]
    with ThreadPoolExecutor(len(planners)) as pool:
        reports = list(
            pool.map(
                lambda module, planner: forked(fleet, module, planner, [loader_fallback(load_twos)]),
                modules,
                planners,
            )
        )
    assert [("forked", reports[0].image_bytes, True)] * 3 == [
        (report.outcome, report.storage_bytes, bool((module.weight == 2.0).all()))
        for report, module in zip(reports, modules, strict=True)
    ]


def test_who_waits_for_a_loader_that_ends_without_a_seed_asks_at_once(fleet: Fleet) -> None:
    """The planner hears first how it ended, then its readers hear that nothing comes from it."""
    waiting = threading.Event()

    def rebind(module: nn.Module) -> None:
        waiting.wait(NEVER_S)
        module.load_state_dict(Model(2.0).state_dict(), assign=True)

    hosts: list[Seed] = []
    started = threading.Event()

    def serve(host: PeerHost, chosen: Settings) -> MemoryService:
        assert isinstance(host, Seed)
        hosts.append(host)
        started.set()
        return fleet.peers.service(host, chosen)

    leader = planning(elected("loader"))
    session = ForkSession(
        Model(1.0),
        Identity("model", instance_id="leader"),
        settings(),
        [MemoryTransport(fleet.network)],
        planner=leader.client(),
        dial=fleet.peers.dial,
        fallbacks=[loader_fallback(rebind)],
        serve_peer=serve,
    )
    ended_before: list[bool] = []
    reports: list[ForkReport] = []
    running = threading.Thread(target=lambda: reports.append(session.run()))
    running.start()
    started.wait(NEVER_S)

    def follow() -> Plan:
        waiting.set()
        return plan(route(hosts[0], ALL))

    def own() -> Plan:
        ended_before.append(bool(leader.finishes))
        return elected("loader")

    follower = FakePlanner(Script([follow, own]))
    report = forked(fleet, Model(1.0), follower, [loader_fallback(load_twos)])
    running.join()
    assert reports[0].seed is not None
    reports[0].seed.close()
    assert ("forked", [True], ["SourceChanged"]) == (
        report.outcome,
        ended_before,
        [error for _, _, error in follower.script.faults],
    )


def test_the_elected_does_not_wait_for_a_word_on_another_layout(
    fleet: Fleet, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer of another layout that does not answer is asked for a second at most before it reads."""
    patience: list[float] = []

    class Silent(MemoryPeer):
        def full_manifest(self, deadline: float) -> Manifest:
            patience.append(deadline - time.monotonic())
            raise SourceStalled("no answer")

    seed = fleet.source("seed", capture(nn.Linear(600, 600)))
    monkeypatch.setattr(fleet.peers, "dial", lambda address, token: Silent(fleet.peers, address, token))
    chosen = elected("checkpoint", checkpoint.as_uri()).model_copy(update={"other_layout": route(seed)})
    report = forked(fleet, Model(1.0), planning(NOBODY, chosen), [checkpoint_fallback(checkpoint)])
    assert ("forked", [True]) == (report.outcome, [seconds <= COMPARE_S for seconds in patience])
