"""Values of the Helm chart: documented, bounded, and rejected if inconsistent."""

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


def test_values_and_schema_agree() -> None:
    """Each value's comment in values.yaml is its description in the schema, and the defaults agree."""
    assert {value.path: value for value in values_of_schema(schema())} == {
        value.path: value for value in values_of_chart()
    }
    assert [] == [value.path for value in values_of_chart() if not value.comment]


def test_schema_rejects_unknown_names() -> None:
    """No object of the schema accepts unknown names, except where users choose them."""
    assert [] == [path for path in open_objects(schema()) if path != "global"]


def test_readme_has_the_values() -> None:
    """The README has the table that `python -m tests.kube.chart` prints."""
    assert table() in (CHART / "README.md").read_text()


def test_planner_settings_are_complete() -> None:
    """planner.settings accepts the planner's settings except those that the chart sets itself."""
    own = {"allowed_hosts", "bind", "port", "token", "tokens_file", "lease_keys", "store", "integrations"}
    described = schema()["properties"]["planner"]["properties"]["settings"]["properties"]
    assert set(PlannerSettings.model_fields) - own == set(described)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"planer": {}}, "additional properties 'planer' not allowed"),
        ({"planner": {"replica": 2}}, "at '/planner': additional properties 'replica' not allowed"),
        ({"planner": {"replicas": "two"}}, "at '/planner/replicas': got string, want integer"),
        ({"planner": {"settings": {"lease_ttl": 3}}}, "additional properties 'lease_ttl' not allowed"),
        ({"planner": {"integrations": ["webhok"]}}, "value must be one of 'webhook', 'controller', 'scaler'"),
        ({"instances": {"injectionMode": "initContainer"}}, "value must be one of 'none', 'init', 'image'"),
        ({"webhook": {"timeoutSeconds": 30}}, "at '/webhook/timeoutSeconds': maximum: got 30, want 5"),
        ({"webhook": {"url": "http://webhook"}}, "at '/webhook/url'"),
        ({"logs": {"level": "trace"}}, "value must be one of 'debug', 'info', 'warning', 'error'"),
        ({"planner": {"replicas": 2}}, "planner.replicas is 2, but the store is in memory"),
        ({"planner": {"enabled": False}}, "set planner.url to the planner that the integrations and instances use"),
        (
            {"planner": {"enabled": False, "url": "http://planner"}},
            "set planner.auth.existingSecret to the Secret with that planner's operator-token",
        ),
        ({"planner": {"integrations": ["scaler"]}}, "planner.integrations names scaler, but keda.enabled is false"),
        (
            {"planner": {"tls": {"enabled": True}}},
            "planner.tls.enabled: set planner.tls.existingSecret or planner.tls.certManager.enabled",
        ),
        (
            {"planner": {"tls": {"enabled": True, "existingSecret": "t"}, "integrations": ["controller"]}},
            "set planner.tls.clientCertificates too",
        ),
        ({"webhook": {"certificates": {"mode": "secret"}}}, "set webhook.certificates.existingSecret"),
        (
            {"webhook": {"url": "https://webhook"}, "planner": {"integrations": ["webhook"]}},
            "choose one of the two",
        ),
        ({"instances": {"portRangeSize": 128}}, "their ranges overlap"),
        ({"holder": {"enabled": True}}, "set holder.image to an image with Python and torch"),
        ({"holder": {"memoryGiB": "64GB"}}, "at '/holder/memoryGiB': got string, want integer"),
    ],
)
def test_invalid_values_are_rejected_with_a_reason(helm: Path, values: dict[str, Any], message: str) -> None:
    """Typos, values out of bounds, and inconsistent values are rejected."""
    with pytest.raises(HelmFailed, match=re.escape(message)):
        render(helm, values)


@pytest.mark.parametrize("kubernetes", ["1.20.2", "1.34.9"])
def test_image_volumes_are_rejected_before_kubernetes_1_35(helm: Path, kubernetes: str) -> None:
    """Such a cluster would reject every Pod of a model, or let it wait forever."""
    with pytest.raises(HelmFailed, match=re.escape(f"need Kubernetes 1.35, and this is v{kubernetes}")):
        render(helm, {"instances": {"injectionMode": "image"}}, kubernetes=kubernetes)


def open_objects(node: Document, path: str = "") -> list[str]:
    """Return the paths of objects in a schema that list properties but accept others."""
    found = []
    if node.get("type") == "object" and node.get("additionalProperties", True) is True and "properties" in node:
        found.append(path or "root")
    for name, below in node.get("properties", {}).items():
        found += open_objects(below, f"{path}.{name}" if path else name)
    return found
