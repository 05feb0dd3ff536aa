"""Log lines, errors, metrics, settings, problems and alerts on the operating page exist in the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from docs.site.reference import metrics_page, settings_page
from rfork.settings import SETTINGS_CLASSES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operating.md"
RULES = ROOT / "deploy" / "helm" / "rfork" / "rules"
COMPOSED_PHRASES = {"No space left on device"}
"""Phrases that other programs or the logger compose."""


@cache
def source() -> str:
    """Return the code of both packages, with strings of several lines joined."""
    files = [*sorted((ROOT / "rfork").rglob("*.py")), *sorted((ROOT / "planner").rglob("*.py"))]
    text = "\n".join(file.read_text() for file in files)
    return re.sub(r'"\n\s*f?"', "", text)


def failures() -> Iterator[tuple[str, str]]:
    """Yield each quoted symptom of the failure tables, with its row."""
    table = PAGE.read_text().partition("## Failures")[2].partition("## Alerts")[0]
    for row in re.findall(r"^\| (.*?) \| .* \| .* \|$", table, re.MULTILINE):
        for quoted in re.findall(r"`([^`]+)`", row):
            yield quoted, row


@cache
def variables() -> dict[str, str]:
    """Return the default of each setting, by its variable."""
    options = (each for settings_class in SETTINGS_CLASSES for each in settings_page.options(settings_class))
    return {each.variable: each.default.strip("`") for each in options}


@cache
def metrics() -> frozenset[str]:
    """Return the names of all metrics."""
    found = metrics_page.registries().values()
    return frozenset(metric.name for registry in found for metric in metrics_page.metrics(registry))


@pytest.mark.parametrize("quoted", sorted({quoted for quoted, _ in failures()} - COMPOSED_PHRASES))
def test_quoted_symptoms_exist_in_the_code(quoted: str) -> None:
    """Every log line, error, problem and setting that a failure table quotes exists in the code."""
    name = quoted.partition("{")[0]
    known = name in metrics() or name.partition("=")[0] in variables() or quoted in source()
    assert known, quoted


def test_variables_are_settings() -> None:
    """Every variable on the page belongs to a setting."""
    documented_variables = set(re.findall(r"`(RFORK_[A-Z_]*[A-Z])(?:=[^`]*)?`", PAGE.read_text()))
    assert set() == documented_variables - variables().keys()


def test_defaults_equal_those_of_the_code() -> None:
    """A number in brackets after a variable is its default."""
    documented_defaults = re.findall(r"`(RFORK_[A-Z_]+)` \(([0-9.]+)\)", PAGE.read_text())
    assert documented_defaults
    assert [(name, variables()[name]) for name, _ in documented_defaults] == documented_defaults


def test_named_tests_exist() -> None:
    """Every group of failures names existing tests that cause them."""
    groups = PAGE.read_text().partition("## Failures")[2].partition("## Alerts")[0].split("\n### ")[1:]
    for group in groups:
        named = re.findall(r"<!-- shown by: (.*) -->", group)
        assert 1 == len(named), group[:40]
        assert [] == [name for name in named[0].split() if not (ROOT / name).exists()]


def alerts() -> list[str]:
    """Return the names of all alerts of the chart."""
    found = []
    for file in sorted(RULES.glob("*.y*ml")):
        for group in yaml.safe_load(file.read_text())["groups"]:
            found += [rule["alert"] for rule in group["rules"] if "alert" in rule]
    return found


def kebab(name: str) -> str:
    """Return `RforkPlannerAbsent` as `rfork-planner-absent`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()


def test_each_alert_has_a_section() -> None:
    """Each section has an alert, and an anchor for runbook links."""
    page = PAGE.read_text()
    for file in RULES.glob("*.y*ml"):
        for link in re.findall(r"runbook_url: \S+#(\S+)", file.read_text()):
            assert f'<a id="{link}"></a>' in page
    documented_alerts = re.findall(r'^<a id="alert-([a-z0-9-]+)"></a>\n\n## Alert: (\w+)$', page, re.MULTILINE)
    assert sorted(alerts()) == sorted(name for _, name in documented_alerts)
    assert [kebab(name) for _, name in documented_alerts] == [anchor for anchor, _ in documented_alerts]
