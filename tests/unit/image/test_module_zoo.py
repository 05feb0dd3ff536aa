"""Each case of the zoo, between two processes: its state is equal after the copy, or rejected by name."""

from __future__ import annotations

import json
import re

import pytest

from tests.fork_server import run_python
from tests.unit.image.module_zoo import MODULE_CASES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Verdicts of all cases: one process captures them, and another is filled."""
    file = tmp_path_factory.mktemp("zoo") / "seed"
    for role in ("seed", "target"):
        ran = run_python(["-m", "tests.unit.image.module_zoo", role, str(file)])
        assert 0 == ran.returncode, ran.stderr
    found: dict[str, str] = json.loads(ran.stdout)
    return found


def test_the_zoo_has_a_hundred_cases() -> None:
    """Cases are added, not removed."""
    assert len(MODULE_CASES) >= 100


@pytest.mark.parametrize("name", sorted(MODULE_CASES))
def test_a_case_is_equal_or_rejected_by_name(results: dict[str, str], name: str) -> None:
    """Outputs and state equal the seed's bit by bit, or the rejection names the difference."""
    refused = MODULE_CASES[name].refused
    if refused:
        assert re.search(refused, results[name])
    else:
        assert "equal" == results[name]
