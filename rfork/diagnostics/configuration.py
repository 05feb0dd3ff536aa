"""Checks of the settings: misspelt variables, unreachable addresses, unusable folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import httpx

from rfork.addresses import LOOPBACK
from rfork.diagnostics.result import CheckResult
from rfork.errors import SettingsError
from rfork.settings import InstanceSettings

PLANNER_MODULES = ("planner", "fastapi", "fastapi_offline", "prometheus_client", "uvicorn")
"""Modules that `rfork planner` needs besides those of every instance."""


def check_unknown_variables(misspelt: Mapping[str, str]) -> CheckResult:
    """Check for unknown variables. `misspelt`: each unknown variable with the setting that was probably meant."""
    if not misspelt:
        return CheckResult("variables", "ok", "no RFORK_ variable is misspelt")
    # A warning only: another program may use a variable with this name.
    fix = f"did you mean {', '.join(misspelt.values())}?"
    return CheckResult("variables", "warn", f"not a setting, so ignored: {', '.join(misspelt)}", fix)


def check_reachability(settings: InstanceSettings) -> CheckResult:
    """Check that other hosts can reach this instance: a loopback address with a remote planner is a warning."""
    try:
        address = settings.advertised_host
    except SettingsError as error:
        return CheckResult("reachability", "fail", str(error), error.hint)
    if address not in LOOPBACK:
        return CheckResult("reachability", "ok", f"other instances connect to {address}")
    if settings.planner is None:
        return CheckResult("reachability", "skip", f"only this machine can connect ({address}); no planner is set")
    if _host(settings.planner) in LOOPBACK:
        return CheckResult("reachability", "skip", f"only this machine can connect ({address}), as to the planner")
    detail = f"other hosts cannot read from this one: its address is {address}"
    return CheckResult("reachability", "warn", detail, "set RFORK_BIND=0.0.0.0, and tokens and TLS: docs/security.md")


def missing_planner_modules() -> list[str]:
    """Return the `PLANNER_MODULES` that are not installed."""
    return [module for module in PLANNER_MODULES if find_spec(module) is None]


def check_planner_extra(missing: Sequence[str]) -> CheckResult:
    """Check that a planner can run on this machine. `missing`: modules of the extra that are not installed."""
    if not missing:
        return CheckResult("planner extra", "ok", "`rfork planner` can run on this machine")
    detail = f"`rfork planner` cannot run on this machine: no {', '.join(missing)}"
    return CheckResult("planner extra", "off", detail, "pip install 'rfork[planner]'")


def check_resume(folder: Path | None) -> CheckResult:
    """Check the folder in which forks keep verified chunks."""
    if folder is None:
        return CheckResult(
            "resume",
            "off",
            "a restarted process fetches all its weights again",
            "set RFORK_RESUME_DIR to keep verified chunks on a local disk",
        )
    existing = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        fix = "make it writable for this process's user, or correct RFORK_RESUME_DIR"
        return CheckResult("resume", "fail", f"{folder} is not writable", fix)
    return CheckResult("resume", "ok", f"in {folder}")


def _host(url: str) -> str:
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:  # reported by the planner check
        return ""
