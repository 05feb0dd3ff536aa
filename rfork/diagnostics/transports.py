"""Checks of the transports: which are used, and why others are not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec

import torch.distributed

from rfork.diagnostics.result import CheckResult, Status
from rfork.settings import InstanceSettings
from rfork.transport.nixl.library import NixlLibrary
from rfork.transport.selection import explain_selection

COLLECTIVES = ("nccl", "gloo")
"""Transports over process groups of `torch.distributed`."""
COMPILERS = ("gcc", "clang")
"""The C compilers that Triton searches for."""


def check_transports(settings: InstanceSettings) -> list[CheckResult]:
    """Return one result per transport, with the reason; and a failure if none is available."""
    transports = explain_selection(settings)
    checks: list[CheckResult] = []
    for transport in transports:
        name = f"transport {transport.name}"
        if transport.used:
            detail = f"priority {transport.rank}: {transport.reason}"
            checks.append(CheckResult(name, "ok", detail, transport.hint))
        else:
            requested = settings.transports is not None and transport.name in settings.transports
            status: Status = "fail" if requested else "off"
            fix = transport.hint or ("remove it from RFORK_TRANSPORTS" if requested else "")
            checks.append(CheckResult(name, status, transport.reason, fix))
    if not any(transport.used for transport in transports):
        checks.append(
            CheckResult("transports", "fail", "none is available", "fix one of the above, or unset RFORK_TRANSPORTS")
        )
    return checks


def check_collectives(available: Sequence[str], requested: Sequence[str]) -> CheckResult:
    """Check the transports over process groups, which are used only if RFORK_TRANSPORTS names them.

    `available`: the backends of `torch.distributed`; `requested`: the transports in RFORK_TRANSPORTS.
    """
    name = ", ".join(COLLECTIVES)
    enabled = [transport for transport in requested if transport in COLLECTIVES]
    if missing := [transport for transport in enabled if transport not in available]:
        fix = "use a torch build that includes it, or remove it from RFORK_TRANSPORTS"
        return CheckResult(name, "fail", f"not in this build of torch: {', '.join(missing)}", fix)
    if enabled:
        detail = f"{', '.join(enabled)} enabled: connections to their ports are not authenticated"
        return CheckResult(name, "warn", detail, "use only on a trusted network")
    usable = [transport for transport in COLLECTIVES if transport in available]
    if not usable:
        return CheckResult(name, "off", "not in this build of torch")
    prefix = "" if len(usable) == len(COLLECTIVES) else f"{', '.join(usable)} "
    return CheckResult(name, "off", f"{prefix}available; enable with RFORK_TRANSPORTS=…,{usable[0]}")


def check_nixl(state: NixlLibrary, requested: Sequence[str]) -> CheckResult:
    """Check that NIXL can be imported. `requested`: the transports in RFORK_TRANSPORTS, without which it is unused."""
    if state.error:
        status: Status = "fail" if state.wheels or "nixl" in requested else "off"
        return CheckResult("nixl", status, state.error, state.hint or "pip install 'rfork[nixl]'")
    installed = f"{state.version} installed"
    if "nixl" not in requested:
        return CheckResult("nixl", "off", f"{installed}; enable with RFORK_TRANSPORTS=nixl,…")
    detail = f"{installed} and enabled: malformed metadata of a source can end this process"
    return CheckResult("nixl", "warn", detail, "use only with trusted sources")


def check_digest(cuda: bool, triton: bool, *, compiler: bool) -> CheckResult:
    """Check how digests are computed: on a GPU by a Triton kernel, or by tensor operations, which are much slower.

    `cuda`: this machine has GPUs; `triton`: Triton is installed; `compiler`: so is a C compiler, which Triton
    needs for the code that launches its kernels.
    """
    if not cuda:
        return CheckResult("digest", "ok", "on the CPU, by xxhash")
    slow = "on the GPU, by tensor operations (slow)"
    install = "apt-get install gcc libc6-dev (or clang; CC may name another)"
    if not triton:
        return CheckResult("digest", "warn", slow, "pip install triton" + ("" if compiler else f"; {install}"))
    if not compiler:
        return CheckResult("digest", "warn", f"{slow}: Triton needs a C compiler, and CC may not name one", install)
    return CheckResult("digest", "ok", "on the GPU, by a Triton kernel")


def has_triton() -> bool:
    """Return whether Triton is installed, without importing it."""
    return find_spec("triton") is not None


def has_compiler() -> bool:
    """Return whether one of `COMPILERS` is installed."""
    return any(shutil.which(name) for name in COMPILERS)


def distributed_backends() -> tuple[str, ...]:
    """Return the backends of `torch.distributed` in this build of torch."""
    if not torch.distributed.is_available():
        return ()
    checks = {"gloo": torch.distributed.is_gloo_available, "nccl": torch.distributed.is_nccl_available}
    return tuple(name for name, is_available in checks.items() if is_available())
