"""Releases: one definition of the version, valid workflows, and a changelog that they can parse."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import yaml

import rfork
from deploy.docker.requirements import pyproject_table
from deploy.release import notes
from planner.store.redis import FORMAT

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()

Workflow = dict[str, dict[str, dict[str, object]]]


def workflow(path: Path) -> Workflow:
    """Return the document of a workflow."""
    return cast(Workflow, yaml.safe_load(path.read_text()))


def steps() -> Iterator[tuple[str, str]]:
    """Yield every action that a workflow uses, and the comment after it."""
    for path in WORKFLOWS:
        yield from re.findall(r"uses: (\S+)(?: # (\S+))?", path.read_text())


def test_the_version_is_defined_once() -> None:
    """`rfork.__version__` defines the version of metadata, chart and image."""
    project = pyproject_table()
    assert "version" not in project["project"]
    assert {"attr": "rfork.__version__"} == project["tool"]["setuptools"]["dynamic"]["version"]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "rfork" / "Chart.yaml").read_text())
    image = re.search(r"^ARG VERSION=(\S+)$", (ROOT / "deploy" / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert image is not None
    assert [rfork.__version__] * 3 == [chart["version"], chart["appVersion"], image[1]]


def test_the_changelog_has_this_version() -> None:
    """Its section names the Redis format, which upgrades depend on; an unknown version has no section."""
    release_notes = notes.notes(CHANGELOG, rfork.__version__)
    assert f"Redis: {FORMAT}." in release_notes
    assert "## [" not in release_notes
    with pytest.raises(KeyError):
        notes.notes(CHANGELOG, "0.0.0")


def test_workflows_match_their_schema() -> None:
    """Workflows are valid according to GitHub's published schema."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout
    assert "" == done.stderr, done.stdout


def test_actions_are_pinned() -> None:
    """Each action is pinned to one complete commit id, with its version in a comment."""
    used = list(steps())
    assert [] == [action for action, _ in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)]
    assert [] == [action for action, comment in used if not re.fullmatch(r"v\d+\.\d+\.\d+", comment)]
    assert len({action for action, _ in used}) == len({action.partition("@")[0] for action, _ in used})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_permissions_are_minimal(path: Path) -> None:
    """Only jobs that declare it may write, checkouts keep no credentials, and jobs have timeouts."""
    document = workflow(path)
    assert dict(document["permissions"]).items() <= {"contents": "read"}.items()
    for name, job in document["jobs"].items():
        assert "timeout-minutes" in job, name
        for step in cast(list[dict[str, dict[str, object]]], job["steps"]):
            if "actions/checkout@" in str(step.get("uses")):
                assert False is step["with"]["persist-credentials"], name
    text = path.read_text()
    assert [] == re.findall(r"run: .*\$\{\{", text)  # untrusted input is passed through the environment


def test_publishing_waits_for_the_checks() -> None:
    """The order is build and test, attest, pypi, github: each job needs the previous one."""
    jobs = workflow(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert [None, None, ["build", "test"], "attest", "pypi"] == [
        jobs[name].get("needs") for name in ("build", "test", "attest", "pypi", "github")
    ]
    ran = {name: [step.get("run") for step in cast(list[dict[str, object]], jobs[name]["steps"])] for name in jobs}
    assert ".ci/run" in ran["test"]
    assert 'python3 -m deploy.release.notes "${TAG#v}"' in ran["build"]
    # Published metadata needs the repository's URL, otherwise README's links are broken on the index.
    assert 'make release-check REPOSITORY="$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"' in ran["build"]
    assert {"id-token": "write"} == jobs["pypi"]["permissions"]


def test_the_nightly_jobs_run_every_test() -> None:
    """Each folder of tests has a job, except that of tests that need a GPU."""
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    named = re.findall(r"TESTS=tests/(\w+)", nightly) + re.findall(r"arguments: test-(\w+)$", nightly, re.MULTILINE)
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders - {"gpu"} == set(named)


def test_ci_runs_existing_targets() -> None:
    """The workflows run `.ci/run` and existing targets of the Makefile."""
    text, nightly = ((ROOT / ".github" / "workflows" / name).read_text() for name in ("ci.yml", "nightly.yml"))
    makefile = (ROOT / "Makefile").read_text()
    assert "run: .ci/run" in text
    for target in re.findall(r"(?:run: make|arguments:) (\S+)", text + nightly):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
