"""Goals of the benchmarks' figures, and their summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import GOALS, RECORDED, Goal, Verdict, markdown, summary


@pytest.mark.parametrize(
    ("goal", "value", "verdict"),
    [
        (Goal("pull", minimum=0.93), 0.929, "met"),
        (Goal("pull", minimum=0.93), 0.92, "missed"),
        (Goal("simulate", maximum=1.3), 1.3, "met"),
        (Goal("simulate", maximum=1.3), 1.31, "missed"),
        (Goal("chaos", maximum=0), 0.0, "met"),
        (Goal("chaos", maximum=0), 1.0, "missed"),
        (Goal("chaos", maximum=0), None, "not measured"),
    ],
)
def test_a_figure_is_compared_to_two_decimal_places(goal: Goal, value: float | None, verdict: Verdict) -> None:
    """Nothing is met that was not measured."""
    assert verdict == goal.verdict(value)


def test_every_goal_names_a_figure_of_its_benchmark() -> None:
    """The recorded results have it."""
    assert [] == [figure.name for figure in summary(*RECORDED) if figure.value is None]


def test_the_first_folder_with_a_benchmark_counts(tmp_path: Path) -> None:
    """Results of other machines are used for the benchmarks that it does not have."""
    for folder, value in (("first", 11.0), ("second", 12.0)):
        (tmp_path / folder).mkdir()
        document = {"figures": {"digest_cpu_gb_per_s": value}, "settings": {}}
        (tmp_path / folder / "digest.json").write_text(json.dumps(document))
    found = {figure.name: figure.value for figure in summary(tmp_path / "first", tmp_path / "second")}
    assert found["digest_cpu_gb_per_s"] == 11.0


def test_a_summary_has_all_goals(tmp_path: Path) -> None:
    """Results of other benchmarks are not needed; figures that miss their goal are bold, quick ones are named."""
    document = {"figures": {"digest_cpu_gb_per_s": 9.5}, "settings": {"quick": True}}
    (tmp_path / "digest.json").write_text(json.dumps(document))
    assert list(GOALS) == [figure.name for figure in summary(tmp_path)]
    assert "| `digest_cpu_gb_per_s` | one core | ≥ 10 | **9.5**, quick form |" in markdown(tmp_path).splitlines()


def test_a_missing_folder_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command states its usage."""
    monkeypatch.setattr("sys.argv", ["figures", "no such folder"])
    assert 2 == figures.main()
    assert 1 == len(capsys.readouterr().err.splitlines())
