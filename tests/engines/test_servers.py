"""Stock engines as `make test-engines` sets them up: they start, respond, and leave no process."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.engines.load_generator import LoadGenerator
from tests.engines.process_tree import process_tree
from tests.engines.servers import EngineServer, ServerDied, SglangServer, VllmServer, wait_until

ENGINES = pytest.mark.parametrize("engine", [VllmServer, SglangServer])


@ENGINES
def test_stock_engine_serves(engine: type[EngineServer], model_folder: Path, tmp_path: Path) -> None:
    """An engine with its own loader is unready, then responds correctly, and ends without leaving a process."""
    with engine(model_folder, log=tmp_path / "server.log") as server:
        assert not server.healthy()
        server.wait_ready()
        completion = server.complete("The capital of France is", 8)
        assert "Paris" in completion.text
        assert len(completion.tokens) == len(completion.logprobs) > 0
        assert completion.tokens == server.complete("The capital of France is", 8).tokens
        with LoadGenerator(server, concurrency=2, max_tokens=4) as load:
            load.wait_for(8)
        assert [] == load.failures
        assert load.summary().requests >= 8
        assert len(server.processes()) > 1
        assert [] == server.stop()
    assert not server.running()
    assert [] == server.processes()


@ENGINES
def test_the_log_of_a_failed_start_is_reported(engine: type[EngineServer], tmp_path: Path) -> None:
    """Waiting for a server that dies ends at its death, with the end of its log."""
    with (
        engine(tmp_path / "missing", log=tmp_path / "server.log") as server,
        pytest.raises(ServerDied, match="missing"),
    ):
        server.wait_ready()
    assert [] == server.processes()


def test_all_workers_of_a_server_are_found() -> None:
    """The tree has the leader, a child in a separate session, and a grandchild whose parent has ended."""
    script = "setsid sleep 60 & (sleep 60 & echo $!); echo $!; wait"
    with subprocess.Popen(["bash", "-c", script], start_new_session=True, stdout=subprocess.PIPE) as leader:
        if leader.stdout is None:
            raise RuntimeError("the leader was started without a pipe")
        workers = [int(leader.stdout.readline()) for _ in range(2)]
        found = process_tree(leader.pid)
        for pid in found:
            os.kill(pid, signal.SIGKILL)
    assert sorted([leader.pid, *workers]) == found
    wait_until(lambda: [] == process_tree(leader.pid), deadline_s=10, what="the end of all processes")
