"""JIT caches between processes: compiled in one, fetched by another, used by a third that compiles nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from rfork import artifacts
from rfork.artifacts.key import ArtifactKey
from rfork.artifacts.pack import Packed, pack
from rfork.artifacts.unpack import _Unpacking
from rfork.errors import StorageFull
from rfork.receiver.session import fetch
from rfork.settings import ArtifactSettings, InstanceSettings
from rfork.settings import load as settings_of
from tests.conftest import StartRfork

pytestmark = pytest.mark.timeout(300)
slow_compile = pytest.mark.slow
"""Starts processes that run torch's compiler, which dominates the time."""

READY = r'"event": ?"ready"'
MODEL = "tiny"

COMPILE = """
import json, time
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder

runs, run = [], cpp_builder.run_compile_cmd
def counted(command, *arguments, **named):
    if ".cpp" in command:  # not the header that torch checks on each start
        runs.append(command)
    return run(command, *arguments, **named)
cpp_builder.run_compile_cmd = counted

torch.manual_seed(0)
module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 16))
compiled = torch.compile(module)
began = time.monotonic()
with torch.inference_mode():
    value = compiled(torch.ones(4, 64))
seconds = time.monotonic() - began
print(json.dumps({
    "seconds": round(seconds, 2),
    "sum": float(value.sum()),
    "fxgraph_cache_hit": counters["inductor"]["fxgraph_cache_hit"],
    "fxgraph_cache_miss": counters["inductor"]["fxgraph_cache_miss"],
    "autograd_cache_hit": counters["aot_autograd"]["autograd_cache_hit"],
    "kernels_compiled": len(runs),
}))
"""
"""Compile a module like an engine, in a process that knows only its cache's folder."""

UNPACK = """
import os, signal, sys
from pathlib import Path
from rfork import artifacts
from rfork.settings import ArtifactSettings, load

moves, rename = [], os.rename
def rename_or_die(source, target):
    if len(moves) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    moves.append(target)
    rename(source, target)
os.rename = rename_or_die
artifacts.load(sys.argv[1], artifacts=load(ArtifactSettings, kinds="inductor"))
"""
"""Load a saved cache and be killed once this many entries are moved."""


def python(program: str, *arguments: str, cache: Path, code: int = 0) -> str:
    """Return the last line printed by a new process whose torch.compile cache is `cache`."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert code == done.returncode, done.stderr
    return (done.stdout.splitlines() or [""])[-1]


def compiled(cache: Path) -> dict[str, float]:
    """Return the statistics of compiling the module with that cache."""
    return cast(dict[str, float], json.loads(python(COMPILE, cache=cache)))


def cache_usage(counters: dict[str, float]) -> tuple[float, ...]:
    """Hits of both caches, misses, and the number of compiled C++ files."""
    return tuple(
        counters[name] for name in ("fxgraph_cache_hit", "autograd_cache_hit", "fxgraph_cache_miss", "kernels_compiled")
    )


FROM_CACHE = (1, 1, 0, 0)


def artifact_settings(folder: Path, **more: float) -> ArtifactSettings:
    return settings_of(ArtifactSettings, kinds="inductor", dirs=f"inductor={folder}", quiet_period_s=0, **more)


def read_tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder except locks."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "locks" not in path.parts
    }


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A synthetic cache with the folder structure of torch.compile."""
    names = ["ab/cab.cpp", "ab/cab.so", "cd/ccd.py", "ef/cef.so", "fxgraph/ab/x/graph", "fxgraph/cd/y/graph",
             "aotautograd/x/entry", "triton/0/HASH/k.cubin", "triton/0/HASH/k.json"]  # fmt: skip
    for name in names:
        path = tmp_path / "a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 1000)
    return tmp_path / "a"


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A cache that torch.compile has filled, and its statistics; do not write into it."""
    if shutil.which("g++") is None:
        pytest.skip("NO g++ ON PATH: caches of torch.compile are NOT tested")
    cache = tmp_path_factory.mktemp("caches") / "a"
    return cache, compiled(cache)


@pytest.fixture
def planner(rfork_process: StartRfork) -> str:
    """URL of a planner without instances."""
    process = rfork_process("planner", "--port", "0", "--json", until=READY)
    return cast(str, json.loads(process.wait_for(rf"^.*{READY}.*$").group())["url"])


@pytest.fixture
def instance(planner: str) -> InstanceSettings:
    return InstanceSettings(planner=planner, transports=("http",), drain_timeout_s=0.0)


@slow_compile
def test_a_cache_travels_and_is_used(
    first: tuple[Path, dict[str, float]],
    planner: str,
    rfork_process: StartRfork,
    tmp_path: Path,
) -> None:
    """A third process compiles the module with hits in both caches, and compiles no kernel."""
    origin, before = first
    cache = shutil.copytree(origin, tmp_path / "a")
    environment = {
        "RFORK_TRANSPORTS": "http",
        "RFORK_ARTIFACTS_KINDS": "inductor",
        "RFORK_ARTIFACTS_QUIET_PERIOD_S": "0",
    }
    more = ["--model", MODEL, "--planner", planner, "--json"]
    rfork_process(
        "cache", "seed", *more, until=READY,
        environment={**environment, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )  # fmt: skip
    target = tmp_path / "b"
    pull = rfork_process("cache", "pull", *more, environment={**environment, "TORCHINDUCTOR_CACHE_DIR": str(target)})
    assert 0 == pull.wait()
    report = json.loads(pull.wait_for(r'^.*"reason".*$').group())
    assert report["reason"] is None
    assert len(read_tree(cache)) == report["files"]
    assert read_tree(cache) == read_tree(target)
    # Nothing may be found through the paths that the first process recorded.
    shutil.rmtree(cache)
    after = compiled(target)
    print(f"torch.compile: {before['seconds']} s, with the cache that travelled {after['seconds']} s")
    assert FROM_CACHE == cache_usage(after)
    assert before["sum"] == after["sum"]


def test_the_launcher_prefetches_caches(
    planner: str, instance: InstanceSettings, cache: Path, rfork_process: StartRfork, tmp_path: Path
) -> None:
    """While an engine starts, its cache folder is filled with what an instance of its model serves."""
    engine = tmp_path / "vllm"
    engine.write_text(f"#!{sys.executable}\nimport signal\nsignal.pause()\n")
    engine.chmod(0o755)
    environment = {
        "RFORK_TRANSPORTS": "http",
        "RFORK_ARTIFACTS_KINDS": "inductor",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "b"),
    }
    with artifacts.seed(model=MODEL, settings=instance, artifacts=artifact_settings(cache)) as seed:
        assert seed.wait_registered(10)
        launcher = rfork_process(
            "launch", "--planner", planner, "--version", "v1", "--", str(engine), "serve", MODEL,
            until="JIT caches prefetched", environment=environment,
        )  # fmt: skip
    assert f"files={len(read_tree(cache))}" in launcher.wait_for("JIT caches prefetched.*").group()
    assert read_tree(cache) == read_tree(tmp_path / "b")


def test_storage_round_trip(cache: Path, tmp_path: Path) -> None:
    """A cache saved to a folder under its key and loaded into another cache has the same files."""
    written, packed = artifacts.save((tmp_path / "s").as_uri(), artifacts=artifact_settings(cache))
    report = artifacts.load((tmp_path / "s").as_uri(), artifacts=artifact_settings(tmp_path / "b"))
    assert packed.files == report.files
    assert written.uri == report.source
    assert report.reason is None
    assert read_tree(cache) == read_tree(tmp_path / "b")


@pytest.mark.parametrize("moves", [0, 3])
@pytest.mark.slow  # logic: tests/unit/artifacts/test_unpack.py
def test_a_process_killed_while_unpacking_leaves_complete_entries(cache: Path, moves: int, tmp_path: Path) -> None:
    """Entries in the cache are complete; the next process loads the missing ones and removes the staging
    folder.
    """
    written, _ = artifacts.save(str(tmp_path / "s"), artifacts=artifact_settings(cache))
    target = tmp_path / "b"
    python(UNPACK, written.uri, str(moves), cache=target, code=-signal.SIGKILL)
    left = {name: content for name, content in read_tree(target).items() if not name.startswith(".rfork-")}
    assert left.items() <= read_tree(cache).items()
    report = artifacts.load(written.uri, artifacts=artifact_settings(target))
    assert len(read_tree(cache)) - len(left) == report.files
    assert len(left) == report.already_present
    assert read_tree(cache) == read_tree(target)


@slow_compile
def test_an_incomplete_cache_still_compiles(first: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    """An engine that starts after the kill, with no source for the rest, gets the right result."""
    written, _ = artifacts.save(str(tmp_path / "s"), artifacts=artifact_settings(first[0]))
    python(UNPACK, written.uri, "2", cache=tmp_path / "b", code=-signal.SIGKILL)
    assert first[1]["sum"] == compiled(tmp_path / "b")["sum"]


@pytest.mark.slow  # logic: tests/unit/artifacts/test_unpack.py
def test_two_instances_unpack_concurrently(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have staged all files before either moves them: each file is moved once, and is complete."""
    written, packed = artifacts.save(str(tmp_path / "s"), artifacts=artifact_settings(cache))
    barrier, move = threading.Barrier(2, timeout=30), _Unpacking._move

    def at_once(self: _Unpacking, staging: Path, folder: Path, *, top: bool = False) -> None:
        if top:
            barrier.wait()
        move(self, staging, folder, top=top)

    monkeypatch.setattr(_Unpacking, "_move", at_once)
    reports: list[artifacts.ArtifactReport] = []

    def unpack() -> None:
        reports.append(artifacts.load(written.uri, artifacts=artifact_settings(tmp_path / "b")))

    threads = [threading.Thread(target=unpack) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_tree(cache) == read_tree(tmp_path / "b")
    assert packed.files == sum(report.files for report in reports)
    assert packed.files == sum(report.already_present for report in reports)


def test_the_image_with_more_files_is_fetched(instance: InstanceSettings, tmp_path: Path) -> None:
    """Sources that have compiled different modules serve different images; the target chooses one."""
    for name, count in (("few", 2), ("many", 3)):
        for number in range(count):
            (tmp_path / name / "ab").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "ab" / f"{number}.so").write_bytes(bytes(1000))
    with (
        artifacts.seed(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "few")) as one,
        artifacts.seed(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "many")) as other,
    ):
        assert one.wait_registered(10)
        assert other.wait_registered(10)
        report = artifacts.fetch(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "b"))
    assert 3 == report.files
    assert report.reason is None
    assert read_tree(tmp_path / "many") == read_tree(tmp_path / "b")


def test_another_key_is_no_error_and_is_named(
    instance: InstanceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report names the difference, for a running instance and for storage; nothing is written."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "k.so").write_bytes(b"elf")
    local_key = artifacts.local_key()
    for module_name in ("server", "storage"):
        monkeypatch.setattr(f"rfork.artifacts.{module_name}.local_key", lambda engine=None: ArtifactKey(gpu="B200"))
    artifacts.save(str(tmp_path / "s"), artifacts=artifact_settings(tmp_path / "a"))
    with artifacts.seed(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "a")) as seed:
        assert seed.wait_registered(10)
        fetched = artifacts.fetch(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "b"))
    monkeypatch.setattr("rfork.artifacts.storage.local_key", lambda engine=None: local_key)
    loaded = artifacts.load(str(tmp_path / "s"), artifacts=artifact_settings(tmp_path / "b"))
    for reason in (fetched.reason or "", loaded.reason or ""):
        assert "only for another machine: gpu: here none, there B200; " in reason
    assert not (tmp_path / "b").exists()


def test_missing_sources_are_reported(instance: InstanceSettings, tmp_path: Path) -> None:
    """An engine starts without caches, without delay, whatever is missing."""
    without_source = artifacts.fetch(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "b"))
    off = artifacts.fetch(model=MODEL, settings=instance, artifacts=settings_of(ArtifactSettings))
    dead = instance.model_copy(update={"planner": "http://127.0.0.1:1"})
    without_planner = artifacts.fetch(model=MODEL, settings=dead, artifacts=artifact_settings(tmp_path / "b"))
    empty = artifacts.load(str(tmp_path / "s"), artifacts=artifact_settings(tmp_path / "b"))
    assert ["NoSource", "artifacts (JIT caches) are disabled", "PlannerUnreachable", "StorageNotFound"] == [
        re.split("[:;]", report.reason or "")[0] for report in (without_source, off, without_planner, empty)
    ]


def test_new_files_are_served_by_a_new_seed(
    instance: InstanceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later targets get newly compiled files; if nothing is new, no file is read."""
    reads: list[Packed | None] = []

    def counting_pack(*arguments: Any, **named: Any) -> Packed | None:
        reads.append(pack(*arguments, **named))
        return reads[-1]

    monkeypatch.setattr("rfork.artifacts.server.pack", counting_pack)
    (tmp_path / "a").mkdir()
    artifact_server = artifacts.ArtifactServer(
        MODEL, artifacts.local_key(), instance, artifact_settings(tmp_path / "a")
    )
    with artifact_server:
        steps = [artifact_server.refresh()]
        for name in ("1.so", "2.so"):
            (tmp_path / "a" / name).write_bytes(name.encode())
            steps += [artifact_server.refresh(), artifact_server.refresh()]
        assert artifact_server.seed is not None
        assert artifact_server.seed.wait_registered(10)
        report = artifacts.fetch(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "b"))
    assert [False, True, False, True, False] == steps
    assert 2 == report.files
    assert 3 == len(reads)  # of the empty folder, and of each new file


def test_artifacts_above_the_size_limit_are_reported(instance: InstanceSettings, tmp_path: Path) -> None:
    """A target whose limit is smaller than every image gets a reason that names the setting."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "k.so").write_bytes(bytes(5000))
    with artifacts.seed(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "a")) as seed:
        assert seed.wait_registered(10)
        report = artifacts.fetch(
            model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "b", max_bytes=4000)
        )
    assert "more than RFORK_ARTIFACTS_MAX_BYTES (4000)" in (report.reason or "")


def test_a_full_disk_ends_the_fetch(
    instance: InstanceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another source of the same bytes would not help: nothing is fetched a second time."""
    fetched: list[str] = []

    def counting_fetch(*arguments: Any) -> Any:
        fetched.append("once")
        return fetch(*arguments)

    def full(*_: Any) -> None:
        raise StorageFull("no space")

    monkeypatch.setattr("rfork.artifacts.client.fetch_image", counting_fetch)
    monkeypatch.setattr(_Unpacking, "run", full)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").write_bytes(name.encode())
    with (
        artifacts.seed(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "one")) as one,
        artifacts.seed(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "two")) as two,
    ):
        assert one.wait_registered(10)
        assert two.wait_registered(10)
        report = artifacts.fetch(model=MODEL, settings=instance, artifacts=artifact_settings(tmp_path / "b"))
    assert ["once"] == fetched
    assert report.source is None
    assert "StorageFull: no space" == report.reason
