"""The shared fixtures: leaked processes or hidden output would affect every other test."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

import rfork
from tests import ports
from tests.conftest import StartRfork
from tests.processes import RforkProcess

ROOT = Path(__file__).parents[2]


def test_tiny_model_is_a_checkpoint_of_several_shards(tiny_model: Path) -> None:
    """The tiny model has a config, a tokenizer, and each tensor once, in more than one file."""
    shards = sorted(tiny_model.glob("*.safetensors"))
    names: list[str] = []
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            names.extend(file.keys())
    assert (tiny_model / "config.json").is_file()
    assert (tiny_model / "tokenizer.json").is_file()
    assert len(shards) > 1
    # The embedding, the last norm, and nine tensors in each of four layers; the head shares the embedding.
    assert 2 + 4 * 9 == len(names) == len(set(names))


def test_free_port_can_be_listened_on(free_port: int) -> None:
    """A server can listen on the port immediately."""
    with socket.create_server(("127.0.0.1", free_port)) as server:
        assert free_port == server.getsockname()[1]


def test_no_other_test_process_gets_the_same_port(free_port: int) -> None:
    """Nor does this process: the server may bind it only later."""
    code = f"from tests import ports; ports._reserve({free_port})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "BlockingIOError" in done.stderr
    assert not ports._reserve(free_port)


def test_process_is_waited_for_by_its_lines(rfork_process: StartRfork) -> None:
    """A matching line is found on either stream, and the exit code is the command's."""
    process = rfork_process("--version", until=rf"^{re.escape(rfork.__version__)}$")
    assert 0 == process.wait()
    assert f"{rfork.__version__}\n" == process.stdout


def test_process_that_ends_early_is_not_waited_for(rfork_process: StartRfork) -> None:
    """A process that exits without the line fails immediately, with its command, exit code and output."""
    with pytest.raises(TimeoutError, match=r"ended with 0\n\$ rfork --version .+\n--- stdout\n\d"):
        rfork_process("--version", until="never printed", deadline_s=60)


def test_stop_ends_a_service(rfork_process: StartRfork, free_port: int) -> None:
    """A running service is stopped, and stopping it again is harmless."""
    process: RforkProcess = rfork_process("planner", "--port", str(free_port), until=str(free_port))
    process.stop()
    process.stop()
    assert process.wait() in (0, -signal.SIGTERM)
    with socket.create_server(("127.0.0.1", free_port)) as server:
        assert free_port == server.getsockname()[1]
