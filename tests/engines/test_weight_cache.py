"""The engines' own weight cache daemons with rfork: their real code, in host memory instead of a GPU's."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rfork.planner_client.client import PlannerClient
from rfork.schema import InstanceReport
from tests.engines.conftest import TinyFolder
from tests.engines.engine_server import ROOT, STOP_S, engine_python, wait_until
from tests.engines.model_folders import copy_without_weights
from tests.engines.planner_process import PlannerProcess
from tests.fork_server import PythonProcess

READY_S = 240.0
RELEASE = """
import glob, socket, sys
from vllm.model_executor.model_loader.weight_cache.protocol import recv_msg, send_msg
client = socket.socket(socket.AF_UNIX)
client.connect(glob.glob(sys.argv[1] + "/*.sock")[0])
send_msg(client, {"cmd": "release"})
print(recv_msg(client))
"""


READY = {"vllm": "READY", "sglang": "Listening on"}
"""Text in the log of a daemon that serves engines."""


@contextmanager
def daemon(engine: str, planner: str, model: Path, folder: Path) -> Iterator[PythonProcess[str]]:
    """A daemon that keeps `model`. Its socket and its output, `log`, are in the new folder `folder`."""
    folder.mkdir(mode=0o700)
    log = folder / "log"
    environment = {**os.environ, "RFORK_PLANNER": planner, "PYTHONPATH": str(ROOT), "SGLANG_USE_CPU_ENGINE": "1"}
    with log.open("w") as output:
        process: PythonProcess[str] = PythonProcess(
            [engine_python(engine), "-m", f"tests.engines.{engine}_weight_cache_probe", str(model), str(folder)],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        wait_until(
            lambda: READY[engine] in log.read_text() or process.poll() is not None,
            deadline_s=READY_S,
            what="the daemon is ready",
        )
        assert READY[engine] in log.read_text(), log.read_text()[-4000:]
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path that is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="rfork-") as folder:
        yield Path(folder)


def reports(planner: PlannerProcess) -> list[InstanceReport]:
    """Return the reports of all instances."""
    with PlannerClient(planner.url) as client:
        return [view.report for view in client.instances()]


@pytest.mark.timeout(900)
def test_a_daemon_of_vllm_forks_its_weights_and_is_a_source(
    planner: PlannerProcess, tiny_folder: TinyFolder, tmp_path: Path, short: Path
) -> None:
    """The first one loads its files and seeds, the second one forks; neither is an engine's instance."""
    model = tiny_folder()
    with ExitStack() as running:
        running.enter_context(daemon("vllm", planner.url, model, short / "first"))
        (first,) = reports(planner)
        assert "serving" == first.state
        assert (first.holder or "").startswith("vllm-weight-cache-")

        bare = copy_without_weights(model, tmp_path)
        second = running.enter_context(daemon("vllm", planner.url, bare, short / "second"))
        both = reports(planner)
        assert 2 == len({report.holder for report in both})
        assert {first.weights_id} == {report.weights_id for report in both}
        assert "forked" in (short / "second" / "log").read_text()

        second.terminate()
        second.wait(STOP_S)
        assert [first.instance_id] == [report.instance_id for report in reports(planner)]

        released = subprocess.run(
            [engine_python("vllm"), "-c", RELEASE, str(short / "first")], capture_output=True, text=True, timeout=120
        )
        assert "'status': 'ok'" in released.stdout
        assert [] == reports(planner)


@pytest.mark.timeout(900)
def test_a_daemon_of_sglang_is_a_source(planner: PlannerProcess, tiny_folder: TinyFolder, short: Path) -> None:
    """It loads its files and seeds as a holder's image, and leaves the planner when it is stopped."""
    with daemon("sglang", planner.url, tiny_folder(), short / "only") as process:
        (report,) = reports(planner)
        assert "serving" == report.state
        assert (report.holder or "").startswith("sglang-weight-cache-")
        process.terminate()
        process.wait(STOP_S)
        assert [] == reports(planner)


@pytest.mark.timeout(900)
def test_a_daemon_of_sglang_forks_its_weights(
    planner: PlannerProcess, tiny_folder: TinyFolder, tmp_path: Path, short: Path
) -> None:
    """A daemon without weight files gets them from another host's daemon."""
    model = tiny_folder()
    bare = copy_without_weights(model, tmp_path)
    with (
        daemon("sglang", planner.url, model, short / "first"),
        daemon("sglang", planner.url, bare, short / "second"),
    ):
        both = reports(planner)
        assert 2 == len({report.holder for report in both})
        assert 1 == len({report.weights_id for report in both})
