"""SGLang's weight cache daemon with rfork, in host memory: what it calls of a GPU is replaced.

Argument: model folder. Run by `test_weight_cache.py` with SGLang's Python.
"""

from __future__ import annotations

import os
import sys

import torch
from sglang.srt.platforms import current_platform
from sglang.srt.weight_cache import daemon

from rfork.engines.sglang import weight_cache


class HostMemory:
    """SGLang's platform, which claims to have one GPU."""

    device_type = "cpu"

    def __getattr__(self, name: str) -> object:
        return getattr(current_platform, name)

    def is_cuda_alike(self) -> bool:
        return True

    def get_device_uuid(self, index: int) -> str:
        return f"host-memory-{index}-{os.getpid()}"

    def get_device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


class NoExport:
    """Transport of the daemon without CUDA IPC."""

    name = "none"

    def prepare_export(self, state_tensors: dict[str, object]) -> dict[str, dict[str, object]]:
        return {name: {} for name in state_tensors}


def main() -> None:
    """Run one daemon until it is stopped."""
    daemon.current_platform = HostMemory()
    daemon.choose_daemon_transport_backend = lambda state_tensors: NoExport()
    torch.cuda.memory_reserved = lambda *_: 0
    weight_cache.main(["--model-path", sys.argv[1], "--load-format", "rfork", "--device", "cpu", "--tp-rank", "0"])


if __name__ == "__main__":
    main()
