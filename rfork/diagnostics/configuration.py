"""The settings themselves: names that are misspelt, addresses nobody reaches, folders that are not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import httpx

from rfork.diagnostics.result import CheckResult
from rfork.errors import SettingsError
from rfork.settings import LOOPBACK, InstanceSettings


def check_unknown_variables(misspelt: Mapping[str, str]) -> CheckResult:
    """Variables that name no option, each with the one that was meant."""
    if not misspelt:
        return CheckResult("variables", "ok", "each RFORK_ variable names an option")
    detail = ", ".join(f"{name} names no option" for name in misspelt)
    # A guess, however near: what somebody else reads by that name is no failure.
    fix = f"if it is rfork's, correct it: {', '.join(misspelt.values())} may be meant"
    return CheckResult("variables", "warn", detail, fix)


def check_reachability(settings: InstanceSettings) -> CheckResult:
    """Whether others reach what listens here: not on the loopback interface, with a planner elsewhere."""
    try:
        address = settings.advertised_host
    except SettingsError as error:
        return CheckResult("reach", "fail", str(error), error.hint)
    if address not in LOOPBACK:
        return CheckResult("reach", "ok", f"others are told {address}")
    if settings.planner is None or _host(settings.planner) in LOOPBACK:
        return CheckResult("reach", "skip", f"{address}: for this machine alone, as is the planner")
    detail = f"others are told {address}, where only this machine reaches it"
    return CheckResult("reach", "warn", detail, "set RFORK_BIND=0.0.0.0, with tokens and TLS: docs/security.md")


def check_resume(folder: Path | None) -> CheckResult:
    """The folder in which a fork keeps what it has verified."""
    if folder is None:
        return CheckResult("resume", "skip", "nothing is kept of a fork whose process dies (RFORK_RESUME_DIR)")
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        fix = "let this process's user write to it, or correct RFORK_RESUME_DIR"
        return CheckResult("resume", "fail", f"{folder} cannot be written to", fix)
    return CheckResult("resume", "ok", f"in {folder}")


def _host(url: str) -> str:
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:  # the planner's own check says so
        return ""
