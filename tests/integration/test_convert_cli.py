"""`rfork convert` as its users run it: on disk, from a web server, to and from S3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from benchmarks.seaweed import SeaweedServer
from rfork.cli.app import app
from rfork.errors import StorageChanged, StorageError
from rfork.settings import StorageSettings
from rfork.storage.formats.choice import open_source
from rfork.storage.tensorizer.format import FRONT
from rfork.storage.tensorizer.source import TensorizerSource
from rfork.storage.tensorizer.writer import write_tensors
from tests.conftest import StartRfork
from tests.storage_faults import Replace, Reset, Stall, Status, Truncate
from tests.storage_server import StorageServer
from tests.tensor_samples import KEY, PASSWORD, Raw, all_raw

TENSORS = {f"layers.{number}.weight": torch.full((300_000,), float(number)) for number in range(8)}
FEW = StorageSettings(attempts=3, hedge=0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A safetensors file of `TENSORS`."""
    path = tmp_path / "in.safetensors"
    save_file(TENSORS, path)
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A `.tensors` file of `TENSORS`, as bytes."""
    path = tmp_path_factory.mktemp("written") / "model.tensors"
    write_tensors(TENSORS, str(path))
    return path.read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("ONLY root MAY MOUNT: a full disk is NOT tested")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def held(uri: str) -> Raw:
    """What lies at a URI."""
    with closing(open_source(uri)) as opened:
        return all_raw(opened.stream())


def test_there_and_back_with_secrets_in_files(
    rfork_process: StartRfork, source: Path, tmp_path: Path
) -> None:
    """Encrypted under a password, then under a key, then plain again: every byte is the same."""
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    (tmp_path / "key").write_text(KEY.hex() + "\n")
    steps = (
        (str(source), "a.tensors", "--password-file", "password"),
        ("a.tensors", "b.tensors", "--src-password-file", "password", "--key-file", "key"),
        ("b.tensors", "out.safetensors", "--src-key-file", "key", "--json"),
    )
    for start, target, *options in steps:
        files = [str(tmp_path / name) if name in ("password", "key") else name for name in options]
        process = rfork_process("convert", str(tmp_path / start), str(tmp_path / target), *files)
        assert (0, False) == (process.wait(), PASSWORD in process.transcript())
    told = json.loads(process.stdout)
    assert (8, 9_600_000, "out.safetensors") == (told["tensors"], told["bytes"], Path(told["uri"]).name)
    assert all_raw(TENSORS) == all_raw(load_file(tmp_path / "out.safetensors"))


def test_wrong_use_is_one_line(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong input ends with an error on one line, its exit code, and no traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad-key").write_bytes(b"too short")
    (tmp_path / "empty").write_bytes(b"")
    write_tensors(TENSORS, "locked.tensors", key=KEY)
    (tmp_path / "cut.tensors").write_bytes((tmp_path / "locked.tensors").read_bytes()[:5000])
    before = sorted(tmp_path.iterdir())
    for code, told, *arguments in (
        (2, "is what is read", source.name, source.name),
        (2, "is there already", source.name, "locked.tensors"),
        (2, "holds no key", source.name, "out.tensors", "--key-file", "bad-key"),
        (2, "is empty", source.name, "out.tensors", "--password-file", "empty"),
        (2, "No such file", source.name, "out.tensors", "--password-file", "none"),
        (2, "are encrypted", source.name, "out", "--password-file", "bad-key"),
        (2, "is no size", source.name, "out", "--max-shard-size", "many"),
        (2, "matches 'x'", source.name, "out.tensors", "--only", "x"),
        (6, "is encrypted", "locked.tensors", "out.safetensors"),
        (6, "cut short", "cut.tensors", "out.safetensors", "--src-password-file", "bad-key"),
        (6, "none.tensors", "none.tensors", "out.safetensors"),
    ):
        answer = CliRunner().invoke(app, ["convert", *map(str, arguments)])
        errors = [line for line in answer.output.splitlines() if "error" in line]
        assert (code, 1) == (answer.exit_code, len(errors)), answer.output
        assert str(told) in errors[0]
        assert isinstance(answer.exception, SystemExit)
    assert before == sorted(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["out.tensors", "out.safetensors", "folder", "shards"])
def test_an_interrupted_conversion_leaves_nothing(
    rfork_process: StartRfork, written: bytes, tmp_path: Path, target: str
) -> None:
    """Ctrl-C while the source hangs: the command ends at once, and nothing is where it wrote."""
    folder = tmp_path / "target"
    folder.mkdir()
    most = ("--max-shard-size", "3MB") if target == "shards" else ()
    with StorageServer({"model.tensors": written}) as server:
        # The index and a part of the tensors come; then the server says nothing any more.
        server.script.then(*[None] * 3)
        server.script.always(Stall(after=1000))
        process = rfork_process(
            "convert", server.url("model.tensors"), str(folder / target), *most,
            environment={"RFORK_STORAGE_MEMORY": str(16 << 20), "RFORK_STORAGE_TIMEOUT_S": "300"},
        )  # fmt: skip
        server.script.await_stall()
        process.signal(signal.SIGINT)
        assert 130 == process.wait(deadline_s=20)
        server.script.release()
    assert [] == [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("target", ["out.tensors", "out.safetensors", "folder", "shards"])
def test_a_full_disk_leaves_nothing(
    rfork_process: StartRfork, source: Path, small_disk: Path, target: str
) -> None:
    """No space left is one line, and the space that was taken is free again."""
    most = ("--max-shard-size", "3MB") if target == "shards" else ()
    process = rfork_process("convert", str(source), str(small_disk / target), *most)
    assert (6, False) == (process.wait(), "Traceback" in process.stderr)
    assert 1 == process.stderr.count("error:")
    assert [] == [path for path in small_disk.rglob("*") if path.is_file()]


def test_s3_there_and_back(
    rfork_process: StartRfork, s3: SeaweedServer, source: Path, tmp_path: Path
) -> None:
    """To S3 as a stream, from there to a set of files, a snapshot and back to this disk."""
    environment = s3.environment()
    ways = (
        (str(source), "s3://models/convert/a.tensors"),
        ("s3://models/convert/a.tensors", "s3://models/convert/set.tensors", "--max-shard-size", "3MB"),
        ("s3://models/convert/set.tensors", "s3://models/convert/snapshot/"),
        ("s3://models/convert/snapshot/", str(tmp_path / "out.safetensors")),
    )
    for arguments in ways:
        process = rfork_process("convert", *arguments, environment=environment)
        assert 0 == process.wait(), process.transcript()
    assert all_raw(TENSORS) == all_raw(load_file(tmp_path / "out.safetensors"))
    process = rfork_process("convert", *ways[0], environment=environment)
    assert (2, True) == (process.wait(), "is there already" in process.stderr)


def test_a_web_servers_faults_are_survived(written: bytes) -> None:
    """Resets, early ends and 503s in the middle of a `.tensors` file: every tensor is right."""
    with StorageServer({"model.tensors": written}) as server:
        server.script.then(
            None, Reset(after=1000), Status(503), Truncate(after=500_000), None, Reset(), path="model"
        )
        with TensorizerSource.open(server.url("model.tensors"), settings=FEW) as opened:
            assert all_raw(TENSORS) == all_raw(opened.stream())


def test_a_file_replaced_on_a_web_server_is_noticed(written: bytes) -> None:
    """Another file under the name, in the middle of the read: it is said, and no tensor is mixed."""
    with (
        StorageServer({"model.tensors": written}) as server,
        TensorizerSource.open(server.url("model.tensors"), settings=FEW) as opened,
    ):
        server.script.then(Replace(written[::-1], after=1000))
        with pytest.raises(StorageChanged):
            dict(opened.stream())


def test_one_tensor_costs_its_own_bytes_on_the_wire(written: bytes) -> None:
    """Specs are the index, and one tensor of eight is an eighth of the file."""
    with (
        StorageServer({"model.tensors": written}) as server,
        TensorizerSource.open(server.url("model.tensors"), settings=FEW) as opened,
    ):
        begun = server.bytes_sent
        assert TENSORS.keys() == opened.specs.keys()
        assert all_raw({"t": TENSORS["layers.5.weight"]}) == all_raw({"t": opened["layers.5.weight"]})
        # The file, an eighth of it, and at most twice what an opening brings along.
        assert 1_200_000 <= server.bytes_sent - begun <= 1_200_000 + 2 * FRONT + 10_000


def test_a_presigned_urls_secret_is_in_no_error(written: bytes) -> None:
    """The query of a URL opens the file and is named nowhere."""
    with StorageServer({"model.tensors": written[:-1], "ok.tensors": written}) as server:
        with TensorizerSource.open(server.url("ok.tensors?sig=SECRET"), settings=FEW) as opened:
            assert all_raw(TENSORS) == all_raw(opened.stream())
            assert "SECRET" not in opened.uri
        server.script.always(Status(403), path="other")
        for name in ("model.tensors", "other.tensors", "none.tensors"):
            with pytest.raises(StorageError) as raised:
                TensorizerSource.open(server.url(f"{name}?sig=SECRET"), settings=FEW)
            assert "SECRET" not in f"{raised.value} {raised.value.hint} {raised.value.__cause__}"
