"""The rendered Helm chart, without a cluster: objects, Pods, processes."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import pytest

from planner.integrations.kubernetes.inject import (
    FILES_IN_IMAGE,
    FILES_VOLUME,
    SOCKET_DIR,
    SOCKETS_VOLUME,
    files_init_container,
    files_volume,
)
from planner.integrations.kubernetes.inject import environment as environment_of_instance
from planner.metrics import Metrics
from rfork import settings
from rfork.settings import InstanceSettings, KubernetesSettings, PlannerSettings, TlsSettings, variables
from rfork.transport.shared_memory.memory_budget import RESERVE_DIVISOR
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
from tests.unit.planner.integrations.kubernetes.injected_pods import request_of
from tests.unit.planner.integrations.kubernetes.pod_documents import pod

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.25.0", "1.37.0")
"""The oldest version with schemas, and the latest."""
FOREIGN = ("cert-manager.io/", "monitoring.coreos.com/")
"""API groups without schemas in Kubernetes."""


def test_lint_passes(helm: Path) -> None:
    """`helm lint --strict` accepts the chart."""
    assert "1 chart(s) linted, 0 chart(s) failed" in helm_run(helm, "lint", "--strict", str(CHART))


@pytest.mark.parametrize("kubernetes", VERSIONS)
@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_every_object_is_valid(helm: Path, values: dict[str, Any], kubernetes: str) -> None:
    """For all sets of values, each object matches its kind's schema and has the right namespace."""
    objects = render(helm, values, kubernetes=kubernetes)
    for each in objects:
        if not each["apiVersion"].startswith(FOREIGN):
            check(json.dumps(each), kubernetes)
    keys = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert sorted(set(keys), key=str) == sorted(keys, key=str)
    assert [] == [key for key in keys if (key[1] is None) != (key[0] in CLUSTER_WIDE)]


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_pods_meet_the_restricted_standard(helm: Path, values: dict[str, Any]) -> None:
    """Every Pod meets the Pod Security Standard `restricted`, unless the host network was requested, but a holder:
    it shares the node's socket directory with the instances, and is root as they are.
    """
    expected = ["hostNetwork"] if values.get("webhook", {}).get("hostNetwork") else []
    if values.get("holder", {}).get("enabled"):
        expected = ["volume rfork-sockets", "runAsNonRoot", "runAsUser", *expected]
    specs = pod_specs(render(helm, values))
    assert expected == [broken for spec in specs.values() for broken in beyond_restricted(spec)]
    # Service links are off: Services of the namespace must not become settings of rfork.
    assert {False} == {spec["enableServiceLinks"] for spec in specs.values()}


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_processes_accept_their_variables(helm: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each RFORK_* variable of a Pod is a setting, and its process accepts the value."""
    settings_classes = (PlannerSettings, KubernetesSettings, InstanceSettings, TlsSettings)
    known = set(variables())
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
    """A planner without Redis is never run twice; several planners share Redis."""
    planner = find_object(render(helm, values), "Deployment", "rfork-planner")
    assert (replicas, strategy) == (planner["spec"]["replicas"], planner["spec"]["strategy"]["type"])
    assert store == environment(planner["spec"]["template"]["spec"]).get("RFORK_PLANNER_STORE")


def test_integrations_in_the_planner(helm: Path) -> None:
    """With all integrations in the planner there is one Deployment, and all Services select it."""
    objects = render(helm, VALUE_SETS["integrations in the planner"])
    assert ["rfork-planner"] == list(pod_specs(objects))
    ports = {each["name"] for each in pod_specs(objects)["rfork-planner"]["containers"][0]["ports"]}
    services = [each["spec"] for each in objects if each["kind"] == "Service"]
    assert ({"planner"}, set()) == (
        {service["selector"]["app.kubernetes.io/component"] for service in services},
        {port["targetPort"] for service in services for port in service["ports"]} - ports,
    )


def test_old_clusters_get_supported_objects(helm: Path) -> None:
    """On 1.20, budgets are policy/v1beta1, and no NetworkPolicy has port ranges, which would be dropped."""
    objects = render(helm, VALUE_SETS["instance network policy"], kubernetes="1.20.2")
    assert {"policy/v1beta1"} == {each["apiVersion"] for each in objects if each["kind"] == "PodDisruptionBudget"}
    assert "endPort" not in json.dumps(objects)
    assert "rfork-instances" not in {each["metadata"]["name"] for each in objects}
    named_ports = {"networkPolicy": {"instances": {"enabled": True, "enginePorts": [8000]}}}
    assert find_object(render(helm, named_ports, kubernetes="1.20.2"), "NetworkPolicy", "rfork-instances")


@pytest.mark.parametrize(
    ("mode", "command"),
    [
        ("init", ["/bin/sh", "/opt/rfork/bin/rfork"]),
        ("image", ["/bin/sh", f"/opt/rfork{FILES_IN_IMAGE}/bin/rfork"]),
        ("none", ["rfork"]),
    ],
)
def test_a_holder_gets_rforks_files_like_an_instance(
    helm: Path, mode: Literal["init", "image", "none"], command: list[str]
) -> None:
    """With the same volume and init container as an injected Pod."""
    values = {**VALUE_SETS["holders"], "instances": {"injectionMode": mode}}
    spec = pod_specs(render(helm, values))["rfork-holder"]
    (container,) = spec["containers"]
    assert command == container["command"]
    assert ["hold", "--memory=64GiB", "--models=org/llama", "--models=qwen"] == container["args"]
    if mode == "init":
        assert [files_init_container("rfork:0.1.0", runs_as_root=True)] == spec["initContainers"]
    else:
        assert "initContainers" not in spec
    volumes = [each for each in spec["volumes"] if each["name"] == FILES_VOLUME]
    assert volumes == ([files_volume(mode, "rfork:0.1.0", image_volumes=True)] if mode != "none" else [])


def test_holder_and_instances_share_a_directory_of_the_node(helm: Path) -> None:
    """The same directory as in the Pods that the webhook modifies, at the same path."""
    objects = render(helm, VALUE_SETS["holders"])
    specs = pod_specs(objects)
    assert "true" == environment(specs["rfork-webhook"])["RFORK_K8S_SAME_HOST"]
    volume = {"name": SOCKETS_VOLUME, "hostPath": {"path": SOCKET_DIR, "type": "DirectoryOrCreate"}}
    assert volume in specs["rfork-holder"]["volumes"]
    assert {"name": SOCKETS_VOLUME, "mountPath": SOCKET_DIR} in specs["rfork-holder"]["containers"][0]["volumeMounts"]
    assert SOCKET_DIR == environment(specs["rfork-holder"])["RFORK_UNIX_SOCKET_DIR"]


def test_a_holder_has_the_variables_of_an_instance(helm: Path) -> None:
    """It is a source like an instance: all variables that the webhook sets, but those of a model and a replica."""
    values = {**VALUE_SETS["holders"], "instances": {"tlsSecret": "tls"}}
    holder = environment(pod_specs(render(helm, values))["rfork-holder"])
    request = request_of(pod())
    assert request is not None
    url = "http://rfork-planner.rfork-system.svc:8700"
    injected = environment_of_instance(request, KubernetesSettings(tls_secret="tls"), url, same_host=True, drains=True)
    expected = {each["name"]: each for each in injected}
    of_replica = {"RFORK_MODEL", "RFORK_REPLICA", "RFORK_POD_NAME", "RFORK_POD_NAMESPACE"}
    assert of_replica == expected.keys() - holder.keys()
    assert "$(POD_NAMESPACE)/$(POD_NAME)" == holder["RFORK_POD"]
    assert url == holder["RFORK_PLANNER"]
    assert "<spec.nodeName>" == holder["RFORK_NODE_NAME"]
    for name, variable in expected.items():
        if "fieldRef" in variable.get("valueFrom", {}) and name in holder:
            assert f"<{variable['valueFrom']['fieldRef']['fieldPath']}>" == holder[name]


@pytest.mark.parametrize(("memory", "overhead", "expected"), [(1, 1, "3Gi"), (64, 2, "71Gi"), (1500, 8, "1609Gi")])
def test_the_memory_limit_of_a_holder_covers_its_weights(helm: Path, memory: int, overhead: int, expected: str) -> None:
    """The kernel would otherwise kill a full holder; the request reserves the memory. A process that creates memory
    files leaves a part of the limit free.
    """
    limit = int(expected.removesuffix("Gi"))
    assert memory + overhead <= limit - limit / RESERVE_DIVISOR
    values = {"holder": {**VALUE_SETS["holders"]["holder"], "memoryGiB": memory, "overheadGiB": overhead}}
    (container,) = pod_specs(render(helm, values))["rfork-holder"]["containers"]
    assert expected == container["resources"]["limits"]["memory"]
    assert expected == container["resources"]["requests"]["memory"]
    assert f"--memory={memory}GiB" in container["args"]


def test_a_holder_drains_within_its_grace_period(helm: Path) -> None:
    """Its readers finish before the kubelet kills it."""
    spec = pod_specs(render(helm, VALUE_SETS["holders"]))["rfork-holder"]
    assert float(environment(spec)["RFORK_DRAIN_TIMEOUT_S"]) < spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("init", "rfork:0.1.0")),
        ({"image": {"repository": "registry/rfork", "tag": "7"}}, ("init", "registry/rfork:7")),
        ({"image": {"digest": f"sha256:{'0' * 64}"}}, ("init", f"rfork@sha256:{'0' * 64}")),
        ({"instances": {"injectionImage": "files:1"}}, ("init", "files:1")),
        # A Pod's own annotation may still request files.
        ({"instances": {"injectionMode": "none"}}, ("none", "rfork:0.1.0")),
        ({"instances": {"injectionMode": "image"}}, ("image", "rfork:0.1.0")),
    ],
)
def test_files_come_from_the_charts_image(helm: Path, values: dict[str, Any], expected: tuple[str, str]) -> None:
    """By default the image of the chart's processes also provides rfork's files for instances."""
    environment_variables = environment(pod_specs(render(helm, values))["rfork-webhook"])
    assert expected == (
        environment_variables["RFORK_K8S_INJECTION_MODE"],
        environment_variables["RFORK_K8S_INJECTION_IMAGE"],
    )


@pytest.mark.parametrize(
    ("kubernetes", "expected"),
    [("1.20.2", "false"), ("1.34.9", "false"), ("v1.35.0-gke.1", "true"), ("1.37.0", "true")],
)
def test_image_volumes_need_kubernetes_1_35(helm: Path, kubernetes: str, expected: str) -> None:
    """On older clusters, a Pod with an image volume would be rejected or wait forever."""
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
    """Every Pod is limited to Linux Nodes, in addition to the configured labels."""
    specs = pod_specs(render(helm, {"pods": {"nodeSelector": selected}, "keda": {"enabled": True}}))
    assert dict.fromkeys(specs, expected) == {name: spec["nodeSelector"] for name, spec in specs.items()}


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_each_variable_is_set_once(helm: Path, values: dict[str, Any]) -> None:
    """Server-side apply rejects duplicate variables; integrations in one process share them."""
    for spec in pod_specs(render(helm, values)).values():
        variable_names = [each["name"] for each in spec["containers"][0]["env"]]
        assert sorted(set(variable_names)) == sorted(variable_names)


def test_probes_with_mutual_tls(helm: Path) -> None:
    """The kubelet has no client certificate: with mTLS, the planner's probe only checks the port."""
    tls = {"planner": {"tls": {"enabled": True, "existingSecret": "t"}}}
    mutual = {"planner": {"tls": {**tls["planner"]["tls"], "clientCertificates": True}}}
    probes = [
        pod_specs(render(helm, values))["rfork-planner"]["containers"][0]["readinessProbe"] for values in (tls, mutual)
    ]
    assert {"path": "/readyz", "port": "http", "scheme": "HTTPS"} == probes[0]["httpGet"]
    assert {"port": "http"} == probes[1]["tcpSocket"]


def test_the_dashboard_uses_existing_metrics() -> None:
    """Each metric of the dashboard exists in the planner or an integration; panels do not overlap."""
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
    """Validate an object. Cached, because many sets of values share objects. Raises ValidationError."""
    kubernetes_validate.validate(json.loads(document), kubernetes, strict=True)


def beyond_restricted(spec: Document) -> list[str]:
    """Return the violations of the standard `restricted` (kubernetes.io, "Pod Security Standards")."""
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
            "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem")
            is True,  # our own rules, in addition to the standard
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", ())),
        }
        broken += [name for name, met in checks.items() if not met]
    return broken
