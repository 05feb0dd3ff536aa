"""The GPUs of this machine, as far as torch can use them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rfork.transport.mooncake import topology


@dataclass(frozen=True, slots=True)
class Gpu:
    """One that CUDA started on: its number and name, and where it is."""

    index: int
    name: str
    pci_location: topology.PciLocation


@dataclass(frozen=True, slots=True)
class Gpus:
    """All of them; or none, and why CUDA does not start."""

    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def probe_gpus() -> Gpus:
    """Start CUDA and ask for its GPUs; never raises.

    They may be counted by other means (NVML), so that there are some where CUDA does not start.
    """
    try:
        return Gpus(tuple(_gpu(index) for index in range(torch.cuda.device_count())))
    except Exception as error:  # an old driver, no fabric manager, …: torch says what it likes
        return Gpus(error=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _gpu(index: int) -> Gpu:
    device = torch.device("cuda", index)
    name = torch.cuda.get_device_name(device)
    return Gpu(index, name, topology.pci_location(topology.gpu_address(device)))
