"""Fixtures of engine tests: models to serve, and a planner. Servers are made by `tests.engines.servers`.

Every test in this folder has the marker ``engines`` and, by default, a timeout of ten minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rfork.cli.demo_model import default_cache, prepare
from tests.engines.model_folders import Architecture, copy_without_weights, make_tiny
from tests.engines.planner_process import PlannerProcess

TIMEOUT_S = 600
# Read before any fixture removes RFORK_* from the environment.
MODEL_CACHE = Path(os.environ.get("RFORK_TEST_MODEL_CACHE") or default_cache())

TinyFolder = Callable[..., Path]
"""``tiny_folder("llama", seed=1) -> Path``"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder before ``-m`` selects; servers start slower than other tests may take."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.engines)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2-135M-Instruct with its weights (269 MB, bfloat16). Do not write into it."""
    return prepare(MODEL_CACHE)


@pytest.fixture(scope="session")
def weightless_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's folder with the same name elsewhere, without weights: only a fork can fill it."""
    return copy_without_weights(model_folder, tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="session")
def tiny_folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """Factory of tiny random models: ``tiny_folder("llama" | "qwen3", seed=1)``, each made once.

    Folders of one architecture have one name, so that they are the same model to a planner; seeds differ only
    in weights. Do not write into them.
    """
    parent = tmp_path_factory.mktemp("tiny")

    def folder(architecture: Architecture = "llama", seed: int = 1) -> Path:
        made = parent / f"seed-{seed}" / f"tiny-{architecture}"
        if not made.exists():
            make_tiny(made, tiny_model, architecture, seed=seed)
        return made

    return folder


@pytest.fixture
def planner() -> Iterator[PlannerProcess]:
    """A planner without instances: ``planner.url``."""
    with PlannerProcess() as running:
        yield running
