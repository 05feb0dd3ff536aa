"""The Helm chart as it is rendered, away from any cluster: objects, Pods, processes."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from planner.metrics import Metrics
from rfork import settings
from rfork.settings import InstanceSettings, KubernetesSettings, PlannerSettings, TlsSettings
from tests.kube.chart import (
    CHART,
    CLUSTER_WIDE,
    Document,
    environment,
    find_object,
    helm_run,
    pod_specs,
    render,
)
from tests.kube.chart_values import REDIS, VALUE_SETS

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.25.0", "1.37.0")
"""The oldest that there are schemas of, and the latest."""
FOREIGN = ("cert-manager.io/", "monitoring.coreos.com/")
"""API groups that Kubernetes itself has no schemas of."""


def test_lint_finds_nothing(helm: Path) -> None:
    """`helm lint --strict` takes the chart."""
    assert "1 chart(s) linted, 0 chart(s) failed" in helm_run(helm, "lint", "--strict", str(CHART))


@pytest.mark.parametrize("kubernetes", VERSIONS)
@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_every_object_is_one_of_kubernetes(helm: Path, values: dict[str, Any], kubernetes: str) -> None:
    """Whatever the values, each object has the fields of its kind and no others, and lies where it should."""
    objects = render(helm, values, kubernetes=kubernetes)
    for each in objects:
        if not each["apiVersion"].startswith(FOREIGN):
            check(json.dumps(each), kubernetes)
    keys = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert sorted(set(keys), key=str) == sorted(keys, key=str)
    assert [] == [key for key in keys if (key[1] is None) != (key[0] in CLUSTER_WIDE)]


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_pods_meet_the_restricted_standard(helm: Path, values: dict[str, Any]) -> None:
    """Every Pod passes the Pod Security Standard `restricted`, but for a host network that was asked for."""
    expected = ["hostNetwork"] if values.get("webhook", {}).get("hostNetwork") else []
    specs = pod_specs(render(helm, values))
    assert expected == [broken for spec in specs.values() for broken in beyond_restricted(spec)]
    # And no Service of the namespace becomes an option of rfork's.
    assert {False} == {spec["enableServiceLinks"] for spec in specs.values()}


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_processes_take_their_variables(helm: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each RFORK_* variable that a Pod gets is an option, and each process can be told what it gets."""
    settings_classes = (PlannerSettings, KubernetesSettings, InstanceSettings, TlsSettings)
    known = {
        f"{settings_class.model_config.get('env_prefix')}{field.upper()}"
        for settings_class in settings_classes
        for field in settings_class.model_fields
    }
    for spec in pod_specs(render(helm, values)).values():
        environment_variables = environment(spec)
        assert set() == {name for name in environment_variables if name.startswith("RFORK_")} - known
        with monkeypatch.context() as patched:
            for name, value in environment_variables.items():
                patched.setenv(name, "redis://redis" if name == "RFORK_PLANNER_STORE" else value)
            for settings_class in settings_classes:
                settings.load(settings_class)


@pytest.mark.parametrize(
    ("values", "replicas", "strategy", "store"),
    [
        ({}, 1, "Recreate", None),
        (REDIS, 2, "RollingUpdate", "<rfork-planner-store/url>"),
        ({"planner": {**REDIS["planner"], "replicas": 5}}, 5, "RollingUpdate", "<rfork-planner-store/url>"),
        (VALUE_SETS["redis in a Secret"], 2, "RollingUpdate", "<redis/u>"),
        (VALUE_SETS["redis of a new format"], 2, "Recreate", "<rfork-planner-store/url>"),
    ],
)
def test_planners_share_a_store(
    helm: Path, values: dict[str, Any], replicas: int, strategy: str, store: str | None
) -> None:
    """One planner with its own memory, never two at a time; or several that share Redis."""
    planner = find_object(render(helm, values), "Deployment", "rfork-planner")
    assert (replicas, strategy) == (planner["spec"]["replicas"], planner["spec"]["strategy"]["type"])
    assert store == environment(planner["spec"]["template"]["spec"]).get("RFORK_PLANNER_STORE")


def test_hooks_in_the_planner_are_reached_there(helm: Path) -> None:
    """With hooks in the planner's process there is one Deployment, and all Services lead to it."""
    objects = render(helm, VALUE_SETS["hooks in the planner"])
    assert ["rfork-planner"] == list(pod_specs(objects))
    ports = {each["name"] for each in pod_specs(objects)["rfork-planner"]["containers"][0]["ports"]}
    services = [each["spec"] for each in objects if each["kind"] == "Service"]
    assert ({"planner"}, set()) == (
        {service["selector"]["app.kubernetes.io/component"] for service in services},
        {port["targetPort"] for service in services for port in service["ports"]} - ports,
    )


def test_older_clusters_get_what_they_know(helm: Path) -> None:
    """On 1.20 budgets are of policy/v1beta1, and no policy has a range of ports that would be dropped."""
    objects = render(helm, VALUE_SETS["instances guarded"], kubernetes="1.20.2")
    assert {"policy/v1beta1"} == {each["apiVersion"] for each in objects if each["kind"] == "PodDisruptionBudget"}
    assert "endPort" not in json.dumps(objects)
    assert "rfork-instances" not in {each["metadata"]["name"] for each in objects}
    named_ports = {"networkPolicy": {"instances": {"enabled": True, "enginePorts": [8000]}}}
    assert find_object(render(helm, named_ports, kubernetes="1.20.2"), "NetworkPolicy", "rfork-instances")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("init", "rfork:0.1.0")),
        ({"image": {"repository": "registry/rfork", "tag": "7"}}, ("init", "registry/rfork:7")),
        ({"image": {"digest": f"sha256:{'0' * 64}"}}, ("init", f"rfork@sha256:{'0' * 64}")),
        ({"instances": {"image": "files:1"}}, ("init", "files:1")),
        # A Pod's own annotation may still ask for files.
        ({"instances": {"files": "none"}}, ("none", "rfork:0.1.0")),
        ({"instances": {"files": "image"}}, ("image", "rfork:0.1.0")),
    ],
)
def test_files_come_from_the_charts_own_image(helm: Path, values: dict[str, Any], expected: tuple[str, str]) -> None:
    """Unless another is named, the image of the chart's processes brings rfork's files to instances."""
    environment_variables = environment(pod_specs(render(helm, values))["rfork-webhook"])
    assert expected == (
        environment_variables["RFORK_K8S_INJECTION_MODE"],
        environment_variables["RFORK_K8S_INJECTION_IMAGE"],
    )


@pytest.mark.parametrize(
    ("kubernetes", "expected"),
    [("1.20.2", "false"), ("1.34.9", "false"), ("v1.35.0-gke.1", "true"), ("1.37.0", "true")],
)
def test_webhook_knows_whether_images_are_mounted(helm: Path, kubernetes: str, expected: str) -> None:
    """Volumes of images are there from 1.35 on; before, a Pod with one would be refused, or wait for ever."""
    environment_variables = environment(pod_specs(render(helm, kubernetes=kubernetes))["rfork-webhook"])
    assert expected == environment_variables["RFORK_K8S_IMAGE_VOLUMES"]


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ({}, {"kubernetes.io/os": "linux"}),
        ({"role": "control"}, {"kubernetes.io/os": "linux", "role": "control"}),
        ({"kubernetes.io/os": "other"}, {"kubernetes.io/os": "other"}),
    ],
)
def test_pods_run_on_linux(helm: Path, selected: dict[str, str], expected: dict[str, str]) -> None:
    """Every Pod keeps to Nodes of Linux, and to those that were asked for."""
    specs = pod_specs(render(helm, {"pods": {"nodeSelector": selected}, "keda": {"enabled": True}}))
    assert dict.fromkeys(specs, expected) == {name: spec["nodeSelector"] for name, spec in specs.items()}


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_each_variable_is_told_once(helm: Path, values: dict[str, Any]) -> None:
    """No container has a variable twice, which a server-side apply refuses; hooks of one process share it."""
    for spec in pod_specs(render(helm, values)).values():
        variable_names = [each["name"] for each in spec["containers"][0]["env"]]
        assert sorted(set(variable_names)) == sorted(variable_names)


def test_probes_with_mutual_tls(helm: Path) -> None:
    """The kubelet shows no certificate: where callers must, the planner is only seen to listen."""
    tls = {"planner": {"tls": {"enabled": True, "existingSecret": "t"}}}
    mutual = {"planner": {"tls": {**tls["planner"]["tls"], "clientCertificates": True}}}
    probes = [
        pod_specs(render(helm, values))["rfork-planner"]["containers"][0]["readinessProbe"] for values in (tls, mutual)
    ]
    assert {"path": "/readyz", "port": "http", "scheme": "HTTPS"} == probes[0]["httpGet"]
    assert {"port": "http"} == probes[1]["tcpSocket"]


def test_dashboard_asks_for_metrics_that_there_are() -> None:
    """Each metric of the dashboard is one that the planner or a hook tells; no two panels overlap."""
    dashboard = json.loads((CHART / "dashboards" / "rfork.json").read_text())
    dashboard_metrics = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"\brfork_[a-z_]+", target["expr"])
    }
    exported_metrics = {family.name for family in Metrics().registry.collect()}
    for path in (ROOT / "planner/integrations").rglob("*.py"):
        exported_metrics |= set(re.findall(r'"(rfork_[a-z_]+)"', path.read_text()))
    assert set() == {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in dashboard_metrics} - exported_metrics
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for box in [panel["gridPos"]]
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    ]
    assert len(set(cells)) == len(cells)


@functools.lru_cache(maxsize=1024)
def check(document: str, kubernetes: str) -> None:
    """Validate an object; most are the same in many sets of values. Raises ValidationError."""
    kubernetes_validate.validate(json.loads(document), kubernetes, strict=True)


def beyond_restricted(spec: Document) -> list[str]:
    """What of a Pod the standard `restricted` refuses (kubernetes.io, "Pod Security Standards")."""
    pod = spec.get("securityContext", {})
    broken = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    allowed_volume_types = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    broken += [f"volume {each['name']}" for each in spec.get("volumes", ()) if not set(each) & allowed_volume_types]
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        own = container.get("securityContext", {})
        checks = {
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "privileged": not own.get("privileged"),
            "capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "runAsNonRoot": own.get("runAsNonRoot", pod.get("runAsNonRoot")) is True,
            "runAsUser": own.get("runAsUser", pod.get("runAsUser")) != 0,
            "seccompProfile": own.get("seccompProfile", pod.get("seccompProfile")) == {"type": "RuntimeDefault"},
            "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,  # ours, beyond the standard
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", ())),
        }
        broken += [name for name, met in checks.items() if not met]
    return broken
