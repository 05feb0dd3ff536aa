"""The recorded matrix of engine versions agrees with the code and with the pages."""

from __future__ import annotations

from docs.site.reference import matrix_page
from rfork.engines.vllm import compat
from tests.engines.matrix import OUTPUT, read
from tests.engines.matrix_vllm import VllmMatrix


def test_tested_versions_are_those_that_forked() -> None:
    """vLLM's list has exactly the versions of level ``forked``."""
    forked = [row.version for row in read(OUTPUT) if row.engine == "vllm" and row.level == "forked"]
    assert list(compat.TESTED) == forked


def test_every_supported_version_has_a_row() -> None:
    """The runner's versions are those of the file."""
    assert list(VllmMatrix.versions) == [row.version for row in read(OUTPUT) if row.engine == "vllm"]


def test_no_listed_version_is_unsupported() -> None:
    """A version that does not work is not listed as supported."""
    assert {"forked", "checked"} >= {row.level for row in read(OUTPUT)}


def test_the_page_shows_each_version() -> None:
    """One row of the table for each row of the file."""
    versions = [row.version for row in read(OUTPUT) if row.engine == "vllm"]
    lines = matrix_page.table_of("vllm").splitlines()[2:]
    assert versions == [line.split(" | ")[0].removeprefix("| ") for line in lines]
