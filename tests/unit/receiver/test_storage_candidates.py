"""Storage candidates that a fork offers to read, and when."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from rfork.errors import SettingsError
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.receiver.clean_module import DerivedTensors
from rfork.receiver.fallback import (
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


def test_storage_candidates_keep_their_order(fleet: Fleet, checkpoint: Path, tmp_path: Path) -> None:
    """A snapshot, a checkpoint and a loader are offered in the order in which they are configured."""
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
    assert uris == storage_candidates(planner)
    assert [snapshot_image.manifest().weights_id, None, None] == weights_ids
    assert snapshot_image.manifest().weights_id == report.weights_id
    assert report.image_bytes == report.storage_bytes


def test_a_checkpoint_that_needs_conversion_is_offered_as_a_loader(fleet: Fleet, checkpoint: Path) -> None:
    """If types differ, it is read completely by the loader."""
    planner = scripted_planner(NO_SOURCE_PLAN, storage_plan("loader", checkpoint.as_uri()))
    module = Model(1.0, dtype=torch.bfloat16)
    report = run_fork(fleet, module, planner, [checkpoint_fallback(checkpoint)])
    assert [("loader", checkpoint.as_uri())] == storage_candidates(planner)
    assert "forked" == report.outcome
    assert report.image_bytes == report.storage_bytes
    assert torch.equal(Model(7.0).weight.to(torch.bfloat16), module.weight)


def test_a_missing_checkpoint_is_not_offered(fleet: Fleet, tmp_path: Path) -> None:
    """The fork reads from the existing seed and promises no other instance that it can load."""
    seed = fleet.source("seed", capture(Model(0.0)))
    planner = scripted_planner(plan(route(seed, ALL)))
    report = run_fork(fleet, Model(1.0), planner, [checkpoint_fallback(tmp_path / "nothing")])
    assert [] == storage_candidates(planner)
    assert "forked" == report.outcome
    assert 0 == report.storage_bytes


def test_an_unusable_candidate_is_reported(fleet: Fleet, checkpoint: Path, tmp_path: Path) -> None:
    """The next candidate is read instead, and the report contains the reason."""
    planner = scripted_planner(NO_SOURCE_PLAN, storage_plan("checkpoint", checkpoint.as_uri()))
    fallbacks = [snapshot_fallback(tmp_path / "nothing.safetensors"), checkpoint_fallback(checkpoint)]
    report = run_fork(fleet, Model(1.0), planner, fallbacks)
    assert "forked" == report.outcome
    assert report.image_bytes == report.storage_bytes
    assert ["StorageNotFound", "NoSource"] == [reason.partition(":")[0] for reason in report.reasons]


def test_an_independent_cold_start_offers_no_storage(fleet: Fleet, checkpoint: Path) -> None:
    """With `cold_start` set to independent, the checkpoint is only a fallback."""
    planner, module = scripted_planner(plan(reason="no source")), Model(1.0)
    report = run_fork(fleet, module, planner, [checkpoint_fallback(checkpoint)], cold_start="independent")
    assert [] == storage_candidates(planner)
    assert "fallback" == report.outcome
    assert 1 == len(planner.requests)
    assert torch.equal(Model(7.0).weight, module.weight)


def test_a_failed_candidate_is_not_offered_again(fleet: Fleet, checkpoint: Path) -> None:
    """The next request offers only the other one."""

    def broken(module: nn.Module) -> None:
        raise ZeroDivisionError("a bug")

    planner = scripted_planner(plan(), storage_plan("loader"), plan(reason="no other source"))
    run_fork(fleet, Model(1.0), planner, [loader_fallback(broken), checkpoint_fallback(checkpoint)])
    offered = [[offer.kind for offer in request.instance.storage] for request in planner.requests]
    assert [[], ["loader", "checkpoint"], ["checkpoint"]] == offered


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        pytest.param("ftp://host/model", "ftp://", id="scheme"),
        pytest.param("s3://bucket/" + "a" * 2048, "2048", id="length"),
        pytest.param("s3://bucket/a\nb.safetensors", "planner does not accept the URI", id="letters"),
    ],
)
def test_an_invalid_snapshot_uri_is_a_settings_error(uri: str, message: str) -> None:
    """It ends the fork with a clear message and not with a silent fallback."""
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
def test_a_snapshot_is_named_by_its_file(uri: str, rank: Rank, redacted_uri: str) -> None:
    """In a folder, each rank has a separate file; the signature of a presigned URL is not disclosed."""
    fallback = snapshot_fallback(uri, rank=rank)
    assert redacted_uri == fallback.uri
    assert f"snapshot {redacted_uri}" == fallback.name


def test_storage_is_offered_only_while_the_fork_runs(fleet: Fleet, checkpoint: Path) -> None:
    """A seed offers no storage, since it has the image."""
    seed = fleet.source("seed", capture(Model(0.0)))
    planner = scripted_planner(NO_SOURCE_PLAN, plan(route(seed, ALL)))
    report = run_fork(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)])
    assert report.seed is not None
    expected = StorageCandidate(
        kind="checkpoint",
        uri=checkpoint.as_uri(),
        origin=planner.requests[-1].instance.storage[0].origin,
    )
    assert (expected,) == planner.requests[-1].instance.storage
    assert () == report.seed.storage


def test_a_fork_with_a_source_opens_no_files(fleet: Fleet, checkpoint: Path) -> None:
    """A blocked disk costs nothing when it is not needed."""
    opened: list[nn.Module] = []

    def hang(module: nn.Module, image: Image, derived: DerivedTensors) -> None:
        opened.append(module)

    seed = fleet.source("seed", capture(Model(0.0)))
    planner = scripted_planner(plan(route(seed, ALL)))
    report = run_fork(fleet, Model(1.0), planner, [Fallback("blocked", load_twos, open=hang)])
    assert "forked" == report.outcome
    assert [] == opened
    assert 1 == len(planner.requests)
    assert () == planner.requests[0].instance.storage


def test_files_are_offered_when_no_source_exists(fleet: Fleet, checkpoint: Path) -> None:
    """A cold start sends one more request, and reports its faults only once."""
    planner = scripted_planner(NO_SOURCE_PLAN, storage_plan("checkpoint", checkpoint.as_uri()))
    report = run_fork(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)])
    offered_types = [[offer.kind for offer in request.instance.storage] for request in planner.requests]
    assert "forked" == report.outcome
    assert [[], ["checkpoint"]] == offered_types


def test_files_that_cannot_be_opened_in_time_are_not_offered(fleet: Fleet, checkpoint: Path) -> None:
    """A blocked disk delays neither the fork forever nor the offer of another candidate."""
    proceed = threading.Event()

    def hang(module: nn.Module, image: Image, derived: DerivedTensors) -> None:
        proceed.wait(NEVER_S)

    planner = scripted_planner(NO_SOURCE_PLAN, storage_plan("checkpoint", checkpoint.as_uri()))
    fallbacks = [Fallback("blocked", load_twos, open=hang), checkpoint_fallback(checkpoint)]
    report = run_fork(fleet, Model(1.0), planner, fallbacks, storage_idle_timeout_s=0.5)
    proceed.set()
    assert "forked" == report.outcome
    assert [("checkpoint", checkpoint.as_uri())] == storage_candidates(planner)


@pytest.mark.parametrize(
    ("fallback", "is_local"),
    [
        (checkpoint_fallback("/models/m"), True),
        (checkpoint_fallback("s3://bucket/m"), False),
        (snapshot_fallback("/models/m.safetensors"), True),
        (snapshot_fallback("s3://bucket/m.safetensors"), False),
        (loader_fallback(load_twos), False),
    ],
    ids=lambda value: value.name if isinstance(value, Fallback) else str(value),
)
def test_remote_storage_is_not_local(fallback: Fallback, is_local: bool) -> None:
    """Other instances read it too, so it is measured later."""
    assert is_local == fallback.is_local
