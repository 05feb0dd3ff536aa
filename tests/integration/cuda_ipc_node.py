"""One side of cuda_ipc in a process of its own, over GPUs of shared memory; told what to do line by line.

``python -m tests.integration.cuda_ipc_node {"side": "source" | "target", …}``: both print one JSON line for
each thing that has happened.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rfork.errors import LeaseRefused, RforkError, SourceChanged
from rfork.image.memory import Segment
from rfork.seed.readings import Readings
from rfork.settings import Settings
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport
from rfork.transport.cuda_ipc import exporter as exporting
from rfork.transport.cuda_ipc.driver import KINDS, Kind
from rfork.transport.cuda_ipc.exporter import CudaIpcExporter
from tests.fake_cuda import FakeDriver, FakeMemory, image_in
from tests.transport_contract import TOKEN, soon


class FencedGate:
    """A gate as a seed is one: with a lease, a fence and a budget."""

    def __init__(self) -> None:
        self.readings = Readings()
        self.changed = False
        self.most = 1 << 62
        self.granted = 0

    def admit(self, token: str, begin: int, end: int) -> str:
        if token != TOKEN:
            raise LeaseRefused("no such lease")
        if self.changed:
            raise SourceChanged("the weights have another generation")
        return "fork-1"

    @contextmanager
    def reading(self, token: str, begin: int, end: int, cut: Callable[[], None]) -> Iterator[None]:
        with self.readings.held(cut):
            self.admit(token, begin, end)
            yield

    def grant(self, most: int, fork_id: str) -> int:
        granted = min(most, self.most)
        self.granted += granted
        return granted

    def etag(self) -> str:
        return "generation-0"

    def fence(self, patience_s: float) -> int:
        """Let no new read in, and wait for those under way; how many were cut."""
        self.changed = True
        return self.readings.settle(patience_s)


def told(endpoint: Endpoint) -> dict[str, object]:
    """An endpoint as JSON has it."""
    return {
        "transport": endpoint.transport,
        "parameters": dict(endpoint.parameters),
        "segments": [list(segment) for segment in endpoint.segments],
    }


def endpoint_in(message: dict[str, object]) -> Endpoint:
    """The endpoint that `told` made the message of."""
    parameters, segments = message["parameters"], message["segments"]
    if not isinstance(parameters, dict) or not isinstance(segments, list):
        raise TypeError("no endpoint")
    return Endpoint(str(message["transport"]), parameters, tuple(Segment(*one) for one in segments))


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def _source(sizes: Sequence[int], on_host: Sequence[int], kind: str, align: int, settings: Settings) -> None:
    kinds: dict[str, Kind] = {each: each for each in KINDS}
    memory = FakeMemory()
    image = image_in(memory, sizes, on_host=on_host, filled=True, kind=kinds[kind], align=align)
    gate = FencedGate()
    exporter = CudaIpcTransport(settings, lambda: FakeDriver(memory)).export(image, gate)
    _say(told(exporter.endpoint()))
    for line in sys.stdin:
        if line.strip() == "fence":
            _say({"cut": gate.fence(0.05)})
        elif line.strip() == "close":
            exporter.close()
            _say({"closed": 1})


def _sources() -> None:
    """A source for each line of JSON, and "close" for the one that was made last."""
    made: list[CudaIpcExporter] = []
    for line in sys.stdin:
        if line.strip() == "close":
            made.pop().close()
            _say({"closed": 1})
            continue
        wanted, memory = json.loads(line), FakeMemory()
        image = image_in(
            memory,
            wanted["sizes"],
            on_host=wanted["on_host"],
            filled=True,
            kind=wanted["kind"],
            align=wanted["align"],
        )
        transport = CudaIpcTransport(Settings(), partial(FakeDriver, memory))
        made.append(transport.export(image, FencedGate()))
        _say(told(made[-1].endpoint()))


def _target(sizes: Sequence[int], settings: Settings) -> None:
    """Begin to read each endpoint that stdin brings, with copies that never end."""
    for line in sys.stdin:
        _read(sizes, settings, endpoint_in(json.loads(line)))


def _read(sizes: Sequence[int], settings: Settings, endpoint: Endpoint) -> None:
    memory = FakeMemory()
    image, driver = image_in(memory, sizes), FakeDriver(memory)
    driver.running.clear()
    reader = CudaIpcTransport(settings, lambda: driver).connect(endpoint, image, lambda: TOKEN, soon())

    def read() -> None:
        try:
            reader.read(0, image.layout.image_bytes, soon(600))
        except RforkError as error:
            _say({"error": error.kind})

    threading.Thread(target=read, daemon=True).start()
    driver.queued.wait()
    _say({"reading": 1})


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    exporting.LET_GO_S = 60.0  # type: ignore[misc]  # a reader that is alive may be on a busy machine
    if wanted["side"] == "source":
        _source(wanted["sizes"], wanted["on_host"], wanted["kind"], wanted["align"], Settings())
    elif wanted["side"] == "sources":
        _sources()
    else:
        _target(wanted["sizes"], Settings())
