"""Checks of the transports: which are used, and why others are not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import util

import torch.distributed

from rfork.diagnostics.result import CheckResult, Status
from rfork.schema.types import OPT_IN_TRANSPORTS
from rfork.settings import InstanceSettings
from rfork.transport.selection import explain_selection

COMPILERS = ("gcc", "clang")


def check_transports(settings: InstanceSettings) -> list[CheckResult]:
    """Return one result per transport, with the reason; and a failure if none is available."""
    rows = explain_selection(settings)
    checks: list[CheckResult] = []
    for row in rows:
        if row.used:
            detail = f"priority {row.rank}: {row.reason}"
            checks.append(CheckResult(f"transport {row.name}", "ok", detail, row.hint))
        else:
            requested = settings.transports is not None and row.name in settings.transports
            status: Status = "fail" if requested else "off"
            fix = row.hint or ("remove it from RFORK_TRANSPORTS" if requested else "")
            checks.append(CheckResult(f"transport {row.name}", status, row.reason, fix))
    if not any(row.used for row in rows):
        checks.append(
            CheckResult("transports", "fail", "none is available", "fix one of the above, or unset RFORK_TRANSPORTS")
        )
    return checks


def check_opt_in_transports(available: Sequence[str], requested: Sequence[str]) -> CheckResult:
    """Check the transports that are used only if RFORK_TRANSPORTS names them.

    `available`: backends of `torch.distributed`; `requested`: the transports in RFORK_TRANSPORTS.
    """
    name = ", ".join(sorted(OPT_IN_TRANSPORTS, reverse=True))
    enabled = [each for each in requested if each in OPT_IN_TRANSPORTS]
    if missing := [each for each in enabled if each not in available]:
        fix = "use a torch build that includes it, or remove it from RFORK_TRANSPORTS"
        return CheckResult(name, "fail", f"not in this build of torch: {', '.join(missing)}", fix)
    if enabled:
        detail = f"{', '.join(enabled)} enabled: connections to their ports are not authenticated"
        return CheckResult(name, "warn", detail, "use only on a trusted network")
    usable = sorted(OPT_IN_TRANSPORTS.intersection(available), reverse=True)
    if not usable:
        return CheckResult(name, "off", "not in this build of torch")
    which = "" if len(usable) == len(OPT_IN_TRANSPORTS) else f"{', '.join(usable)} "
    return CheckResult(name, "off", f"{which}available; enable with RFORK_TRANSPORTS=…,{usable[0]}")


def check_digest(cuda: bool, triton: bool, *, compiler: bool) -> CheckResult:
    """Check what computes digests of GPU memory: a Triton kernel, or tensor operations, which are much slower.

    `compiler`: a C compiler is installed, which Triton needs for the code that launches its kernels.
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
    return util.find_spec("triton") is not None


def has_compiler() -> bool:
    """Return whether one of the C compilers that Triton searches for is installed."""
    return any(shutil.which(name) for name in COMPILERS)


def backends() -> tuple[str, ...]:
    """Return the backends of `torch.distributed` in this build of torch."""
    if not torch.distributed.is_available():
        return ()
    has = {"gloo": torch.distributed.is_gloo_available, "nccl": torch.distributed.is_nccl_available}
    return tuple(name for name, available in has.items() if available())
