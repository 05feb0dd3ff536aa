"""SGLang's part of the matrix of versions (`tests.engines.matrix`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx
from typing_extensions import Self

from rfork.engines.hook_targets import HookTarget
from rfork.engines.sglang import compat
from tests.engines.engine_server import ROOT, wait_until
from tests.engines.model_folders import copy_without_weights, make_tiny
from tests.engines.planner_process import PlannerProcess
from tests.engines.queries import PROMPTS, greedy_tokens, wait_serving, weights_ids
from tests.engines.reference_digests import fused_digests
from tests.engines.servers import SglangServer
from tests.engines.wheel_sources import WheelSources
from tests.models import make_tiny_llama

READY_S = 900.0
CHECKER_ON_CPU = Path(__file__).parent / "setup" / "checker_on_cpu"
DIGITS = 16
"""Digits of each SHA-256 that SGLang's weight checker returns."""
REQUIRED: Final = {"RFORK_FAIL_IF_NOT_FORKED": "1"}


class SglangMatrix:
    """Forks one tiny model between two servers of one SGLang version."""

    name = "sglang"
    versions: Sequence[str] = tuple(f"0.5.{number}" for number in range(16, 24))
    without_cpu_build: Mapping[str, str] = {}

    def distribution(self, version: str) -> str:
        return f"sglang=={version}"

    def hook_targets(self, sources: WheelSources) -> Sequence[HookTarget]:
        def find(*paths: str) -> str:
            return next((path for path in paths if sources.has(path)), paths[0])

        return (*compat.early(find), *compat.scheduling(find), *compat.LAUNCHING)

    def check_methods(self, sources: WheelSources) -> Sequence[str]:
        known = compat.HARMLESS | {target.path.rpartition(".")[2] for target in self.hook_targets(sources)}
        names = {name for owner in (compat.WEIGHTS, compat.MANAGER) for name in sources.public_methods(owner)}
        return sorted(name for name in names - known if compat.CHANGES_WEIGHTS.search(name))

    def fork(self, version: str, python: Path, scratch: Path) -> str:
        """Compare a seed that SGLang's own loader filled, its update in place, and a fork of it with the files.

        The tensors are compared with digests of the files that neither rfork nor SGLang computed, the tokens of the
        fork with those of the seed.
        """
        check_builders(python, scratch)
        make_tiny_llama(scratch / "tokenizer")
        folders = [scratch / name / "tiny-llama" for name in ("first", "second")]
        for seed, folder in enumerate(folders):
            make_tiny(folder, scratch / "tokenizer", "llama", seed=seed)
        bare = copy_without_weights(folders[0], scratch)
        with PlannerProcess() as planner:
            options = ("--rfork-planner", planner.url)
            with _ReadyServer(python, folders[0], scratch / "seed.log", *options) as seed_server:
                seed_server.wait_for_line("fork done report=loaded")
                require("tensors of the seed", _of_files(folders[0]), _digests(seed_server))
                wait_serving(planner, 1)
                old, tokens = weights_ids(planner), greedy_tokens(seed_server, PROMPTS[:5])
                _update(seed_server, folders[1])
                wait_until(lambda: len(weights_ids(planner) - old) == 1, deadline_s=120, what="the updated weights")
                require("tensors after the update", _of_files(folders[1]), _digests(seed_server))
                updated = greedy_tokens(seed_server, PROMPTS[:5])
                if updated == tokens:
                    raise AssertionError("the update changed no tokens")
                with _ReadyServer(python, bare, scratch / "fork.log", *options, environment=REQUIRED) as target:
                    target.wait_for_line(r"fork done report=forked 0\.\d+ GB .*")
                    require("tensors of the fork", _of_files(folders[1]), _digests(target))
                    require("tokens of the fork", updated, greedy_tokens(target, PROMPTS[:5]))
                    wait_serving(planner, 2)
                warnings = seed_server.lines_with("rfork runs without some features")
                warnings += seed_server.lines_with("not a seed")
        return "; ".join(("loaded, updated in place, forked", *warnings[:1]))


def check_builders(python: Path, scratch: Path) -> None:
    """Compare the models of SGLang's loaders with and without weights; see `sglang_builder_probe`."""
    ran = subprocess.run(
        [python, ROOT / "tests/engines/sglang_builder_probe.py", scratch / "builder"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(ran.stderr)
    result = json.loads(lines[-1].removeprefix("RESULT "))
    require("layouts", None, result["difference"])
    require("steps", result["loaded"], result["empty"])
    require("undefined parameters", ["plain.weight"], result["undefined"])


class _ReadyServer(SglangServer):
    """A server of one version, ready when it is entered."""

    def __init__(
        self, python: Path, folder: Path, log: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{CHECKER_ON_CPU}"}
        super().__init__(
            folder, log=log, arguments=arguments, environment={**paths, **(environment or {})}, python=python
        )

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.wait_ready(READY_S)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self


def _digests(server: SglangServer) -> dict[str, str]:
    """Return the digests of a server's weights, computed by SGLang's own weight checker."""
    response = httpx.post(f"{server.url}/weights_checker", json={"action": "checksum"}, timeout=120)
    response.raise_for_status()
    (rank,) = response.json()["ranks"]
    return dict(rank["checksums"])


def _of_files(folder: Path) -> dict[str, str]:
    return {name: digest[:DIGITS] for name, digest in fused_digests(folder).items()}


def _update(server: SglangServer, folder: Path) -> None:
    body = {"model_path": str(folder)}
    response = httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=120)
    require("update", True, response.json()["success"])


def require(what: str, expected: object, found: object) -> None:
    """Raise AssertionError unless both are equal."""
    if expected != found:
        raise AssertionError(f"{what} differ: expected {expected!r}, found {found!r}")
