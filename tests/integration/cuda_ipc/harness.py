"""Sources and targets over cuda_ipc, in this process and in others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rfork.errors import RforkError
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint, Reader
from rfork.transport.cuda_ipc import CudaIpcTransport
from tests.fake_cuda import FakeDriver, FakeMemory, fake_device_image
from tests.fork_server import PythonProcess
from tests.transport_contract import TOKEN, content, soon

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = InstanceSettings()
SIZES = [3, 4096, 1 << 20, 17, *([8191] * 50), (5 << 20) + 5, 1]
ONE_TENSOR = [1 << 20]


class CudaIpcProcess:
    """A process of `tests.integration.cuda_ipc_node`."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self.process = PythonProcess(
            [sys.executable, "-m", "tests.integration.cuda_ipc_node", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def read_message(self) -> dict[str, object]:
        """Return the next event of the process."""
        if self.process.stdout is None:
            raise ChildProcessError("no pipe")
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError("the process has ended")
        message = json.loads(line)
        return message if isinstance(message, dict) else {}

    def send_line(self, line: str) -> None:
        """Send a line to the process."""
        if self.process.stdin is None:
            raise ChildProcessError("no pipe")
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


MakeRemoteSource = Callable[..., Endpoint]


class CudaIpcTarget:
    """A target in this process."""

    def __init__(self, sizes: Sequence[int], *, settings: InstanceSettings = SETTINGS, **more: int) -> None:
        self.memory = FakeMemory()
        self.driver = FakeDriver(self.memory)
        self.image = fake_device_image(self.memory, sizes, **more)  # type: ignore[arg-type]
        self.transport = CudaIpcTransport(settings, lambda: self.driver)

    def connect(self, endpoint: Endpoint, token: str = TOKEN) -> Reader:
        return self.transport.connect(endpoint, self.image, lambda: token, soon())

    @property
    def image_bytes(self) -> int:
        return self.image.layout.image_bytes


def expected(sizes: Sequence[int]) -> bytes:
    """Return the bytes of every source with these sizes."""
    return content(fake_device_image(FakeMemory(), sizes, filled=True))


def raised_by(call: Callable[[], None]) -> RforkError | None:
    """Return the error that the call raises."""
    try:
        call()
    except RforkError as error:
        return error
    return None
