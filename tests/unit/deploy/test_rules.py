"""The chart's alerts and dashboard: alerts fire when they should, and all queried metrics exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from planner.metrics import Metrics

ROOT: Final = Path(__file__).parents[3]
CHART: Final = ROOT / "deploy" / "helm" / "rfork"
RULES: Final = CHART / "rules" / "rfork.yaml"
CASES: Final = Path(__file__).parent / "rules_test.yaml"
SELECTOR: Final = re.compile(r"\b(rfork_[a-z_]+)(?:\{([^}]*)\})?")
MATCHER: Final = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
ADDED: Final = {"namespace", "pod", "le", "job", "instance"}
"""Labels that a scrape or a histogram adds."""


def promtool(*arguments: str) -> None:
    """Run promtool; skips the test if it is not installed."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("NO promtool ON PATH (apt-get install prometheus): the alert rules are NOT tested")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


def alerts() -> Iterator[dict[str, Any]]:
    """Return every alert of the chart."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def expressions() -> Iterator[str]:
    """Return the PromQL expressions of alerts and panels."""
    for alert in alerts():
        yield alert["expr"]
    for panel in json.loads((CHART / "dashboards" / "rfork.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def exported_labels() -> dict[str, dict[str, set[str]]]:
    """Return the values of each label of each sample that a planner exports before any event."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(Metrics().exposition((), ()).decode()):
        if not family.samples:  # its labels are known only after the first event
            found[f"{family.name}_total"] = {}
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def kebab(name: str) -> str:
    """Convert ``RforkNoSeedLeft`` to ``rfork-no-seed-left``."""
    return re.sub(r"(?<=.)([A-Z])", r"-\1", name).lower()


def test_prometheus_reads_the_rules() -> None:
    """promtool accepts the rules as Prometheus would at startup."""
    promtool("check", "rules", str(RULES))


def test_alerts_fire_when_they_should() -> None:
    """All fire in a fleet with every problem, and none in a healthy one."""
    promtool("test", "rules", str(CASES))


def test_a_late_end_of_a_lost_fork_counts_once(tmp_path: Path) -> None:
    """Eight forked, two of which were given up earlier, and two fell back: four in five."""
    panels = json.loads((CHART / "dashboards" / "rfork.json").read_text())["panels"]
    (panel,) = [each for each in panels if each["title"] == "Forked share of finished forks"]
    expression = panel["targets"][0]["expr"].replace("$namespace", ".*").replace("$__range", "10m")
    ended = {"forked": 8, "abandoned": 2, "fallback": 2, "failed": 0, "interrupted": 0}
    series = [
        {
            "series": f'rfork_planner_forks_total{{namespace="ai",outcome="{outcome}"}}',
            "values": f"0 {count}x20",
        }
        for outcome, count in ended.items()
    ]
    expected = {"expr": expression, "eval_time": "10m", "exp_samples": [{"value": 0.8}]}
    case = {"interval": "1m", "input_series": series, "promql_expr_test": [expected]}
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": [case]}))
    promtool("test", "rules", str(file))


def test_every_alert_is_tested() -> None:
    """Each alert's name appears in the cases that promtool runs."""
    cases = CASES.read_text()
    assert [] == [alert["alert"] for alert in alerts() if alert["alert"] not in cases]


def test_every_alert_has_instructions() -> None:
    """It has a severity, a summary, a description, and a link to its section of the operating page."""
    page = (ROOT / "docs" / "operating.md").read_text()
    anchors = {alert["alert"]: f"alert-{kebab(alert['alert'])}" for alert in alerts()}
    for alert in alerts():
        assert {"summary", "description", "runbook_url"} == set(alert["annotations"])
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["runbook_url"].endswith(f"/operating.html#{anchors[alert['alert']]}")
    assert [] == [anchor for anchor in anchors.values() if f'id="{anchor}"' not in page]


def test_every_queried_metric_exists() -> None:
    """The planner's metrics exist with the queried labels and values; those of integrations exist by name."""
    known = exported_labels()
    # Integrations need a cluster to export theirs.
    hooks = {
        name
        for path in (ROOT / "planner/integrations").rglob("*.py")
        for name in re.findall(r'"(rfork_[a-z_]+)"', path.read_text())
    }
    missing: list[str] = []
    for expression in expressions():
        for name, selector in SELECTOR.findall(expression):
            if not name.startswith("rfork_planner_"):
                if re.sub(r"_(total|bucket|sum|count)$", "", name) not in hooks:
                    missing.append(name)
                continue
            if name not in known:
                missing.append(name)
                continue
            for label, operator, value in MATCHER.findall(selector):
                if label in ADDED or value.startswith("$"):
                    continue
                values = known[name].get(label, set())
                wanted = value.split("|") if "~" in operator else [value]
                missing += [f"{name}{{{label}={each}}}" for each in wanted if each not in values]
    assert [] == missing
