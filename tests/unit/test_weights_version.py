"""Versions: their display, and the reasons that contain them."""

from __future__ import annotations

import pytest

from rfork import weights_version

FIRST = "NoSource: first of version files:3fa2c1d0 of model m; 4 instances serve files:91bc01f2"
SEVERAL = "2 versions of m are served (a, b) and this target states none"


@pytest.mark.parametrize(
    ("version", "displayed"),
    [
        ("2026-11-23", "2026-11-23"),
        (f"files:{'3' * 32}", "files:33333333"),
        (f"commit:{'4' * 40}", "commit:44444444"),
        ("update:llama-7c9f-0:12", "update:llama-7c:12"),
        ("revision:main", "revision:main"),
        (None, "(none)"),
    ],
)
def test_generated_versions_are_displayed_abbreviated(version: str | None, displayed: str) -> None:
    """A stated version is displayed unchanged."""
    assert displayed == weights_version.short(version)


@pytest.mark.parametrize(
    ("reason", "is_first"),
    [
        (FIRST, True),
        (SEVERAL, False),
        (f"{SEVERAL}; {FIRST}", False),
        ("NoSource: no instance has m", False),
    ],
)
def test_the_first_target_of_a_version_is_recognised_by_its_reason(reason: str, is_first: bool) -> None:
    """A target without a stated version is never the first of one."""
    assert is_first == weights_version.is_first(reason)


@pytest.mark.parametrize(
    ("version", "is_shareable"),
    [("v1", True), ("weights:aa", True), ("update:r:1", False), ("unnamed:r", False), ("", False)],
)
def test_versions_with_a_replica_name_belong_to_that_replica(version: str, is_shareable: bool) -> None:
    """Two replicas that were updated in place never have the same version automatically."""
    assert is_shareable == weights_version.is_shareable(version)
