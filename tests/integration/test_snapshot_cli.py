"""`rfork snapshot` with real processes: written from a seed over the network, listed, verified, removed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from benchmarks.seaweed import SeaweedServer
from rfork import _api as engine
from rfork.cli.app import app
from rfork.engines.transformers import EmptyModel, loaded_model
from rfork.errors import SourceWeightsChanged
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import image_sha256
from rfork.planner_client.client import PlannerClient
from rfork.schema import Rank
from rfork.settings import InstanceSettings, StorageSettings
from rfork.source.snapshot import snapshot_seed
from rfork.storage.snapshots.snapshot import Snapshot
from tests.conftest import StartRfork
from tests.processes import startup_patch

READY = r'"event": ?"ready"'
NAME = "model-rank-000.safetensors"
GATED_WRITER_PATCH = """
from rfork.storage.local import LocalWriter
write, left = LocalWriter.write, [2]

def gated(self, views):
    if not left[0]:
        print("half", flush=True)
        open({gate!r}).read()
    left[0] -= 1
    write(self, views)

LocalWriter.write = gated
"""
"""Startup code of a writer that blocks midway, on opening a FIFO without a reader."""

JsonDocument = dict[str, list[dict[str, object]]]


@pytest.fixture
def planner(rfork_process: StartRfork) -> str:
    """Return the URL of an empty planner."""
    process = rfork_process("planner", "--port", "0", "--json", until=READY)
    return cast(str, json.loads(process.wait_for(rf"^.*{READY}.*$").group())["url"])


@pytest.fixture
def rfork() -> SnapshotCommand:
    """Runs `rfork snapshot ARGUMENTS` in this process."""
    return SnapshotCommand()


class SnapshotCommand:
    """Runs one command at a time."""

    def __call__(self, *arguments: str, code: int = 0, environment: dict[str, str] | None = None) -> str:
        """Run the command, check its exit code, and return its output."""
        more = {"RFORK_TRANSPORTS": "http", **(environment or {})}
        done = CliRunner().invoke(app, ["snapshot", *arguments], env=more)
        assert code == done.exit_code, done.output
        return done.output

    def json(self, *arguments: str, code: int = 0, environment: dict[str, str] | None = None) -> JsonDocument:
        """Run the command and return its first JSON document."""
        lines = self(*arguments, "--json", code=code, environment=environment).splitlines()
        return cast(JsonDocument, next(json.loads(line) for line in lines if line.startswith('{"snapshots')))


def restored_sha256(model: Path, uri: str, settings: StorageSettings | None = None) -> str:
    """Return the hash of the model's tensors, restored from the snapshot."""
    image = capture(EmptyModel(model).model)
    snapshot = Snapshot.open(uri, image.layout, settings=settings)
    snapshot.fill(image)
    snapshot.close()
    return image_sha256(image)


@pytest.fixture(scope="module")
def expected_sha256(tiny_model: Path) -> str:
    """The hash of the tiny model's tensors, as loaded from its checkpoint."""
    return image_sha256(capture(loaded_model(tiny_model)))


@pytest.mark.slow  # logic: tests/unit/storage/snapshots/test_commands.py
def test_a_snapshot_of_a_seed_is_written_and_restored(
    rfork_process: StartRfork,
    planner: str,
    rfork: SnapshotCommand,
    tiny_model: Path,
    tmp_path: Path,
    expected_sha256: str,
) -> None:
    """Over the network into one safetensors file with equal tensors; then verified, damaged, removed."""
    environment = {"RFORK_TRANSPORTS": "http"}
    seed = ["seed", str(tiny_model), "--name", "tiny", "--planner", planner, "--json"]
    rfork_process(*seed, until=READY, environment=environment)
    folder = (tmp_path / "rev-1").as_uri()
    write = ["snapshot", "write", folder, "--name", "tiny", "--planner", planner, "--json"]
    writer = rfork_process(*write, environment=environment)
    assert 0 == writer.wait()
    (written,) = cast(JsonDocument, json.loads(writer.stdout))["snapshots"]
    path = tmp_path / "rev-1" / NAME
    assert path.as_uri() == written["uri"]
    assert "tiny" == written["model"]
    assert path.stat().st_size == written["bytes_written"]
    read, state = load_file(path), loaded_model(tiny_model).state_dict()
    kept = {name: tensor for name, tensor in state.items() if name in read}
    assert all(torch.equal(read[name], tensor) for name, tensor in kept.items())
    assert set(state) - {"model.embed_tokens.weight"} == set(kept)
    assert expected_sha256 == restored_sha256(tiny_model, folder)
    # The writer is no instance any more, and has no running fork.
    with PlannerClient(planner) as client:
        assert [1] == [model.seeds for model in client.models()]
        assert [] == client.forks(state="running")
    assert str(written["weights_id"]) in rfork("verify", folder)
    data = bytearray(path.read_bytes())
    data[len(data) - 2 * MIB] ^= 1
    path.write_bytes(data)
    damage = cast(list[str], rfork.json("verify", folder, code=6)["snapshots"][0]["damage"])
    assert [f"{path.as_uri()}: chunk 5"] == [line[: len(path.as_uri()) + 9] for line in damage]
    assert "chunk 5" in rfork("verify", folder, code=6)
    assert "removed 1 snapshot" in rfork("rm", folder)
    assert [] == [each for each in tmp_path.rglob("*") if each.is_file()]


def test_two_ranks_share_their_chunks(planner: str, rfork: SnapshotCommand, tiny_model: Path, tmp_path: Path) -> None:
    """Each rank is fetched in turn; common chunks are stored once, also for the next revision."""
    settings = InstanceSettings(planner=planner, transports=("http",), drain_timeout_s=0)
    module = loaded_model(tiny_model)
    first, second = Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)
    options = ["--name", "two", "--planner", planner, "--shared"]
    with (
        engine.seed(module, model="two", version="v1", rank=first, settings=settings) as one,
        engine.seed(module, model="two", version="v1", rank=second, settings=settings) as other,
    ):
        assert one.wait_registered(10)
        assert other.wait_registered(10)
        snapshots = rfork.json("write", str(tmp_path / "rev-1"), *options)["snapshots"]
        again = rfork.json("write", str(tmp_path / "rev-2"), *options, "--rank", "1")["snapshots"]
        refused = rfork("write", str(tmp_path / "one.safetensors"), *options, code=2)
        assert "is one file, and two has 2 ranks" in refused
        assert "has no rank 7" in rfork("write", str(tmp_path / "rev-3"), *options, "--rank", "7", code=2)
    bytes_written = cast(int, snapshots[0]["bytes_written"])
    assert [
        (first.key, bytes_written, 0),
        (second.key, 0, bytes_written),
        (second.key, 0, bytes_written),
    ] == [(each["rank"], each["bytes_written"], each["bytes_reused"]) for each in (*snapshots, *again)]
    listed = rfork.json("ls", str(tmp_path))["snapshots"]
    assert [("shared", bytes_written, None)] * 3 == [
        (each["form"], each["shared_bytes"], each["problem"]) for each in listed
    ]
    assert "0.000 GB freed" in rfork("rm", str(tmp_path / "rev-1"))
    assert "chunks" in rfork("verify", str(tmp_path))
    rfork("rm", str(tmp_path / "rev-2"))
    assert [] == [each for each in tmp_path.rglob("*") if each.is_file()]


@pytest.mark.parametrize("form", [(), ("--shared",)], ids=["file", "shared"])
def test_a_writer_that_is_killed_leaves_no_snapshot(
    rfork_process: StartRfork, rfork: SnapshotCommand, tiny_model: Path, tmp_path: Path, form: tuple[str, ...]
) -> None:
    """Its leftovers are listed, are no snapshot, and are swept."""
    gate, folder = tmp_path / "gate", tmp_path / "out" / "rev-1"
    os.mkfifo(gate)
    writer = rfork_process(
        "snapshot",
        "write",
        str(folder),
        "--from",
        str(tiny_model),
        *form,
        until="^half",
        environment=startup_patch(tmp_path / "patch", GATED_WRITER_PATCH.format(gate=str(gate))),
    )
    writer.signal(signal.SIGKILL)
    assert -signal.SIGKILL == writer.wait()
    listed = rfork.json("ls", str(tmp_path / "out"))
    assert [] == listed["snapshots"]
    assert len(listed["leftovers"]) > 0
    assert "no snapshot found below" in rfork("verify", str(tmp_path / "out"), code=6)
    rfork("rm", str(tmp_path / "out"), "--leftovers")
    assert [] == [each for each in (tmp_path / "out").rglob("*") if each.is_file()]


@pytest.mark.slow  # logic: tests/unit/storage/test_object_store.py
def test_snapshots_in_s3(s3: SeaweedServer, rfork: SnapshotCommand, tiny_model: Path, expected_sha256: str) -> None:
    """Both formats in a bucket: written, listed, verified, restored, removed."""
    environment, root = s3.environment(), "s3://models/snapshot-cli"
    rfork("write", f"{root}/rev-1/", "--from", str(tiny_model), "--name", "tiny", "--shared", environment=environment)
    rfork("write", f"{root}/rev-2/", "--from", str(tiny_model), "--name", "tiny", environment=environment)
    listed = rfork.json("ls", root, environment=environment)
    assert [("shared", None), ("file", None)] == [(each["form"], each["problem"]) for each in listed["snapshots"]]
    assert [] == listed["leftovers"]
    assert [expected_sha256] * 2 == [
        restored_sha256(tiny_model, f"{root}/{revision}/", s3.settings()) for revision in ("rev-1", "rev-2")
    ]
    assert 2 == rfork("verify", root, environment=environment).count(": ok: ")
    for revision in ("rev-1", "rev-2"):
        rfork("rm", f"{root}/{revision}", environment=environment)
    assert {"snapshots": [], "leftovers": []} == rfork.json("ls", root, environment=environment)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("write", "ftp://host/x", "--from", "{model}"), 2, "has an unknown scheme"),
        (("write", "https://127.0.0.1:1/x/", "--from", "{model}"), 2, "read-only"),
        (("ls", "https://127.0.0.1:1/x/"), 2, "cannot be listed"),
        (("verify", "{folder}/none"), 6, "No such file or directory"),
        (("rm", "{folder}"), 6, "no snapshot found in"),
        (("write", "{folder}", "--name", "tiny"), 2, "no planner is set"),
        (("write", "{folder}"), 2, "no weights selected"),
        (("write", "{folder}", "--from", "{folder}"), 2, "contains no config.json"),
        (("write", "/proc/nowhere/x", "--from", "{model}"), 6, "/proc/nowhere"),
    ],
)
def test_an_impossible_command_is_one_line(
    rfork: SnapshotCommand,
    tiny_model: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    """Each names the problem, with the exit code of the party at fault."""
    command = [word.format(model=tiny_model, folder=tmp_path) for word in arguments]
    (line,) = [line for line in rfork(*command, code=code).splitlines() if line.startswith("error: ")]
    assert message in line


def test_a_seed_writes_its_own_snapshot(tiny_model: Path, tmp_path: Path, expected_sha256: str) -> None:
    """In the engine's process, while it serves; it fails if the weights change meanwhile."""
    module = loaded_model(tiny_model)
    settings = InstanceSettings(transports=("http",), drain_timeout_s=0)
    with engine.seed(module, model="tiny", settings=settings) as seed:
        snapshot_seed(seed, str(tmp_path / "rev-1"))
        assert expected_sha256 == restored_sha256(tiny_model, str(tmp_path / "rev-1"))

        def update(count: int) -> None:
            if seed.generation == 0:
                with seed.updating():
                    next(module.parameters()).data.add_(1)

        with pytest.raises(SourceWeightsChanged, match="what was read is discarded"):
            snapshot_seed(seed, str(tmp_path / "rev-2"), progress=update)
        assert [NAME, f"{NAME}.manifest.json"] == sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
        assert 1 == seed.generation
        snapshot_seed(seed, str(tmp_path / "rev-2"), shared=True)
        assert image_sha256(capture(module)) == restored_sha256(tiny_model, str(tmp_path / "rev-2"))
