"""`rfork convert` as users run it: on disk, from a web server, to and from S3."""

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
from rfork.storage.formats.detect import open_source
from rfork.storage.tensorizer.format import FRONT
from rfork.storage.tensorizer.source import TensorizerSource
from rfork.storage.tensorizer.writer import write_tensors
from tests.conftest import StartRfork
from tests.storage_faults import ErrorStatus, ReplaceObject, ResetFault, StallFault, TruncateFault
from tests.storage_server import StorageServer
from tests.tensor_samples import KEY, PASSWORD, Raw, raw_tensors

TENSORS = {f"layers.{number}.weight": torch.full((300_000,), float(number)) for number in range(8)}
STORAGE_SETTINGS = StorageSettings(max_attempts=3, hedge_ratio=0)


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


def read_tensors(uri: str) -> Raw:
    """Return the tensors at a URI."""
    with closing(open_source(uri)) as opened:
        return raw_tensors(opened.stream())


@pytest.mark.slow  # logic: tests/unit/storage/tensorizer/test_writer.py
def test_round_trip_with_secrets_in_files(rfork_process: StartRfork, source: Path, tmp_path: Path) -> None:
    """Encrypted with a password, then with a key, then plain again: every byte is the same."""
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
        assert 0 == process.wait()
        assert PASSWORD not in process.transcript()
    summary = json.loads(process.stdout)
    assert 8 == summary["tensors"]
    assert 9_600_000 == summary["bytes"]
    assert "out.safetensors" == Path(summary["uri"]).name
    assert raw_tensors(TENSORS) == raw_tensors(load_file(tmp_path / "out.safetensors"))


def test_user_errors_are_one_line(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each invalid input ends with a one-line error, its exit code, and no traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad-key").write_bytes(b"too short")
    (tmp_path / "empty").write_bytes(b"")
    write_tensors(TENSORS, "locked.tensors", key=KEY)
    (tmp_path / "cut.tensors").write_bytes((tmp_path / "locked.tensors").read_bytes()[:5000])
    before = sorted(tmp_path.iterdir())
    for code, message, *arguments in (
        (2, "is also the source", source.name, source.name),
        (2, "already exists", source.name, "locked.tensors"),
        (2, "does not contain a key", source.name, "out.tensors", "--key-file", "bad-key"),
        (2, "is empty", source.name, "out.tensors", "--password-file", "empty"),
        (2, "No such file", source.name, "out.tensors", "--password-file", "none"),
        (2, "can be encrypted", source.name, "out", "--password-file", "bad-key"),
        (2, "is not a size", source.name, "out", "--max-shard-size", "many"),
        (2, "matches 'x'", source.name, "out.tensors", "--only", "x"),
        (6, "is encrypted", "locked.tensors", "out.safetensors"),
        (6, "truncated", "cut.tensors", "out.safetensors", "--src-password-file", "bad-key"),
        (6, "none.tensors", "none.tensors", "out.safetensors"),
    ):
        result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
        errors = [line for line in result.output.splitlines() if "error" in line]
        assert code == result.exit_code, result.output
        assert 1 == len(errors), result.output
        assert str(message) in errors[0]
        assert isinstance(result.exception, SystemExit)
    assert before == sorted(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["out.tensors", "out.safetensors", "folder", "shards"])
def test_an_interrupted_conversion_leaves_nothing(
    rfork_process: StartRfork, written: bytes, tmp_path: Path, target: str
) -> None:
    """Ctrl-C while the source hangs: the command ends immediately and leaves no output."""
    folder = tmp_path / "target"
    folder.mkdir()
    shard_size_option = ("--max-shard-size", "3MB") if target == "shards" else ()
    with StorageServer({"model.tensors": written}) as server:
        # The index and some of the tensors arrive; then the server sends nothing more.
        server.script.then(*[None] * 3)
        server.script.always(StallFault(after=1000))
        process = rfork_process(
            "convert", server.url("model.tensors"), str(folder / target), *shard_size_option,
            environment={"RFORK_STORAGE_STAGING_BYTES": str(16 << 20), "RFORK_STORAGE_TIMEOUT_S": "300"},
        )  # fmt: skip
        server.script.wait_stalled()
        process.signal(signal.SIGINT)
        assert 130 == process.wait(deadline_s=20)
        server.script.release()
    assert [] == [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("target", ["out.tensors", "out.safetensors", "folder", "shards"])
def test_a_full_disk_leaves_nothing(rfork_process: StartRfork, source: Path, small_disk: Path, target: str) -> None:
    """A full disk is a one-line error, and the used space is freed."""
    shard_size_option = ("--max-shard-size", "3MB") if target == "shards" else ()
    process = rfork_process("convert", str(source), str(small_disk / target), *shard_size_option)
    assert 6 == process.wait()
    assert "Traceback" not in process.stderr
    assert 1 == process.stderr.count("error:")
    assert [] == [path for path in small_disk.rglob("*") if path.is_file()]


@pytest.mark.slow  # logic: tests/unit/storage/test_convert.py
def test_s3_round_trip(rfork_process: StartRfork, s3: SeaweedServer, source: Path, tmp_path: Path) -> None:
    """To S3 as a stream, from there to a set of files, a snapshot, and back to this disk."""
    environment = s3.environment()
    conversions = (
        (str(source), "s3://models/convert/a.tensors"),
        ("s3://models/convert/a.tensors", "s3://models/convert/set.tensors", "--max-shard-size", "3MB"),
        ("s3://models/convert/set.tensors", "s3://models/convert/snapshot/"),
        ("s3://models/convert/snapshot/", str(tmp_path / "out.safetensors")),
    )
    for arguments in conversions:
        process = rfork_process("convert", *arguments, environment=environment)
        assert 0 == process.wait(), process.transcript()
    assert raw_tensors(TENSORS) == raw_tensors(load_file(tmp_path / "out.safetensors"))
    process = rfork_process("convert", *conversions[0], environment=environment)
    assert 2 == process.wait()
    assert "already exists" in process.stderr


def test_a_web_servers_faults_are_survived(written: bytes) -> None:
    """Resets, early ends and 503s within a `.tensors` file: every tensor is right."""
    with StorageServer({"model.tensors": written}) as server:
        server.script.then(
            None,
            ResetFault(after=1000),
            ErrorStatus(503),
            TruncateFault(after=500_000),
            None,
            ResetFault(),
            path="model",
        )
        with TensorizerSource.open(server.url("model.tensors"), settings=STORAGE_SETTINGS) as opened:
            assert raw_tensors(TENSORS) == raw_tensors(opened.stream())


def test_a_file_replaced_on_a_web_server_is_noticed(written: bytes) -> None:
    """If the file is replaced during the read, an error reports it and no tensor is mixed."""
    with (
        StorageServer({"model.tensors": written}) as server,
        TensorizerSource.open(server.url("model.tensors"), settings=STORAGE_SETTINGS) as opened,
    ):
        server.script.then(ReplaceObject(written[::-1], after=1000))
        with pytest.raises(StorageChanged):
            dict(opened.stream())


def test_one_tensor_costs_its_own_bytes_on_the_wire(written: bytes) -> None:
    """Specs cost the index, and one tensor of eight costs an eighth of the file."""
    with (
        StorageServer({"model.tensors": written}) as server,
        TensorizerSource.open(server.url("model.tensors"), settings=STORAGE_SETTINGS) as opened,
    ):
        begun = server.bytes_sent
        assert TENSORS.keys() == opened.specs.keys()
        assert raw_tensors({"t": TENSORS["layers.5.weight"]}) == raw_tensors({"t": opened["layers.5.weight"]})
        # The file, an eighth of it, and at most twice the prefetched start of the file.
        assert 1_200_000 <= server.bytes_sent - begun <= 1_200_000 + 2 * FRONT + 10_000


def test_errors_contain_no_secret_of_a_presigned_url(written: bytes) -> None:
    """The query of a URL opens the file and appears in no message."""
    with StorageServer({"model.tensors": written[:-1], "ok.tensors": written}) as server:
        with TensorizerSource.open(server.url("ok.tensors?sig=SECRET"), settings=STORAGE_SETTINGS) as opened:
            assert raw_tensors(TENSORS) == raw_tensors(opened.stream())
            assert "SECRET" not in opened.uri
        server.script.always(ErrorStatus(403), path="other")
        for name in ("model.tensors", "other.tensors", "none.tensors"):
            with pytest.raises(StorageError) as raised:
                TensorizerSource.open(server.url(f"{name}?sig=SECRET"), settings=STORAGE_SETTINGS)
            assert "SECRET" not in f"{raised.value} {raised.value.hint} {raised.value.__cause__}"
