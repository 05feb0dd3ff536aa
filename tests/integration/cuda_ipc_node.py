"""One side of cuda_ipc in a separate process, over GPUs of shared memory; controlled line by line.

``python -m tests.integration.cuda_ipc_node {"side": "source" | "target", …}``: both print one JSON line per
event.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rfork.errors import LeaseRejected, RforkError, SourceWeightsChanged
from rfork.image.memory import Segment
from rfork.settings import InstanceSettings
from rfork.source.channels import InflightReads
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport
from rfork.transport.cuda_ipc import exporter as exporting
from rfork.transport.cuda_ipc.driver import HANDLE_TYPES, HandleType
from rfork.transport.cuda_ipc.exporter import CudaIpcExporter
from tests.fake_cuda import FakeDriver, FakeMemory, fake_device_image
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


def _source(
    sizes: Sequence[int], on_host: Sequence[int], handle_type: str, align: int, settings: InstanceSettings
) -> None:
    handle_types: dict[str, HandleType] = {each: each for each in HANDLE_TYPES}
    memory = FakeMemory()
    image = fake_device_image(
        memory, sizes, on_host=on_host, filled=True, handle_type=handle_types[handle_type], align=align
    )
    gate = FencedGate()
    exporter = CudaIpcTransport(settings, lambda: FakeDriver(memory)).export(image, gate)
    _print_message(endpoint_to_json(exporter.endpoint()))
    for line in sys.stdin:
        if line.strip() == "fence":
            _print_message({"aborted": gate.fence(0.05)})
        elif line.strip() == "close":
            exporter.close()
            _print_message({"closed": 1})


def _sources() -> None:
    """Create a source for each line of JSON; "close" closes the latest."""
    made: list[CudaIpcExporter] = []
    for line in sys.stdin:
        if line.strip() == "close":
            made.pop().close()
            _print_message({"closed": 1})
            continue
        description, memory = json.loads(line), FakeMemory()
        image = fake_device_image(
            memory,
            description["sizes"],
            on_host=description["on_host"],
            filled=True,
            handle_type=description["kind"],
            align=description["align"],
        )
        transport = CudaIpcTransport(InstanceSettings(), partial(FakeDriver, memory))
        made.append(transport.export(image, FencedGate()))
        _print_message(endpoint_to_json(made[-1].endpoint()))


def _target(sizes: Sequence[int], settings: InstanceSettings) -> None:
    """Start to read each endpoint that arrives on stdin, with copies that never finish."""
    for line in sys.stdin:
        _read(sizes, settings, endpoint_from_json(json.loads(line)))


def _read(sizes: Sequence[int], settings: InstanceSettings, endpoint: Endpoint) -> None:
    memory = FakeMemory()
    image, driver = fake_device_image(memory, sizes), FakeDriver(memory)
    driver.running.clear()
    reader = CudaIpcTransport(settings, lambda: driver).connect(endpoint, image, lambda: TOKEN, soon())

    def read() -> None:
        try:
            reader.read(0, image.layout.image_bytes, soon(600))
        except RforkError as error:
            _print_message({"error": error.kind})

    threading.Thread(target=read, daemon=True).start()
    driver.queued.wait()
    _print_message({"reading": 1})


if __name__ == "__main__":
    description = json.loads(sys.argv[1])
    exporting.RELEASE_TIMEOUT_S = 60.0  # type: ignore[misc]  # a reader that is alive may be on a busy machine
    if description["side"] == "source":
        _source(
            description["sizes"], description["on_host"], description["kind"], description["align"], InstanceSettings()
        )
    elif description["side"] == "sources":
        _sources()
    else:
        _target(description["sizes"], InstanceSettings())
