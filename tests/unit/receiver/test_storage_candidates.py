"""What a fork offers to read, and when."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from rfork.errors import SettingsError
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.receiver.fallback import (
    DerivedTensors,
    Fallback,
    checkpoint_fallback,
    loader_fallback,
    snapshot_fallback,
)
from rfork.schema import Rank, StorageCandidate
from rfork.storage.snapshots.writer import write_snapshot
from tests.unit.receiver.cold_start_sessions import (
    NO_SOURCE_PLAN,
    run_fork,
    scripted_planner,
    storage_candidates,
    storage_plan,
)
from tests.unit.receiver.fleet import NEVER_S, Fleet, plan, route
from tests.unit.receiver.sessions import ALL, Model, load_twos


def test_what_is_offered(fleet: Fleet, checkpoint: Path, tmp_path: Path) -> None:
    """A snapshot, a checkpoint and a loader, in the order they were given."""
    snapshot_image = capture(Model(7.0))
    path = tmp_path / "snapshot.safetensors"
    write_snapshot(snapshot_image, snapshot_image.manifest(), path)
    fallbacks = [
        snapshot_fallback(path.as_uri()),
        checkpoint_fallback(checkpoint),
        loader_fallback(load_twos),
    ]
    planner = scripted_planner(NO_SOURCE_PLAN, storage_plan("snapshot", path.as_uri()))
    report = run_fork(fleet, Model(1.0), planner, fallbacks)
    uris = [("snapshot", path.as_uri()), ("checkpoint", checkpoint.as_uri()), ("loader", "")]
    candidates = planner.requests[-1].instance.storage
    weights_ids = [offer.weights_id for offer in candidates]
    assert (uris, [snapshot_image.manifest().weights_id, None, None]) == (
        storage_candidates(planner),
        weights_ids,
    )
    assert (snapshot_image.manifest().weights_id, report.image_bytes) == (
        report.weights_id,
        report.storage_bytes,
    )


def test_a_checkpoint_that_has_to_be_converted_is_a_loader(fleet: Fleet, checkpoint: Path) -> None:
    """Where types differ it is offered, and read, as a whole."""
    planner = scripted_planner(NO_SOURCE_PLAN, storage_plan("loader", checkpoint.as_uri()))
    module = Model(1.0, dtype=torch.bfloat16)
    report = run_fork(fleet, module, planner, [checkpoint_fallback(checkpoint)])
    assert ([("loader", checkpoint.as_uri())], "forked", report.image_bytes) == (
        storage_candidates(planner),
        report.outcome,
        report.storage_bytes,
    )
    assert torch.equal(Model(7.0).weight.to(torch.bfloat16), module.weight)


def test_a_checkpoint_that_is_missing_is_not_offered(fleet: Fleet, tmp_path: Path) -> None:
    """What cannot work is not promised to others; the seed that there is gives."""
    seed = fleet.source("seed", capture(Model(0.0)))
    planner = scripted_planner(plan(route(seed, ALL)))
    report = run_fork(fleet, Model(1.0), planner, [checkpoint_fallback(tmp_path / "nothing")])
    assert ([], "forked", 0) == (storage_candidates(planner), report.outcome, report.storage_bytes)


def test_a_way_that_cannot_be_offered_is_told_in_the_report(fleet: Fleet, checkpoint: Path, tmp_path: Path) -> None:
    """The next way is read in its stead, and the report says why."""
    planner = scripted_planner(NO_SOURCE_PLAN, storage_plan("checkpoint", checkpoint.as_uri()))
    fallbacks = [snapshot_fallback(tmp_path / "nothing.safetensors"), checkpoint_fallback(checkpoint)]
    report = run_fork(fleet, Model(1.0), planner, fallbacks)
    assert ("forked", report.image_bytes, ["StorageNotFound", "NoSource"]) == (
        report.outcome,
        report.storage_bytes,
        [reason.partition(":")[0] for reason in report.reasons],
    )


def test_whoever_reads_its_own_offers_nothing(fleet: Fleet, checkpoint: Path) -> None:
    """With `cold_start` independent, the checkpoint is only the fallback that it always was."""
    planner, module = scripted_planner(plan(reason="nobody")), Model(1.0)
    report = run_fork(fleet, module, planner, [checkpoint_fallback(checkpoint)], cold_start="independent")
    assert ([], "fallback", 1, True) == (
        storage_candidates(planner),
        report.outcome,
        len(planner.requests),
        torch.equal(Model(7.0).weight, module.weight),
    )


def test_what_failed_is_offered_no_more(fleet: Fleet, checkpoint: Path) -> None:
    """Of two ways the one that failed is gone from what the planner is told next."""

    def broken(module: nn.Module) -> None:
        raise ZeroDivisionError("a bug")

    planner = scripted_planner(plan(), storage_plan("loader"), plan(reason="nobody else"))
    run_fork(fleet, Model(1.0), planner, [loader_fallback(broken), checkpoint_fallback(checkpoint)])
    offered = [[offer.kind for offer in request.instance.storage] for request in planner.requests]
    assert [[], ["loader", "checkpoint"], ["checkpoint"]] == offered


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        pytest.param("ftp://host/model", "ftp://", id="kind"),
        pytest.param("s3://bucket/" + "a" * 2048, "2048", id="length"),
        pytest.param("s3://bucket/a\nb.safetensors", "told to the planner", id="letters"),
    ],
)
def test_a_snapshot_uri_that_cannot_be_used_is_the_user_s(uri: str, message: str) -> None:
    """A setting that makes no sense ends the fork with a word on it, not with a silent fallback."""
    with pytest.raises(SettingsError, match=message):
        snapshot_fallback(uri)


@pytest.mark.parametrize(
    ("uri", "rank", "redacted_uri"),
    [
        ("s3://bucket/model/", Rank(tp=1, tp_size=2), "s3://bucket/model/model-rank-001.safetensors"),
        ("https://host/a%20b.safetensors?sig=secret", Rank(), "https://host/a%20b.safetensors"),
        ("/models/x.safetensors", Rank(role="speculative"), "file:///models/x.safetensors"),
        ("/models/x", Rank(role="speculative"), "file:///models/x/speculative-rank-000.safetensors"),
    ],
)
def test_a_snapshot_is_told_by_its_file(uri: str, rank: Rank, redacted_uri: str) -> None:
    """Each rank's own in a folder; what a presigned URL is signed with is told to nobody."""
    fallback = snapshot_fallback(uri, rank=rank)
    assert (redacted_uri, f"snapshot {redacted_uri}") == (fallback.uri, fallback.name)


def test_an_offer_that_lasts_only_while_it_forks(fleet: Fleet, checkpoint: Path) -> None:
    """A seed offers no storage: it holds the image."""
    seed = fleet.source("seed", capture(Model(0.0)))
    planner = scripted_planner(NO_SOURCE_PLAN, plan(route(seed, ALL)))
    report = run_fork(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)])
    assert report.seed is not None
    expected = StorageCandidate(
        kind="checkpoint",
        uri=checkpoint.as_uri(),
        origin=planner.requests[-1].instance.storage[0].origin,
    )
    assert ((expected,), ()) == (planner.requests[-1].instance.storage, report.seed.storage)


def test_a_fork_that_has_a_source_opens_no_files(fleet: Fleet, checkpoint: Path) -> None:
    """A disk that hangs costs nothing where it is not needed."""
    opened: list[nn.Module] = []

    def hang(module: nn.Module, image: Image, derived: DerivedTensors) -> None:
        opened.append(module)

    seed = fleet.source("seed", capture(Model(0.0)))
    planner = scripted_planner(plan(route(seed, ALL)))
    report = run_fork(fleet, Model(1.0), planner, [Fallback("hung", load_twos, open=hang)])
    assert ("forked", [], 1, ()) == (
        report.outcome,
        opened,
        len(planner.requests),
        planner.requests[0].instance.storage,
    )


def test_files_are_offered_once_nobody_gives(fleet: Fleet, checkpoint: Path) -> None:
    """One more question for a cold group, and the faults are told only once."""
    planner = scripted_planner(NO_SOURCE_PLAN, storage_plan("checkpoint", checkpoint.as_uri()))
    report = run_fork(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)])
    offered_kinds = [[offer.kind for offer in request.instance.storage] for request in planner.requests]
    assert ("forked", [[], ["checkpoint"]]) == (report.outcome, offered_kinds)


def test_files_that_cannot_be_opened_in_time_are_not_offered(fleet: Fleet, checkpoint: Path) -> None:
    """One disk that hangs holds up neither the fork for ever nor the offer of another."""
    proceed = threading.Event()

    def hang(module: nn.Module, image: Image, derived: DerivedTensors) -> None:
        proceed.wait(NEVER_S)

    planner = scripted_planner(NO_SOURCE_PLAN, storage_plan("checkpoint", checkpoint.as_uri()))
    fallbacks = [Fallback("hung", load_twos, open=hang), checkpoint_fallback(checkpoint)]
    report = run_fork(fleet, Model(1.0), planner, fallbacks, storage_idle_timeout_s=0.5)
    proceed.set()
    assert ("forked", [("checkpoint", checkpoint.as_uri())]) == (report.outcome, storage_candidates(planner))
