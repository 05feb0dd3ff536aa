"""The settings themselves: names that are misspelt, addresses nobody reaches, folders that are not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import httpx

from rfork.errors import SettingsError
from rfork.settings import LOOPBACK, Settings
from rfork.transport.doctor.check import Check


def check_names(misspelt: Mapping[str, str]) -> Check:
    """Variables that name no option, each with the one that was meant."""
    if not misspelt:
        return Check("variables", "ok", "each RFORK_ variable names an option")
    detail = ", ".join(f"{name} names no option" for name in misspelt)
    # A guess, however near: what somebody else reads by that name is no failure.
    fix = f"if it is rfork's, correct it: {', '.join(misspelt.values())} may be meant"
    return Check("variables", "warn", detail, fix)


def check_reach(settings: Settings) -> Check:
    """Whether others reach what listens here: not on the loopback interface, with a planner elsewhere."""
    try:
        address = settings.reachable_at
    except SettingsError as error:
        return Check("reach", "fail", str(error), error.hint)
    if address not in LOOPBACK:
        return Check("reach", "ok", f"others are told {address}")
    if settings.planner is None or _host(settings.planner) in LOOPBACK:
        return Check("reach", "skip", f"{address}: for this machine alone, as is the planner")
    detail = f"others are told {address}, where only this machine reaches it"
    return Check("reach", "warn", detail, "set RFORK_BIND=0.0.0.0, with tokens and TLS: docs/security.md")


def check_resume(folder: Path | None) -> Check:
    """The folder in which a fork keeps what it has verified."""
    if folder is None:
        return Check("resume", "skip", "nothing is kept of a fork whose process dies (RFORK_RESUME)")
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        fix = "let this process's user write to it, or correct RFORK_RESUME"
        return Check("resume", "fail", f"{folder} cannot be written to", fix)
    return Check("resume", "ok", f"in {folder}")


def _host(url: str) -> str:
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:  # the planner's own check says so
        return ""
