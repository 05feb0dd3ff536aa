"""Permissions of the Helm chart: tokens, roles, the webhook's selectors, and NetworkPolicies."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.webhook import NodeTopology, admission_app
from rfork.settings import KubernetesSettings
from tests.kube.chart import (
    Document,
    environment,
    find_object,
    pod_specs,
    render,
)
from tests.kube.chart_values import BUNDLE, VALUE_SETS

REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {"uid": "1", "operation": "CREATE", "object": {"kind": "Pod", "metadata": {}, "spec": {}}},
}


def test_tokens_have_roles(helm: Path) -> None:
    """The controller has the operator token, the scaler the reader token, and each namespace its own."""
    objects = render(helm, {"keda": {"enabled": True}, "instances": {"namespaces": ["team-a", "team-b"]}})
    secret_data = {
        key: decoded(value) for key, value in find_object(objects, "Secret", "rfork-planner")["data"].items()
    }
    teams = {team: secret_data[f"instance-token-{team}"] for team in ("team-a", "team-b")}
    lines = [f"{role} {secret_data[f'{role}-token']}\n" for role in ("operator", "reader")]
    lines += [f"instance {token} # {team}\n" for team, token in teams.items()]
    assert "".join(lines) == secret_data["tokens"]
    drawn = (
        secret_data["lease-keys"],
        secret_data["operator-token"],
        secret_data["reader-token"],
        *teams.values(),
    )
    assert 5 == len(set(drawn))
    assert teams == {
        each["metadata"]["namespace"]: decoded(each["data"]["token"])
        for each in objects
        if each["kind"] == "Secret" and each["metadata"]["name"] == "rfork-instance"
    }
    assert {
        "rfork-planner": None,
        "rfork-webhook": None,
        "rfork-controller": "<rfork-planner/operator-token>",
        "rfork-scaler": "<rfork-planner/reader-token>",
    } == {name: environment(spec).get("RFORK_TOKEN") for name, spec in pod_specs(objects).items()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"keda": {"enabled": True}},
            {"planner": False, "webhook": True, "controller": True, "scaler": False},
        ),
        (VALUE_SETS["integrations in the planner"], {"planner": True}),
        (VALUE_SETS["planner only"], {"planner": False}),
    ],
)
def test_only_clients_of_the_api_server_have_a_token(
    helm: Path, values: dict[str, Any], expected: dict[str, bool]
) -> None:
    """A ServiceAccount token is mounted only for integrations that use the API server."""
    objects = render(helm, values)
    accounts = {
        each["metadata"]["name"].removeprefix("rfork-"): each["automountServiceAccountToken"]
        for each in objects
        if each["kind"] == "ServiceAccount"
    }
    assert expected == accounts
    assert {f"rfork-{name}" for name in expected} == {
        spec["serviceAccountName"] for spec in pod_specs(objects).values()
    }


def test_roles_are_minimal(helm: Path) -> None:
    """The complete rights of each integration."""
    objects = render(helm)
    granted = {
        (each["kind"], each["metadata"]["name"]): [
            (
                rule["apiGroups"][0],
                ",".join(rule["resources"]),
                ",".join(rule.get("resourceNames", ())),
                ",".join(rule["verbs"]),
            )
            for rule in each["rules"]
        ]
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
    }
    assert {
        ("ClusterRole", "rfork-webhook"): [
            ("admissionregistration.k8s.io", "mutatingwebhookconfigurations", "rfork", "get,patch"),
            ("", "nodes", "", "list,watch"),
        ],
        ("Role", "rfork-webhook"): [
            ("coordination.k8s.io", "leases", "rfork-controller", "get"),
            ("", "secrets", "rfork-webhook-tls", "get,update"),
            ("", "secrets", "", "create"),
        ],
        ("ClusterRole", "rfork-controller"): [
            ("", "pods", "", "list,watch"),
            ("", "pods/status", "", "patch"),
            ("apps", "deployments,statefulsets", "", "list,watch"),
            ("leaderworkerset.x-k8s.io", "leaderworkersets", "", "list,watch"),
            ("", "events", "", "create,patch"),
        ],
        ("Role", "rfork-controller"): [
            ("coordination.k8s.io", "leases", "rfork-controller", "get,update"),
            ("coordination.k8s.io", "leases", "", "create"),
        ],
    } == granted


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {
                "webhook": {"certificates": {"mode": "certManager"}, "topology": {"enabled": False}},
                "instances": {"readinessGate": False},
            },
            {"rfork-controller"},
        ),
        ({"webhook": {"topology": {"enabled": False}}, "controller": {"enabled": False}}, {"rfork-webhook"}),
        ({"rbac": {"create": False}}, set()),
        (VALUE_SETS["planner only"], set()),
    ],
)
def test_unneeded_rights_are_not_granted(helm: Path, values: dict[str, Any], expected: set[str]) -> None:
    """A webhook without its own certificate, topology and gates has no rights; `rbac.create` is respected."""
    kinds = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    assert expected == {each["metadata"]["name"] for each in render(helm, values) if each["kind"] in kinds}


@pytest.mark.parametrize(("enabled", "watched"), [(True, True), (False, False)])
def test_nodes_are_watched_only_if_granted(helm: Path, enabled: bool, watched: bool) -> None:
    """The webhook's setting matches its rights, so that it does not retry forever."""
    objects = render(helm, {"webhook": {"topology": {"enabled": enabled}}})
    topology_setting = environment(pod_specs(objects)["rfork-webhook"])["RFORK_K8S_INJECT_TOPOLOGY"]
    rules = find_object(objects, "ClusterRole", "rfork-webhook")["rules"]
    webhook_names = [hook["name"] for hook in find_object(objects, "MutatingWebhookConfiguration", "rfork")["webhooks"]]
    assert (watched,) * 3 == (
        KubernetesSettings.model_validate({"inject_topology": topology_setting}).inject_topology,
        any("nodes" in rule["resources"] for rule in rules),
        "bindings.rfork.dev" in webhook_names,
    )


@pytest.mark.parametrize("kubernetes", ["1.20.2", "1.21.0", "1.37.0"])
@pytest.mark.parametrize("controller", [True, False])
def test_webhook_and_controller_use_the_same_lease(helm: Path, kubernetes: str, controller: bool) -> None:
    """Both get its name and duration; the webhook may only read it."""
    values = {"controller": {"enabled": controller, "leaseDurationSeconds": 7}}
    objects = render(helm, values, kubernetes=kubernetes)
    environments = [environment(spec) for name, spec in pod_specs(objects).items() if name != "rfork-planner"]
    assert {("rfork-controller", "7")} == {
        (each["RFORK_K8S_LEASE"], each["RFORK_K8S_LEASE_DURATION_S"]) for each in environments
    }
    there = [each["metadata"]["name"] for each in objects if each["kind"] == "Lease"]
    rules = find_object(objects, "Role", "rfork-webhook")["rules"]
    seen = [(rule["resourceNames"], rule["verbs"]) for rule in rules if "leases" in rule["resources"]]
    expected = (["rfork-controller"], [(["rfork-controller"], ["get"])]) if controller else ([], [])
    assert expected == (there, seen)


@pytest.mark.parametrize(
    ("values", "kubernetes", "operator", "namespaces"),
    [
        ({}, "1.37.0", "NotIn", ["kube-system"]),
        ({"instances": {"namespaces": ["team-a"]}}, "1.37.0", "In", ["team-a"]),
        (
            {"instances": {"namespaces": ["team-a", "rfork-system"]}},
            "1.21.0",
            "In",
            ["team-a", "rfork-system"],
        ),
        # Namespaces have no name label in this version.
        ({"instances": {"namespaces": ["team-a"]}}, "1.20.2", "NotIn", ["kube-system", "rfork-system"]),
        (
            {"instances": {"namespaces": ["team-a", "rfork-system"]}},
            "1.20.2",
            "NotIn",
            ["kube-system"],
        ),
    ],
)
def test_the_webhook_selects_pods_of_models(
    helm: Path, values: dict[str, Any], kubernetes: str, operator: str, namespaces: list[str]
) -> None:
    """Pods with the label, in namespaces with a token; by default all but the system's."""
    objects = render(helm, values, kubernetes=kubernetes)
    configuration = find_object(objects, "MutatingWebhookConfiguration", "rfork")
    seen = {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": operator, "values": namespaces}]}
    service = {"name": "rfork-webhook", "namespace": "rfork-system", "port": 443}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "scope": "Namespaced"}
    common = {
        "namespaceSelector": seen,
        "matchPolicy": "Equivalent",
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    assert [
        {
            "name": "pods.rfork.dev",
            "rules": [{**rule, "resources": ["pods"]}],
            "objectSelector": {"matchExpressions": [{"key": names.MODEL, "operator": "Exists"}]},
            "clientConfig": {"service": {**service, "path": "/mutate"}},
            "reinvocationPolicy": "IfNeeded",
            "timeoutSeconds": 5,
            **common,
        },
        {
            "name": "bindings.rfork.dev",
            "rules": [{**rule, "resources": ["pods/binding"]}],
            "clientConfig": {"service": {**service, "path": "/bind"}},
            "reinvocationPolicy": "Never",
            "timeoutSeconds": 2,
            **common,
        },
    ] == configuration["webhooks"]


def test_a_namespace_selector_has_priority(helm: Path) -> None:
    """A namespaceSelector overrides instances.namespaces, for both webhooks."""
    chosen = {"matchLabels": {"team": "a"}}
    values = {"webhook": {"namespaceSelector": chosen}, "instances": {"namespaces": ["team-a"]}}
    configuration = find_object(render(helm, values), "MutatingWebhookConfiguration", "rfork")
    assert [chosen] * 2 == [hook["namespaceSelector"] for hook in configuration["webhooks"]]


def test_webhook_paths_exist(helm: Path) -> None:
    """The paths of the configuration are routes of the webhook's application."""
    configuration = find_object(render(helm), "MutatingWebhookConfiguration", "rfork")
    webhook_paths = {hook["clientConfig"]["service"]["path"] for hook in configuration["webhooks"]}
    settings = KubernetesSettings()
    app = admission_app(settings, "http://planner:8700", NodeTopology(settings), CollectorRegistry())
    with TestClient(app) as client:
        assert {200} == {client.post(path, json=REVIEW).status_code for path in webhook_paths}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            VALUE_SETS["external webhook"],
            ({"url": "https://192.0.2.1:9443/mutate", "caBundle": BUNDLE}, None),
        ),
        (
            {"webhook": {"certificates": {"mode": "certManager"}}},
            (
                {
                    "service": {
                        "name": "rfork-webhook",
                        "namespace": "rfork-system",
                        "path": "/mutate",
                        "port": 443,
                    }
                },
                "rfork-system/rfork-webhook",
            ),
        ),
    ],
)
def test_an_external_webhook_and_cert_manager(
    helm: Path, values: dict[str, Any], expected: tuple[Document, str | None]
) -> None:
    """An external webhook is addressed by URL; cert-manager is configured to write the caBundle."""
    configuration = find_object(render(helm, values), "MutatingWebhookConfiguration", "rfork")
    annotations = configuration["metadata"].get("annotations", {})
    assert expected == (
        configuration["webhooks"][0]["clientConfig"],
        annotations.get("cert-manager.io/inject-ca-from"),
    )


@pytest.mark.parametrize(
    ("guard", "instances", "expected"),
    [
        ({}, {}, [(1, 18699), (18764, 18799), (18864, 65535)]),
        (
            {"extraPorts": [{"port": 15000, "endPort": 17000}]},
            {},
            [(1, 14999), (17001, 18699), (18764, 18799), (18864, 65535)],
        ),
        ({}, {"peerPort": 1, "httpPort": 65534, "portRangeSize": 2}, [(3, 65533)]),
        (
            {"extraPorts": [{"port": 18690, "endPort": 18800}, {"port": 9}]},
            {"portRangeSize": 1},
            [(1, 8), (10, 18689), (18801, 65535)],
        ),
        ({"enginePorts": [8000, 30000]}, {}, [(8000, 8000), (30000, 30000)]),
    ],
)
def test_only_instances_reach_rforks_ports(
    helm: Path, guard: dict[str, Any], instances: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    """With the policy, the engines' ports are open to all, and rfork's ports only to instances."""
    values = {"networkPolicy": {"instances": {"enabled": True, **guard}}, "instances": instances}
    policy = find_object(render(helm, values), "NetworkPolicy", "rfork-instances")["spec"]
    among, any_namespace = policy["ingress"]
    ours = {"matchExpressions": [{"key": names.MODEL, "operator": "Exists"}]}
    assert (ours, ["Ingress"], {"from": [{"podSelector": ours}]}) == (
        policy["podSelector"],
        policy["policyTypes"],
        among,
    )
    assert {"ports"} == set(any_namespace)
    assert expected == [
        (each["port"], each.get("endPort", each["port"]))
        for each in any_namespace["ports"]
        if each["protocol"] == "TCP"
    ]


@pytest.mark.parametrize("values", [{}, {"networkPolicy": {"instances": {"enginePorts": [8000]}}}])
def test_instances_get_a_policy_only_on_request(helm: Path, values: dict[str, Any]) -> None:
    """A policy for Pods outside the chart affects access that others decide on."""
    policies = {each["metadata"]["name"] for each in render(helm, values) if each["kind"] == "NetworkPolicy"}
    assert {"rfork-planner", "rfork-webhook", "rfork-controller"} == policies


def test_instances_of_all_namespaces_reach_one_another(helm: Path) -> None:
    """Each namespace has a policy that allows instances of the other namespaces, and configured peers."""
    objects = render(helm, VALUE_SETS["many namespaces"])
    ours = {"matchExpressions": [{"key": names.MODEL, "operator": "Exists"}]}
    assert {
        namespace: [
            {"podSelector": ours},
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": other}},
                "podSelector": ours,
            },
            {"ipBlock": {"cidr": "10.0.0.0/8"}},
        ]
        for namespace, other in (("team-a", "team-b"), ("team-b", "team-a"))
    } == {
        each["metadata"]["namespace"]: each["spec"]["ingress"][0]["from"]
        for each in objects
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "rfork-instances"
    }


def test_holders_reach_the_planner_and_instances_reach_holders(helm: Path) -> None:
    """The holders' own policy admits instances and other holders; the other policies admit holders."""
    objects = render(helm, VALUE_SETS["holders of two namespaces, TLS"])
    labels = {
        "app.kubernetes.io/name": "rfork", "app.kubernetes.io/instance": "rfork",
        "app.kubernetes.io/component": "holder",
    }  # fmt: skip
    pods = find_object(objects, "DaemonSet", "rfork-holder")
    assert "team-a" == pods["metadata"]["namespace"]
    assert labels.items() <= pods["spec"]["template"]["metadata"]["labels"].items()
    policy = find_object(objects, "NetworkPolicy", "rfork-holder")
    assert "team-a" == policy["metadata"]["namespace"]
    ours = {"matchExpressions": [{"key": names.MODEL, "operator": "Exists"}]}
    assert [
        {
            "from": [
                *(
                    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": team}}, "podSelector": ours}
                    for team in ("team-a", "team-b")
                ),
                {"podSelector": {"matchLabels": labels}},
            ]
        }
    ] == policy["spec"]["ingress"]
    holders = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "team-a"}},
        "podSelector": {"matchLabels": labels},
    }
    assert holders in find_object(objects, "NetworkPolicy", "rfork-planner")["spec"]["ingress"][0]["from"]
    guarded = [
        each for each in objects if (each["kind"], each["metadata"]["name"]) == ("NetworkPolicy", "rfork-instances")
    ]
    assert 2 == len(guarded)
    assert all(holders in each["spec"]["ingress"][0]["from"] for each in guarded)


def decoded(value: str) -> str:
    """Decode a Secret's data."""
    return base64.b64decode(value).decode()
