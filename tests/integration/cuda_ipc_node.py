"""Sources, or targets whose copies never finish, over cuda_ipc in a process of their own, on the strict fake driver.

``python -m tests.integration.cuda_ipc_node sources|targets``: reads one command per line, and prints one JSON line per
event.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rfork.errors import LeaseRejected, RforkError, SourceWeightsChanged
from rfork.image.memory import Segment
from rfork.settings import InstanceSettings
from rfork.source.channels import InflightReads
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport
from rfork.transport.cuda_ipc import exporter as exporting
from rfork.transport.cuda_ipc.exporter import CudaIpcExporter
from tests.fake_libcuda.fake_gpu import FakeGpu
from tests.fake_libcuda.images import device_image
from tests.fake_libcuda.install import install
from tests.transport_contract import TOKEN, soon


class FencedGate:
    """A gate like a seed's: with a lease, a fence and a rate limit."""

    def __init__(self) -> None:
        self.inflight_reads = InflightReads()
        self.weights_changed = False
        self.max_bytes = 1 << 62
        self.granted = 0

    def authorize(self, token: str, begin: int, end: int) -> str:
        if token != TOKEN:
            raise LeaseRejected("no such lease")
        if self.weights_changed:
            raise SourceWeightsChanged("the weights have another generation")
        return "fork-1"

    @contextmanager
    def read_guard(self, token: str, begin: int, end: int, abort: Callable[[], None]) -> Iterator[None]:
        with self.inflight_reads.track(abort):
            self.authorize(token, begin, end)
            yield

    def acquire_bytes(self, max_bytes: int, fork_id: str) -> int:
        granted = min(max_bytes, self.max_bytes)
        self.granted += granted
        return granted

    def version_tag(self) -> str:
        return "generation-0"

    def fence(self, timeout_s: float) -> int:
        """Admit no new read and wait for the running ones; return how many were aborted."""
        self.weights_changed = True
        return self.inflight_reads.drain(timeout_s)


def endpoint_to_json(endpoint: Endpoint) -> dict[str, object]:
    """Return the endpoint as JSON."""
    return {
        "transport": endpoint.transport,
        "parameters": dict(endpoint.parameters),
        "segments": [list(segment) for segment in endpoint.segments],
    }


def endpoint_from_json(message: dict[str, object]) -> Endpoint:
    """Return the endpoint from the JSON of `endpoint_to_json`."""
    parameters, segments = message["parameters"], message["segments"]
    if not isinstance(parameters, dict) or not isinstance(segments, list):
        raise TypeError("no endpoint")
    return Endpoint(str(message["transport"]), parameters, tuple(Segment(*one) for one in segments))


def _print_message(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def _serve() -> None:
    """Create a source for each line of JSON, the arguments of `device_image`; fence or close the latest."""
    exporting.RELEASE_TIMEOUT_S = 60.0  # type: ignore[misc]  # a reader that is alive may be on a busy machine
    install()
    sources: list[tuple[FakeGpu, FencedGate, CudaIpcExporter]] = []
    for line in sys.stdin:
        command = line.strip()
        if command == "fence":
            _print_message({"aborted": sources[-1][1].fence(0.05)})
        elif command == "close":
            gpu, _, exporter = sources.pop()
            exporter.close()
            gpu.free_all()
            _print_message({"closed": 1})
        else:
            gpu, gate = FakeGpu(), FencedGate()
            image = device_image(gpu, **json.loads(line), filled=True)
            exporter = CudaIpcTransport(InstanceSettings()).export(image, gate)
            sources.append((gpu, gate, exporter))
            _print_message(endpoint_to_json(exporter.endpoint()))


def _read() -> None:
    """Start to read each endpoint that arrives, with copies that never finish."""
    gpu = install()
    with gpu.paused_copies():
        for count, line in enumerate(sys.stdin, 1):
            endpoint = endpoint_from_json(json.loads(line))
            image = device_image(gpu, [length for _, _, length in endpoint.segments])
            reader = CudaIpcTransport(InstanceSettings()).connect(endpoint, image, lambda: TOKEN, soon())

            def read() -> None:
                try:
                    reader.read(0, image.layout.image_bytes, soon(600))  # noqa: B023
                except RforkError as error:
                    _print_message({"error": error.kind})

            threading.Thread(target=read, daemon=True).start()
            gpu.wait_until_queued(count)
            _print_message({"reading": 1})


if __name__ == "__main__":
    {"sources": _serve, "targets": _read}[sys.argv[1]]()
