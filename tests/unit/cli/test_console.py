"""Errors of the command line."""

from __future__ import annotations

import pytest

from rfork.cli.console import requires_extra
from rfork.errors import MissingExtra


def test_a_missing_package_names_its_extra() -> None:
    """The error has the package, and the command that installs it."""
    with pytest.raises(MissingExtra) as caught, requires_extra("`rfork planner`", "planner"):
        raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")
    assert "`rfork planner` is not available: fastapi is not installed" == str(caught.value)
    assert "pip install 'rfork[planner]'" == caught.value.hint
    assert 2 == caught.value.exit_code


@pytest.mark.parametrize("name", ["rfork.missing", "planner.missing"])
def test_a_missing_module_of_rfork_is_a_bug(name: str) -> None:
    """No installation would provide it."""
    with pytest.raises(ModuleNotFoundError, match=name), requires_extra("`rfork planner`", "planner"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
