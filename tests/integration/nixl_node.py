"""A process that exports or reads an image over nixl, as its test requests; and control streams between the two.

Requests are JSON lines, and each is handled on a thread. Control streams are packets on Unix sockets, whose first
packet is the channel.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rfork import errors
from rfork.errors import RforkError, SourceTimeout, SourceUnavailable
from rfork.image.layout import Layout, TensorSpec
from rfork.image.memory import Image, Segment
from rfork.peer.control_stream import MAX_MESSAGE_BYTES, serve_control_stream
from rfork.settings import InstanceSettings
from rfork.transport.base import ControlStream, Endpoint, Exporter, Reader
from rfork.transport.nixl import NixlTransport
from tests.fork_server import PythonProcess
from tests.processes import send
from tests.transport_contract import TOKEN, FakeGate

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = InstanceSettings(allow_unauthenticated_tcp=True)
START_S = 60.0


def pattern(index: int, size: int, salt: int = 0) -> torch.Tensor:
    """Return bytes that differ between tensors, positions and salts."""
    period = ((torch.arange(251) * 7 + index * 13 + salt) % 251).to(torch.uint8)
    return period.repeat(size // 251 + 1)[:size].clone()


def image_from(sizes: Sequence[int], regions: Sequence[torch.Tensor]) -> Image:
    """Return an image of byte tensors in order."""
    ends = list(itertools.accumulate(sizes, initial=0))
    specs = tuple(TensorSpec(f"t{index}", "uint8", (size,), (1,), ends[index]) for index, size in enumerate(sizes))
    return Image(Layout(specs, ends[-1]), regions)


def shared_image(path: str, sizes: Sequence[int]) -> Image:
    """Return an image in a file that several processes map, with a gap after each tensor."""
    with open(path, "r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), sum(sizes) + 24 * len(sizes)), dtype=torch.uint8)
    begins = itertools.accumulate((size + 24 for size in sizes[:-1]), initial=0)
    return image_from(sizes, [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)])


class PacketStream:
    """`ControlStream` over a Unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        # A descriptor, because a socket must not be closed while another thread waits for it.
        self._descriptor = connection.detach()

    def __del__(self) -> None:
        os.close(self._descriptor)

    def send(self, message: bytes) -> None:
        try:
            os.write(self._descriptor, message)
        except OSError as error:
            raise SourceUnavailable(f"the control stream is closed: {error}") from None

    def receive(self, deadline: float) -> bytes:
        if not select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise SourceTimeout("no control message before the deadline")
        try:
            message = os.read(self._descriptor, MAX_MESSAGE_BYTES)
        except OSError as error:
            raise SourceUnavailable(f"the control stream is closed: {error}") from None
        if not message:
            raise SourceUnavailable("the control stream is closed")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


class StreamServer:
    """Accepts control streams for one exporter."""

    def __init__(self, path: str, exporter: Exporter) -> None:
        self._exporter = exporter
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        return True

    def control_stream(self, channel_id: str, stream: ControlStream) -> None:
        self._exporter.run_control_stream(channel_id, stream)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                channel_id = connection.recv(256).decode()
                arguments = (self, channel_id, PacketStream(connection))
                threading.Thread(target=serve_control_stream, args=arguments, daemon=True).start()


def stream_opener(path: str, channel_id: str) -> Callable[[], ControlStream]:
    """Open control streams to the server at `path`."""

    def open_stream() -> ControlStream:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(path)
            connection.send(channel_id.encode())
        except OSError as error:
            raise SourceUnavailable(f"the source is not reachable: {error}") from None
        return PacketStream(connection)

    return open_stream


class NixlNode:
    """A node process, as its test sees it."""

    def __init__(self) -> None:
        self.process = PythonProcess(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._replies: dict[int, Any] = {}
        self._ended = False
        threading.Thread(target=self._receive, daemon=True).start()

    def request(self, operation: str, **fields: object) -> Any:
        """Request an operation and return its result; raises the error that it raised."""
        number = next(self._numbers)
        assert self.process.stdin is not None
        with self._changed:
            self.process.stdin.write(json.dumps({"number": number, "operation": operation, **fields}) + "\n")
            self.process.stdin.flush()
            assert self._changed.wait_for(lambda: self._ended or number in self._replies, START_S)
            if number not in self._replies:
                raise ChildProcessError(f"the node ended during {operation!r}")
            reply = self._replies.pop(number)
        if reply["error"]:
            raise getattr(errors, reply["error"], ValueError)(reply["text"])
        return reply["result"]

    def export(self, path: Path, sizes: Sequence[int], salt: int = 0) -> Endpoint:
        """Export an image; control streams are served at `path`."""
        made = self.request("export", path=str(path), sizes=list(sizes), salt=salt)
        return Endpoint("nixl", made["parameters"], tuple(Segment(*segment) for segment in made["segments"]))

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the node."""
        send(self.process, number)

    def kill(self) -> None:
        """Kill the node if it is running."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _receive(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self.process.stdout:
                if line.startswith('{"number"'):
                    reply = json.loads(line)
                    with self._changed:
                        self._replies[reply["number"]] = reply
                        self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class NodeServer:
    """Handles the requests to a node, in its process."""

    def __init__(self) -> None:
        self.gate = FakeGate()
        self.token = TOKEN
        self._exporter: Exporter | None = None
        self._readers: dict[str, Reader] = {}
        self._tensors: list[torch.Tensor] = []
        self._output = threading.Lock()

    def run(self) -> None:
        """Handle requests until the test closes the pipe."""
        for line in sys.stdin:
            threading.Thread(target=self._handle, args=(json.loads(line),), daemon=True).start()
        os._exit(0)

    def _handle(self, request: dict[str, Any]) -> None:
        number, operation = request.pop("number"), request.pop("operation")
        result, error, text = None, "", ""
        try:
            result = getattr(self, f"_{operation}")(**request)
        except (RforkError, ValueError) as raised:
            error, text = type(raised).__name__, str(raised)
        with self._output:
            print(json.dumps({"number": number, "result": result, "error": error, "text": text}), flush=True)

    def _export(self, path: str, sizes: list[int], salt: int) -> object:
        self._tensors = [pattern(index, size, salt) for index, size in enumerate(sizes)]
        exporter = NixlTransport(SETTINGS).export(image_from(sizes, self._tensors), self.gate)
        self._exporter = exporter
        self._server = StreamServer(path, exporter)
        endpoint = exporter.endpoint()
        return {"parameters": dict(endpoint.parameters), "segments": endpoint.segments}

    def _authorize(self, channel: str) -> None:
        assert self._exporter is not None
        self._exporter.authorize_peer(channel, "127.0.0.1")

    def _revoke(self, channel: str) -> None:
        assert self._exporter is not None
        self._exporter.revoke_peer(channel)

    def _change_weights(self) -> None:
        self.gate.weights_changed = True

    def _connect(
        self, reader: str, memory: str, sizes: list[int], parameters: dict[str, str], segments: list[list[int]],
        path: str, channel: str, seconds: float,
    ) -> None:  # fmt: skip
        endpoint = Endpoint("nixl", parameters, tuple(Segment(*segment) for segment in segments))
        self._readers[reader] = NixlTransport(SETTINGS).connect(
            endpoint,
            shared_image(memory, sizes),
            lambda: self.token,
            time.monotonic() + seconds,
            stream_opener(path, channel),
        )

    def _read(self, reader: str, begin: int, end: int, seconds: float, token: str) -> None:
        self.token = token
        self._readers[reader].read(begin, end, time.monotonic() + seconds)

    def _close(self, reader: str) -> None:
        self._readers[reader].close()


if __name__ == "__main__":
    NodeServer().run()
