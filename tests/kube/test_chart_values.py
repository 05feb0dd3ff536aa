"""The values of the Helm chart: described, bounded, and refused where they do not go together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rfork.settings import PlannerSettings
from tests.kube.chart import (
    CHART,
    Document,
    HelmFailed,
    render,
    schema,
    table,
    values_of_chart,
    values_of_schema,
)


def test_values_and_schema_say_the_same() -> None:
    """values.yaml has a comment for each value: the schema's description; and the defaults agree."""
    assert {value.path: value for value in values_of_schema(schema())} == {
        value.path: value for value in values_of_chart()
    }
    assert [] == [value.path for value in values_of_chart() if not value.comment]


def test_schema_knows_every_name() -> None:
    """No object of the schema takes names that it does not know, but where users choose the names."""
    assert [] == [path for path in open_objects(schema()) if path != "global"]


def test_readme_has_the_values() -> None:
    """The README's table is what `python -m tests.kube.chart` prints."""
    assert table() in (CHART / "README.md").read_text()


def test_settings_of_the_planner_are_known() -> None:
    """planner.settings takes the planner's options but for those that the chart sets by itself."""
    own = {
        *("allowed_hosts", "bind", "port", "token", "tokens", "secret", "store", "hooks"),
        *("log_json", "log_level"),
    }
    described = schema()["properties"]["planner"]["properties"]["settings"]["properties"]
    assert set(PlannerSettings.model_fields) - own == set(described)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"planer": {}}, "additional properties 'planer' not allowed"),
        ({"planner": {"replica": 2}}, "at '/planner': additional properties 'replica' not allowed"),
        ({"planner": {"replicas": "two"}}, "at '/planner/replicas': got string, want integer"),
        ({"planner": {"settings": {"lease_ttl": 3}}}, "additional properties 'lease_ttl' not allowed"),
        ({"planner": {"hooks": ["webhok"]}}, "value must be one of 'webhook', 'controller', 'scaler'"),
        ({"instances": {"files": "initContainer"}}, "value must be one of 'none', 'init', 'image'"),
        ({"webhook": {"timeoutSeconds": 30}}, "at '/webhook/timeoutSeconds': maximum: got 30, want 5"),
        ({"webhook": {"url": "http://hook"}}, "at '/webhook/url'"),
        ({"logs": {"level": "trace"}}, "value must be one of 'debug', 'info', 'warning', 'error'"),
        ({"planner": {"replicas": 2}}, "planner.replicas is 2, but the store is in memory"),
        ({"planner": {"enabled": False}}, "set planner.url to the planner that the hooks and instances use"),
        (
            {"planner": {"enabled": False, "url": "http://planner"}},
            "name the Secret with that planner's operator-token in planner.auth.existingSecret",
        ),
        ({"planner": {"hooks": ["scaler"]}}, "planner.integrations names scaler, but keda.enabled is false"),
        (
            {"planner": {"tls": {"enabled": True}}},
            "planner.tls.enabled: say where its certificate comes from",
        ),
        (
            {"planner": {"tls": {"enabled": True, "existingSecret": "t"}, "hooks": ["controller"]}},
            "set planner.tls.clientCertificates too",
        ),
        ({"webhook": {"certificates": {"mode": "secret"}}}, "name it in webhook.certificates.existingSecret"),
        (
            {"webhook": {"url": "https://hook"}, "planner": {"hooks": ["webhook"]}},
            "choose one of the two",
        ),
        ({"instances": {"ports": 128}}, "their ranges overlap"),
    ],
)
def test_what_cannot_be_is_refused_in_words(helm: Path, values: dict[str, Any], message: str) -> None:
    """A typo, a value out of bounds, and values that do not go together are refused, and it says why."""
    with pytest.raises(HelmFailed, match=re.escape(message)):
        render(helm, values)


@pytest.mark.parametrize("kubernetes", ["1.20.2", "1.34.9"])
def test_volumes_of_images_are_refused_where_there_are_none(helm: Path, kubernetes: str) -> None:
    """A cluster that would refuse every Pod of a model, or let it wait for ever, gets no such release."""
    with pytest.raises(HelmFailed, match=re.escape(f"need Kubernetes 1.35, and this is v{kubernetes}")):
        render(helm, {"instances": {"files": "image"}}, kubernetes=kubernetes)


def open_objects(node: Document, path: str = "") -> list[str]:
    """Objects of a schema that list properties, or nothing, and yet take others."""
    found = []
    if node.get("type") == "object" and node.get("additionalProperties", True) is True and "properties" in node:
        found.append(path or "the top")
    for name, below in node.get("properties", {}).items():
        found += open_objects(below, f"{path}.{name}" if path else name)
    return found
