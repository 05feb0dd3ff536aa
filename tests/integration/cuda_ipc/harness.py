"""Sources and targets over cuda_ipc on the strict fake driver, in this process and in others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rfork.errors import RforkError
from rfork.settings import InstanceSettings
from rfork.transport.base import AccessGate, Endpoint, Reader
from rfork.transport.cuda_ipc import CudaIpcTransport
from tests.fake_libcuda.fake_gpu import FakeGpu
from tests.fake_libcuda.images import device_bytes, device_image
from tests.fork_server import PythonProcess
from tests.integration.cuda_ipc_node import FencedGate, endpoint_from_json
from tests.transport_contract import TOKEN, soon

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = InstanceSettings()
SIZES = [3, 4096, 1 << 20, 17, *([8191] * 50), (5 << 20) + 5, 1]
ONE_TENSOR = [1 << 20]


class CudaIpcProcess:
    """A process of `tests.integration.cuda_ipc_node`; `log` receives the errors that its driver records."""

    def __init__(self, side: str, log: Path) -> None:
        self._log = log
        self.process = PythonProcess(
            [sys.executable, "-m", "tests.integration.cuda_ipc_node", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "FAKE_CUDA_LOG": str(log)},
        )

    def source(self, sizes: Sequence[int], **more: object) -> Endpoint:
        """Create a source in the process with an image of `device_image`."""
        return endpoint_from_json(self.request(json.dumps({"sizes": list(sizes), **more})))

    def request(self, line: str) -> dict[str, object]:
        """Send a line to the process and return its next event."""
        if self.process.stdin is None or self.process.stdout is None:
            raise ChildProcessError("no pipe")
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        reply = self.process.stdout.readline()
        if not reply:
            raise ChildProcessError("the process has ended")
        message = json.loads(reply)
        return message if isinstance(message, dict) else {}

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Kill the process, and fail if its driver recorded an error."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        assert not self._log.exists(), self._log.read_text()


MakeRemoteSource = Callable[..., Endpoint]


class CudaIpcTarget:
    """A target in this process."""

    def __init__(
        self, gpu: FakeGpu, sizes: Sequence[int], *, settings: InstanceSettings = SETTINGS, **more: object
    ) -> None:
        self._gpu = gpu
        self.image = device_image(gpu, sizes, **more)  # type: ignore[arg-type]
        self.transport = CudaIpcTransport(settings)

    def connect(self, endpoint: Endpoint, token: str = TOKEN) -> Reader:
        return self.transport.connect(endpoint, self.image, lambda: token, soon())

    def read(self, endpoint: Endpoint) -> bytes:
        """Read a complete source; return the bytes of the target's image."""
        with closing(self.connect(endpoint)) as reader:
            reader.read(0, self.image_bytes, soon())
        return self.content

    @property
    def image_bytes(self) -> int:
        return self.image.layout.image_bytes

    @property
    def content(self) -> bytes:
        """The bytes of the image, read without the driver."""
        return device_bytes(self._gpu, self.image)


@contextmanager
def local_source(
    gpu: FakeGpu, sizes: Sequence[int], gate: AccessGate, *, settings: InstanceSettings = SETTINGS, **more: object
) -> Iterator[Endpoint]:
    """A source in this process: in mapped memory, since a process cannot open its own memory of cudaMalloc."""
    image = device_image(gpu, sizes, **{"kind": "expandable", "filled": True, **more})  # type: ignore[arg-type]
    with closing(CudaIpcTransport(settings).export(image, gate)) as exporter:
        yield exporter.endpoint()


LocalSource = tuple[FencedGate, Endpoint]


def opened_allocations(gpu: FakeGpu) -> int:
    """Return the number of a source's allocations that are open in this process, of all types."""
    return sum(gpu.open_handles.get(resource, 0) for resource in ("ipc", "mapping"))


def raised_by(call: Callable[[], None]) -> RforkError | None:
    """Return the error that the call raises."""
    try:
        call()
    except RforkError as error:
        return error
    return None
