"""Runs every command of every page in the page's order, as its reader would."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.seaweed import SeaweedServer
from rfork.cli.demo_model import prepare
from tests.docs.pages import blocks, page_name, pages, required_servers
from tests.docs.terminals import Terminals

ROOT = Path(__file__).parents[2]
SLOW = {
    "deploy/examples/README.md",
    "docs/formats.md",
    "docs/pytorch.md",
    "docs/quickstart.md",
    "docs/snapshots.md",
    "docs/terminal.md",
}
"""Pages left to `make test-all`: each starts ten processes one after the other."""
RUN = [
    pytest.param(page, id=page_name(page), marks=[pytest.mark.slow] if page_name(page) in SLOW else [])
    for page in pages()
    if any(block.is_run for block in blocks(page))
]


def environment(folder: Path, model: Path) -> dict[str, str]:
    """Return a new user's environment: a home that is empty except for the demo's model, replaced by a tiny
    one.
    """
    home = folder / "home"
    cache = home / ".cache" / "rfork"
    cache.mkdir(parents=True)
    shutil.copytree(model, cache / "smollm2-135m-instruct", copy_function=os.link)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RFORK_", "AWS_", "_"))}
    return {
        **kept,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "HOME": str(home),
        "REPOSITORY": str(ROOT),
        "TINY_MODEL": str(model),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page(
    page: Path, tmp_path: Path, tiny_model: Path, free_port: int, request: pytest.FixtureRequest
) -> None:
    """Every command of the page works and prints what the page shows."""
    page_environment = environment(tmp_path, tiny_model)
    if "s3" in required_servers(page):
        server: SeaweedServer = request.getfixturevalue("seaweed_server")
        page_environment |= server.environment()
    run_page(page, tmp_path / "work", page_environment, free_port)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quickstart_with_its_own_model(tmp_path: Path, free_port: int) -> None:
    """With the quickstart's real model, the copy answers as the page shows."""
    pytest.importorskip("gguf")
    page = ROOT / "docs" / "quickstart.md"
    model = prepare(tmp_path / "cache")
    output = run_page(page, tmp_path / "work", environment(tmp_path, model), free_port)
    expected_answer = next(block.text for block in blocks(page) if block.language == "text")
    assert expected_answer in output


def run_page(page: Path, folder: Path, page_environment: dict[str, str], port: int) -> str:
    """Run a page's commands in a new folder and return all their output."""
    folder.mkdir()
    with Terminals(folder, page_environment, port) as terminals:
        for block in blocks(page):
            if block.is_run:
                terminals.run(block)
        return terminals.transcript()
