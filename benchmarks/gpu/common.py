"""What the GPU benchmarks share: their options, the modules they move, and rows for what cannot run here."""

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
"""Of a GPU's free memory the dense image takes one part in so many: at most four live there at once."""
SMALL_TENSORS, SMALL_BYTES, ROW_BYTES = 20_000, 1 << 30, 2048
SMALL_ROWS = (0.92, 1.0, 1.08)
WIDTHS = ((4096, 14336, 1024), (1024, 4096, 256), (64, 256, 64))
"""Hidden, intermediate and key-value sizes: the widest that leaves the layers half of the bytes is taken."""
VOCABULARY = 32_000
ASIDE_ROUNDS = 3
NOT_FOUND = (ImportError, AttributeError, RforkError, OSError, RuntimeError, ValueError, TypeError)
"""What a contender may raise and become a row that says so: foreign loaders raise all of these."""


class VerificationError(Exception):
    """A contender left other bytes than the source's: its row says so, and the benchmark fails in the end."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """The options of all benchmarks, and the device; `bytes` of the dense image, 0: by the device."""

    common: harness.Options
    device: torch.device
    bytes: int

    @property
    def peer(self) -> torch.device | None:
        """The second GPU, where there is one."""
        if self.device.type != "cuda" or torch.cuda.device_count() < 2:
            return None
        return torch.device("cuda", 1)


def parse(benchmark: str, description: str | None, arguments: Sequence[str] | None = None) -> GpuOptions:
    """The command line. Raises RforkError where the device is not there."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where torch finds one")
    parser.add_argument("--bytes", type=int, default=0, metavar="N", help="size of the dense image")
    chosen, rest = parser.parse_known_args(arguments)
    common = harness.options(f"gpu.{benchmark}", f"{description}\n{parser.format_help()}", rest)
    cuda = torch.cuda.is_available()
    if chosen.device == "cuda" and not cuda:
        raise RforkError("torch finds no CUDA device here", hint="--device cpu runs the same code, small")
    device = torch.device("cuda", 0) if cuda and chosen.device != "cpu" else torch.device("cpu")
    return GpuOptions(common, device, chosen.bytes)


def dense_bytes(options: GpuOptions) -> int:
    """How large the dense image is to be on this device."""
    if options.bytes:
        return options.bytes
    if options.device.type == "cpu":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(options.device)
    return min(QUICK_BYTES if options.common.quick else FULL_BYTES, free // SHARE)


def shapes_of(dense: int) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
    """The shapes of both images, bfloat16: one of about `dense` bytes, and one of very many small tensors."""
    return {"dense": dense_shapes(dense), "small": small_shapes(min(SMALL_BYTES, dense // 2))}


def dense_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """A Llama's tensors, as many layers as come nearest to `nbytes` (two bytes an element), one at least."""
    for hidden, intermediate, key_value in WIDTHS:
        embedding = 2 * 2 * VOCABULARY * hidden
        layer = 2 * hidden * (2 * hidden + 2 * key_value + 3 * intermediate + 2)
        if embedding + layer <= nbytes and embedding <= nbytes // 2:
            return llama(max(1, round((nbytes - embedding) / layer)), hidden, intermediate, key_value)
    return llama(1, *WIDTHS[-1])


def small_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """20,000 tensors of nearly one size; fewer where they would have less than one row of 2 KiB each."""
    count = min(SMALL_TENSORS, max(1, nbytes // (4 * ROW_BYTES)))
    mean = nbytes / count / ROW_BYTES
    rows = [max(1, round(mean * share)) for share in SMALL_ROWS]
    return {f"experts.{index}.weight": (rows[index % 3], ROW_BYTES // 2) for index in range(count)}


def module_of(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> nn.Module:
    """A module of random bfloat16 bytes, one allocation a tensor; the same in every process and on every
    device of one kind.
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
    """Wait for all that this process gave the GPUs: their clock is not the host's."""
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


@dataclass
class GpuContenders:
    """The contenders of one run: who cannot run gets a row that says why, and costs nobody else anything.

    `aside`: those that run in the first rounds only, because they are slow and decide nothing.
    """

    notes: dict[str, str] = field(default_factory=dict)
    wrong: int = 0
    """How many left wrong bytes."""
    _runs: dict[str, Contender] = field(default_factory=dict)
    _remaining_runs: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, prepare: Callable[[], Contender], *, aside: bool = False) -> None:
        """`prepare` makes the contender, or raises why it cannot run."""
        try:
            self._runs[name] = prepare()
        except NOT_FOUND as error:
            self.absent(name, error_text(error))
            return
        if aside:
            self._remaining_runs[name] = ASIDE_ROUNDS + 1  # one to warm up

    @property
    def names(self) -> tuple[str, ...]:
        """Those that take part."""
        return tuple(self._runs)

    def absent(self, name: str, reason: str) -> None:
        """It takes no part."""
        self.notes[name] = reason

    def run(self, rounds: int, warmed: Callable[[], None] | None = None) -> dict[str, list[float]]:
        """Seconds of each round of all that ran through, in the order they were added.

        One round before warms up, and finds out who cannot run here; `warmed` is called after it.
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
    """An error on one line of a table."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    hint = getattr(error, "hint", "")
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} ({hint})" if hint else lines[0]


def rows_of(seconds: Mapping[str, Sequence[float]], sizes: Mapping[str, int], field: GpuContenders) -> list[Row]:
    """A line each: GB/s over the median, or the note of who did not run. `sizes` are in bytes."""
    lines: list[Row] = [
        {
            "contender": name,
            "GB/s": sizes[name] / GB / median(values),
            "least": sizes[name] / GB / max(values),
            "most": sizes[name] / GB / min(values),
            "seconds": median(values),
            "rounds": len(values),
            "note": "",
        }
        for name, values in seconds.items()
    ]
    return lines + [{"contender": name, "note": reason} for name, reason in field.notes.items()]


def timed_on_device(call: Callable[[], float | None], device: torch.device) -> float:
    """Seconds that the call tells, else its wall time until the GPUs have done it."""
    synchronized(device)
    began = time.perf_counter()
    reported_seconds = call()
    synchronized(device)
    return time.perf_counter() - began if reported_seconds is None else reported_seconds
