"""A toy engine in a separate process, for tests of `load_or_fork`; `EngineNode` is the test's side.

The toy works like real engines: it is built with parameters in the checkpoint's shapes, loaded, and
post-processed, which replaces loaded weights by transposed ones, derives tensors and numbers, and hides some
of them in helper objects. A command is one line of JSON on standard input, its response one line on standard
output. Options are rfork's environment variables and the command line that `Options` parses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, cast

import torch
from torch import nn
from typing_extensions import Self

from rfork.engines.load_or_fork import ModelIdentity, load_or_fork
from rfork.engines.served_model import ServedModel, served_model
from rfork.errors import CheckpointError
from rfork.image.chunks import MIB
from rfork.logs import configure
from rfork.schema import Rank
from tests.fork_server import PythonProcess

Message = dict[str, str | int | float | bool | list[str] | None]

MODEL = "toy"
RESPONSE_TIMEOUT_S = 120.0
"""The process may have to start first; see `tests.processes.START_S`."""
LAYERS = 3


class ToyKernel:
    """A helper object with a tensor that no module has."""

    def __init__(self) -> None:
        self.packed: torch.Tensor | None = None


class ToyLayer(nn.Module):
    """One layer; `size` is the size of its weight in bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, size // 16), requires_grad=False)
        self.register_buffer("table", torch.arange(64.0), persistent=False)
        self.scale = 1.0
        self.kernel = ToyKernel()

    def post_process(self) -> None:
        """Do what engines do after loading: reshape weights, derive tensors and numbers, hide tensors."""
        self.scale = float(self.weight[0, :16].abs().max())
        self.derived = self.weight[:, :32].float() * 3
        self.kernel.packed = self.weight[:2, :64].to(torch.float64)
        self.weight = nn.Parameter(self.weight.data.view(-1, 4), requires_grad=False)


class ToyModel(nn.Module):
    """A model of a few layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ToyLayer(size // LAYERS) for _ in range(LAYERS))

    def fill(self, version: int) -> None:
        """Load the weights of this version; call before post-processing."""
        generator = torch.Generator().manual_seed(version)
        for parameter in self.parameters():
            # Filled from few random bytes, since tests use large models too.
            row = torch.rand(1024, generator=generator)
            flat = parameter.data.view(-1)
            for at in range(0, flat.numel(), 1024):
                flat[at : at + 1024] = row[: flat.numel() - at] + at

    def post_process(self) -> None:
        """Post-process every layer."""
        for layer in self.layers:
            cast(ToyLayer, layer).post_process()

    def checksum(self) -> str:
        """Return a hash of everything that it computes with."""
        found = hashlib.sha256()
        for layer in self.layers:
            one = cast(ToyLayer, layer)
            packed = one.kernel.packed
            for tensor in (one.weight.data, one.get_buffer("table"), one.derived, packed):
                if tensor is None:
                    raise ValueError("the model was not processed")
                found.update(tensor.contiguous().numpy().tobytes())
            found.update(repr(one.scale).encode())
        return found.hexdigest()


def expected_proof(version: int, size: int) -> str:
    """Return the proof of a model that was loaded in this version."""
    model = ToyModel(size)
    model.fill(version)
    model.post_process()
    return model.checksum()


class ToyEngine:
    """The engine; its checkpoint is a file with a version, in a folder that may lack it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.loads = 0
        self.baseline = 0
        self._options = options

    def empty(self) -> nn.Module:
        """Return a model that is built, touched and post-processed, but has no weights."""
        model = ToyModel(self._options.size)
        for parameter in model.parameters():
            parameter.data.zero_()
        model.post_process()
        if self._options.fail_empty:
            raise ZeroDivisionError("a bug of the plugin")
        return model

    def load(self) -> nn.Module:
        """Load a model with the engine's own loader."""
        self.loads += 1
        with open(self._options.folder / "loads", "a") as log:
            log.write(f"{os.getpid()}\n")
        if self._options.gate:
            (self._options.folder / "gate").read_text()
        if self._options.fail_load:
            raise OSError("the disk of the checkpoint is broken")
        if self._options.fail_load_as_rfork:
            raise CheckpointError("the checkpoint is broken")
        version = int((self._options.folder / "weights").read_text())
        model = ToyModel(self._options.size)
        model.fill(version)
        model.post_process()
        return model

    def check(self) -> None:
        """Raise CheckpointError if there is no checkpoint."""
        if self._options.config_only:
            raise CheckpointError("there are no weights in the folder")


class EngineProcess:
    """The process's side."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._models: dict[str, nn.Module] = {}
        self._engine = ToyEngine(options)

    def execute(self, command: str, value: str) -> Message:
        """Execute a command."""
        match command:
            case "up":
                return self._up(value or "target")
            case "proof":
                return {"proof": cast(ToyModel, self._models[value or "target"]).checksum()}
            case "update":
                self._instance.begin_update()
                model = cast(ToyModel, self._models["target"])
                other = ToyModel(self._options.size)
                other.fill(int(value))
                other.post_process()
                for destination, source in zip(model.layers, other.layers, strict=True):
                    self._copy(cast(ToyLayer, destination), cast(ToyLayer, source))
                self._instance.renew(updated=True)
                return {}
            case "suspend":
                self._instance.suspend()
                for parameter in self._models["target"].parameters():
                    parameter.data = parameter.data.clone()
                return {}
            case "renew":
                self._instance.renew()
                return {}
            case "peak":
                return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
            case "close":
                self._instance.close(0.0)
                return {}
            case _:
                raise ValueError(command)

    @property
    def _instance(self) -> ServedModel:
        found = served_model(self._models["target"])
        if found is None:
            raise ValueError("there is no instance")
        return found

    @staticmethod
    def _copy(destination: ToyLayer, source: ToyLayer) -> None:
        destination.weight.data.copy_(source.weight.data)
        destination.derived.copy_(source.derived)
        if destination.kernel.packed is not None and source.kernel.packed is not None:
            destination.kernel.packed.copy_(source.kernel.packed)
        destination.scale = source.scale

    def _up(self, role: str) -> Message:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        subject = ModelIdentity(
            MODEL,
            Rank(role="speculative" if role == "speculative" else "main"),
            facts=(f"engine toy {self._options.engine}", "device cpu"),
            packages=(__name__.partition(".")[0],),
        )
        began = time.monotonic()
        try:
            module = load_or_fork(self._engine, lambda: subject)
        except Exception as error:
            return {"error": type(error).__name__, "text": str(error), "loads": self._engine.loads}
        self._models[role] = module
        instance = served_model(module)
        message: Message = {
            "proof": cast(ToyModel, module).checksum(),
            "loads": self._engine.loads,
            "before": before,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "seconds": time.monotonic() - began,
            "instance": instance is not None,
        }
        if instance is not None:
            report = instance.report
            message |= {
                "outcome": report.outcome,
                "reasons": list(report.reasons),
                "line": report.line(),
                "bytes_read": report.bytes_read,
                "id": instance.seed.identity.instance_id,
                "weights_id": report.weights_id,
                "acknowledged": instance.seed.wait_registered(10),
            }
        return message

    def close(self) -> None:
        """Stop serving."""
        for module in self._models.values():
            if (instance := served_model(module)) is not None:
                instance.close(0.0)


def print_message(message: Message) -> None:
    """Print a message as one line on standard output."""
    os.write(1, json.dumps(message).encode() + b"\n")


class EngineNode:
    """The test's side: a toy engine in a separate process. Must be closed."""

    def __init__(self, planner: str, folder: Path, *arguments: str, **options: str) -> None:
        self.lines: list[str] = []
        self._process = PythonProcess(
            [sys.executable, "-m", "tests.integration.engine_node", str(folder), *arguments],
            env={
                **os.environ,
                "RFORK_PLANNER": planner,
                "RFORK_TRANSPORTS": "http",
                **{f"RFORK_{name.upper()}": value for name, value in options.items()},
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._changed = threading.Condition()
        self._responses: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._follow, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._log, args=(self._process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def request(self, command: str, value: str = "") -> Message:
        """Execute a command and return the response. Raises RuntimeError if the process ends instead."""
        self.start_request(command, value)
        return self.next_response()

    def start_request(self, command: str, value: str = "") -> None:
        """Send a command and return immediately."""
        if self._process.stdin is None:
            raise RuntimeError("the process has no standard input")
        self._process.stdin.write(json.dumps([command, value]) + "\n")
        self._process.stdin.flush()

    def next_response(self) -> Message:
        """Return the response to the oldest pending command. Raises RuntimeError if the process ends."""
        response = self._responses.get(timeout=RESPONSE_TIMEOUT_S)
        if response is None:
            raise RuntimeError(f"the process ended with {self._process.wait()}\n{''.join(self.lines)}")
        return response

    def has_response(self, *, within_s: float) -> bool:
        """Return True if a response arrives in that time; it is kept."""
        try:
            response = self._responses.get(timeout=within_s)
        except queue.Empty:
            return False
        self._responses.put(response)
        return True

    def wait_for(self, text: str) -> None:
        """Wait for a log line that contains this text; raises TimeoutError with the complete log otherwise."""
        with self._changed:
            if not self._changed.wait_for(lambda: any(text in line for line in self.lines), RESPONSE_TIMEOUT_S):
                raise TimeoutError(f"no line has {text!r}\n{''.join(self.lines)}")

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def _follow(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._responses.put(cast(Message, json.loads(line)))
        self._responses.put(None)

    def _log(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
            for thread in self._threads:
                thread.join(RESPONSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def main() -> None:
    """Execute commands until standard input ends."""
    torch.set_num_threads(1)
    configure(False, "debug")
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=6 * MIB)
    parser.add_argument("--engine", default="1.0")
    for flag in ("--gate", "--fail-load", "--fail-load-as-rfork", "--fail-empty", "--config-only"):
        parser.add_argument(flag, action="store_true")
    process = EngineProcess(parser.parse_args())
    for line in sys.stdin:
        command, value = json.loads(line)
        print_message(process.execute(command, value))
    process.close()


if __name__ == "__main__":
    from tests.integration.engine_node import main as run  # imported by name, so that helpers belong to a package

    run()
