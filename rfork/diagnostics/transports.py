"""Which transports are used, and why (not)."""

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
    """One line for each transport: used or not, and why; a failure when none is left."""
    rows = explain_selection(settings)
    checks: list[CheckResult] = []
    for row in rows:
        if row.used:
            detail = f"used, choice {row.rank}: {row.reason}"
            checks.append(CheckResult(f"transport {row.name}", "ok", detail, row.hint))
        else:
            requested = settings.transports is not None and row.name in settings.transports
            status: Status = "fail" if requested else "skip"
            fix = row.hint or ("take it out of RFORK_TRANSPORTS" if requested else "")
            checks.append(CheckResult(f"transport {row.name}", status, f"not used: {row.reason}", fix))
    if not any(row.used for row in rows):
        checks.append(
            CheckResult("transports", "fail", "none can be used", "mend one of those above, or unset RFORK_TRANSPORTS")
        )
    return checks


def check_collectives(available: Sequence[str], requested: Sequence[str]) -> CheckResult:
    """The backends of `torch.distributed` there are, and whether transports on them are asked for."""
    named = ", ".join(sorted(OPT_IN_TRANSPORTS))
    missing = [name for name in requested if name in OPT_IN_TRANSPORTS and name not in available]
    if missing:
        fix = "use a torch that is built with it, or take it out of RFORK_TRANSPORTS"
        return CheckResult("collectives", "fail", f"this torch has no {', '.join(missing)}", fix)
    found = ", ".join(available) or "none"
    used = [name for name in requested if name in OPT_IN_TRANSPORTS]
    if not used:
        detail = f"torch has {found}; transports on them ({named}) are used by name only"
        return CheckResult("collectives", "skip", detail, "RFORK_TRANSPORTS names them")
    detail = f"{', '.join(used)} asked for: whoever reaches their ports is not kept out"
    return CheckResult("collectives", "warn", detail, "only on a network that you trust wholly")


def check_digest(cuda: bool, triton: bool, *, compiler: bool) -> CheckResult:
    """What digests GPU memory: a Triton kernel, or plain tensor operations, which take far longer.

    `compiler`: there is one of C, which Triton calls for the code that starts its kernels.
    """
    if not cuda:
        return CheckResult("digest", "ok", "on the CPU, by xxhash")
    slow = "on the GPU, by tensor operations: slow"
    install = "apt-get install gcc libc6-dev (or clang; CC may name another)"
    if not triton:
        return CheckResult("digest", "warn", slow, "pip install triton" + ("" if compiler else f"; {install}"))
    if not compiler:
        return CheckResult("digest", "warn", f"{slow}, unless CC names a C compiler: Triton needs one", install)
    return CheckResult("digest", "ok", "on the GPU, by a Triton kernel")


def has_triton() -> bool:
    """Whether Triton is installed; it is not imported for this."""
    return util.find_spec("triton") is not None


def has_compiler() -> bool:
    """Whether there is one of the C compilers that Triton looks for."""
    return any(shutil.which(name) for name in COMPILERS)


def backends() -> tuple[str, ...]:
    """The backends of `torch.distributed` that this torch is built with."""
    if not torch.distributed.is_available():
        return ()
    has = {"gloo": torch.distributed.is_gloo_available, "nccl": torch.distributed.is_nccl_available}
    return tuple(name for name, available in has.items() if available())
