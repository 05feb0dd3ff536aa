"""The checks of `rfork doctor`: capabilities and problems of this machine. The CLI prints the results.

Each check receives its inputs as arguments, returns `CheckResult` values and never raises; `run_checks`
calls all of them with the state of this machine. Checks leave nothing behind: probed ports are closed again.
"""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

import torch

from rfork.diagnostics import configuration, machine, network, rdma, same_host, transports
from rfork.diagnostics.result import CheckResult, Status
from rfork.settings import InstanceSettings, find_typos
from rfork.transport.mooncake import topology
from rfork.transport.mooncake.library import library_state
from rfork.transport.nixl.library import library_state as nixl_state

__all__ = ["CheckResult", "Status", "run_checks"]


def run_checks(settings: InstanceSettings) -> list[CheckResult]:
    """Run all checks on this machine and return the results in display order, within a few planner timeouts."""
    devices = topology.rdma_devices()
    found = machine.probe_gpus()
    indices = [gpu.index for gpu in found.gpus]
    pci_locations = {f"cuda:{gpu.index}": gpu.pci_location for gpu in found.gpus}
    working = [device for device in devices if not device.fault]
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    requested = settings.transports or ()
    return [
        machine.check_python(platform.python_version_tuple(), torch.__version__),
        machine.check_cuda([gpu.name for gpu in found.gpus], found.error),
        transports.check_digest(bool(indices), transports.has_triton(), compiler=transports.has_compiler()),
        rdma.check_rdma(devices, settings.rdma_devices),
        *(rdma.check_device(device, pci_locations) for device in devices),
        rdma.check_gpu_direct(
            topology.has_peer_module(),
            bool(indices) and all(topology.has_dma_buf(torch.device("cuda", gpu)) for gpu in indices),
            needed=bool(indices and working),
        ),
        rdma.check_mooncake(library_state(), cuda=bool(indices), torch_cuda=torch.version.cuda),
        machine.check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma=bool(devices)),
        machine.check_shared_memory(shared.f_bavail * shared.f_frsize if shared else None),
        same_host.check_cuda_ipc(same_host.namespace("ipc"), indices, torch.cuda.can_device_access_peer),
        same_host.check_unix_sockets(settings.unix_socket_dir, same_host.namespace("net")),
        same_host.check_sealed_memory(hasattr(os, "memfd_create"), same_host.shmem_huge_pages(Path("/sys"))),
        transports.check_collectives(transports.distributed_backends(), requested),
        transports.check_nixl(nixl_state(), requested),
        configuration.check_unknown_variables(find_typos()),
        configuration.check_planner_extra(configuration.missing_planner_modules()),
        configuration.check_resume(settings.resume_dir),
        configuration.check_reachability(settings),
        network.check_port("peer_port", settings.bind, settings.peer_port),
        network.check_port("http_port", settings.bind, settings.http_port),
        network.check_tls(settings),
        *network.check_planner(settings),
        *transports.check_transports(settings),
    ]
