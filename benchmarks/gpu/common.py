"""Shared parts of the GPU benchmarks: options, modules to transfer, and rows of contenders that cannot run."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import nn

from benchmarks import harness
from benchmarks.harness import GB, Contender, Row
from benchmarks.shapes import llama
from rfork.errors import RforkError

FULL_BYTES, QUICK_BYTES, CPU_BYTES = 16 << 30, 2 << 30, 256 << 20
SHARE = 5
"""The dense image uses this fraction (one part in SHARE) of a GPU's free memory: at most four exist at a
time.
"""
SMALL_TENSORS, SMALL_BYTES, ROW_BYTES = 20_000, 1 << 30, 2048
SMALL_ROWS = (0.92, 1.0, 1.08)
WIDTHS = ((4096, 14336, 1024), (1024, 4096, 256), (64, 256, 64))
"""Hidden, intermediate and key-value sizes; the widest that leaves half of the bytes to the layers is used."""
VOCABULARY = 32_000
ASIDE_ROUNDS = 3
NOT_FOUND = (ImportError, AttributeError, RforkError, OSError, RuntimeError, ValueError, TypeError)
"""Exceptions that turn a contender into a row with the reason; other loaders raise all of these."""


class VerificationError(Exception):
    """A contender produced wrong bytes: its row reports it, and the benchmark fails at the end."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Common benchmark options, the device, and the `bytes` of the dense image (0: chosen by device)."""

    common: harness.Options
    device: torch.device
    bytes: int

    @property
    def peer(self) -> torch.device | None:
        """The second GPU, or None."""
        if self.device.type != "cuda" or torch.cuda.device_count() < 2:
            return None
        return torch.device("cuda", 1)


def parse(benchmark: str, description: str | None, arguments: Sequence[str] | None = None) -> GpuOptions:
    """Parse the command line. Raises RforkError if the device is missing."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a device")
    parser.add_argument("--bytes", type=int, default=0, metavar="N", help="size of the dense image")
    chosen, rest = parser.parse_known_args(arguments)
    common = harness.options(f"gpu.{benchmark}", f"{description}\n{parser.format_help()}", rest)
    cuda = torch.cuda.is_available()
    if chosen.device == "cuda" and not cuda:
        raise RforkError("torch finds no CUDA device", hint="--device cpu runs the same code at a small size")
    device = torch.device("cuda", 0) if cuda and chosen.device != "cpu" else torch.device("cpu")
    return GpuOptions(common, device, chosen.bytes)


def dense_bytes(options: GpuOptions) -> int:
    """Return the size of the dense image for this device."""
    if options.bytes:
        return options.bytes
    if options.device.type == "cpu":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(options.device)
    return min(QUICK_BYTES if options.common.quick else FULL_BYTES, free // SHARE)


def shapes_of(dense: int) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
    """Return the shapes of both images, bfloat16: one of about `dense` bytes, and one of very many small
    tensors.
    """
    return {"dense": dense_shapes(dense), "small": small_shapes(min(SMALL_BYTES, dense // 2))}


def dense_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Return a Llama's tensors, with the number of layers (at least one) closest to `nbytes` (two bytes per
    element).
    """
    for hidden, intermediate, key_value in WIDTHS:
        embedding = 2 * 2 * VOCABULARY * hidden
        layer = 2 * hidden * (2 * hidden + 2 * key_value + 3 * intermediate + 2)
        if embedding + layer <= nbytes and embedding <= nbytes // 2:
            return llama(max(1, round((nbytes - embedding) / layer)), hidden, intermediate, key_value)
    return llama(1, *WIDTHS[-1])


def small_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Return 20,000 tensors of nearly one size; fewer if each would have less than one row of 2 KiB."""
    count = min(SMALL_TENSORS, max(1, nbytes // (4 * ROW_BYTES)))
    mean = nbytes / count / ROW_BYTES
    rows = [max(1, round(mean * share)) for share in SMALL_ROWS]
    return {f"experts.{index}.weight": (rows[index % 3], ROW_BYTES // 2) for index in range(count)}


def module_of(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> nn.Module:
    """Build a module of random bfloat16 bytes, one allocation per tensor; equal in every process and on every
    device of one type.
    """
    generator = torch.Generator(device).manual_seed(1)
    root = nn.Module()
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        tensor.view(torch.int64).random_(generator=generator)
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def synchronized(device: torch.device) -> None:
    """Wait until the GPUs have finished all work of this process; their clock is not the host's."""
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


@dataclass
class GpuContenders:
    """Contenders of one run. One that cannot run gets a row with the reason and does not affect the others.

    `aside`: contenders that run only in the first rounds, because they are slow and not decisive.
    """

    notes: dict[str, str] = field(default_factory=dict)
    wrong: int = 0
    """Number of contenders with wrong bytes."""
    _runs: dict[str, Contender] = field(default_factory=dict)
    _remaining_runs: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, prepare: Callable[[], Contender], *, aside: bool = False) -> None:
        """Add a contender; `prepare` creates it, or raises the reason why it cannot run."""
        try:
            self._runs[name] = prepare()
        except NOT_FOUND as error:
            self.absent(name, error_text(error))
            return
        if aside:
            self._remaining_runs[name] = ASIDE_ROUNDS + 1  # one warm-up round

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the contenders that run."""
        return tuple(self._runs)

    def absent(self, name: str, reason: str) -> None:
        """Record that a contender does not run."""
        self.notes[name] = reason

    def run(self, rounds: int, warmed: Callable[[], None] | None = None) -> dict[str, list[float]]:
        """Return the seconds of each round of all contenders that completed, in the order they were added.

        A warm-up round shows which contenders cannot run; `warmed` is called after it.
        """
        runs = {name: partial(self._once, name) for name in self._runs}
        for warm_up in runs.values():
            warm_up()
        if warmed is not None:
            warmed()
        seconds = harness.interleave({name: run for name, run in runs.items() if name not in self.notes}, rounds)
        return {
            name: [value for value in values if not math.isnan(value)]
            for name, values in seconds.items()
            if name not in self.notes
        }

    def _once(self, name: str) -> float:
        if name in self.notes or self._remaining_runs.get(name, 1) <= 0:
            return math.nan
        if name in self._remaining_runs:
            self._remaining_runs[name] -= 1
        try:
            return self._runs[name]()
        except VerificationError:
            self.wrong += 1
            self.absent(name, "WRONG BYTES")
        except NOT_FOUND as error:
            self.absent(name, error_text(error))
        return math.nan


def error_text(error: BaseException) -> str:
    """Return an error as one line for a table."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    hint = getattr(error, "hint", "")
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} ({hint})" if hint else lines[0]


def rows_of(seconds: Mapping[str, Sequence[float]], sizes: Mapping[str, int], field: GpuContenders) -> list[Row]:
    """Return a row per contender: GB/s of the median, or why it did not run. `sizes` are in bytes."""
    lines: list[Row] = [
        {
            "contender": name,
            "GB/s": sizes[name] / GB / median(values),
            "min": sizes[name] / GB / max(values),
            "max": sizes[name] / GB / min(values),
            "seconds": median(values),
            "rounds": len(values),
            "note": "",
        }
        for name, values in seconds.items()
    ]
    return lines + [{"contender": name, "note": reason} for name, reason in field.notes.items()]


def timed_on_device(call: Callable[[], float | None], device: torch.device) -> float:
    """Return the seconds that `call` returns, or else its wall time until the GPUs have finished."""
    synchronized(device)
    began = time.perf_counter()
    reported_seconds = call()
    synchronized(device)
    return time.perf_counter() - began if reported_seconds is None else reported_seconds
