"""The model of the tests in device memory, and a process that serves it."""

from __future__ import annotations

import sys

import torch
from torch import nn

import rfork
from tests.fake_libcuda.images import move_to_device
from tests.fake_libcuda.install import install

MODEL, VERSION = "on-a-gpu", "one"


class Model(nn.Module):
    """Tied weights, a buffer that no checkpoint contains, mixed types, and more bytes than one step."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = nn.Linear(600, 1700)
        self.two = nn.Linear(600, 1700)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.randn(7, 9).bfloat16(), requires_grad=False)
        self.register_buffer("table", torch.randn(9), persistent=False)


def main() -> None:
    """Serve the model from the memory of a fake GPU until standard input ends. Argument: the kind of memory."""
    gpu = install()
    module = move_to_device(gpu, Model(), kind=sys.argv[1])  # type: ignore[arg-type]
    with rfork.seed(module, model=MODEL, version=VERSION):
        print("ready", flush=True)
        sys.stdin.read()
    gpu.check()
    print("released", flush=True)


if __name__ == "__main__":
    main()
