"""Imports that fresh interpreters load for each package."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

IMPORT_ALL = """
import importlib, json, pkgutil, sys
# These need their extra, or gRPC.
NEED_EXTRAS = ("planner.store.redis", "planner.integrations.kubernetes.", "planner.integrations.keda.")
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
        needs_extra = module.name.startswith(NEED_EXTRAS) and name == "planner"
        if not module.name.endswith(".__main__") and not needs_extra:
            importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""
PLANNER_PACKAGES = ["fastapi", "prometheus_client", "starlette", "uvicorn"]
OPTIONAL = ["boto3", "gguf", "mooncake", "nixl", "redis", "sglang", "transformers", "vllm"]


@cache
def modules_of(*packages: str) -> frozenset[str]:
    """Return the modules that a fresh interpreter has loaded after it imports every module of `packages`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL, *packages],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert "" == done.stderr
    assert 0 == done.returncode
    return frozenset(json.loads(done.stdout))


def imported_with(packages: list[str], watched: list[str]) -> list[str]:
    """Return the modules of `watched` that are loaded with `packages`."""
    return sorted(modules_of(*packages) & set(watched))


def test_planner_runs_without_torch() -> None:
    """No module of the planner imports torch or an extra, except the Redis, Kubernetes and KEDA modules."""
    assert [] == imported_with(["planner"], ["torch", "grpc", "lightkube", *OPTIONAL])


def test_integrations_run_without_torch() -> None:
    """The integrations do not import torch either: the planner's container image does not contain it."""
    integrations = ["planner.integrations.kubernetes", "planner.integrations.keda"]
    assert [] == imported_with(integrations, ["torch", "jsonpatch", *OPTIONAL])


def test_packages_import_without_extras() -> None:
    """Every module of the packages below the engines imports with the base dependencies alone."""
    names = ("image", "transport", "storage", "planner_client", "peer", "source", "receiver")
    assert [] == imported_with([f"rfork.{name}" for name in names], [*OPTIONAL, *PLANNER_PACKAGES])


def test_a_fork_imports_no_more_than_it_uses() -> None:
    """A process's first fork does not wait for command lines, for versions of files, or for forks across layouts."""
    unused = ["click", "rich", "rfork.placement.boxes", "rfork.receiver.box_fork", "rfork.storage.versions.version"]
    assert [] == imported_with(["rfork._api"], unused)


def test_commands_start_without_extras() -> None:
    """The command line starts without extras, so that it can name a missing one."""
    assert [] == imported_with(["rfork.cli.app"], [*OPTIONAL, *PLANNER_PACKAGES])


def test_help_does_not_import_torch() -> None:
    """Help, and commands that transfer no bytes, do not wait for torch."""
    assert [] == imported_with(["rfork.cli.app"], ["torch"])
