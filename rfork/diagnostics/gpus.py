"""The GPUs of this machine that torch can use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rfork.transport.mooncake import topology


@dataclass(frozen=True, slots=True)
class Gpu:
    """A usable CUDA device: index, name and PCI location."""

    index: int
    name: str
    pci_location: topology.PciLocation


@dataclass(frozen=True, slots=True)
class Gpus:
    """All usable GPUs; or none, and the error with which CUDA failed to start."""

    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def probe_gpus() -> Gpus:
    """Initialise CUDA and return its GPUs. Never raises.

    torch may count GPUs with NVML even if CUDA does not start.
    """
    try:
        return Gpus(tuple(_gpu(index) for index in range(torch.cuda.device_count())))
    except Exception as error:  # an old driver, no fabric manager, …: torch raises many types
        return Gpus(error=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _gpu(index: int) -> Gpu:
    device = torch.device("cuda", index)
    name = torch.cuda.get_device_name(device)
    return Gpu(index, name, topology.pci_location(topology.gpu_address(device)))
