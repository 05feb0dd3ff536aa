"""Who may do what by the Helm chart: tokens, roles, the webhook's reach, and who reaches which port."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.admission import admission_app
from planner.hooks.kubernetes.topology import Topology
from rfork.settings import HookSettings
from tests.kube.chart import (
    Document,
    environment,
    named,
    pod_specs,
    rendered,
)
from tests.kube.chart_values import BUNDLE, VALUE_SETS

REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {"uid": "1", "operation": "CREATE", "object": {"kind": "Pod", "metadata": {}, "spec": {}}},
}


def test_tokens_have_roles(helm: Path) -> None:
    """Three tokens that differ: the controller has the operator's, the scaler only looks."""
    objects = rendered(helm, {"keda": {"enabled": True}, "instances": {"namespaces": ["team-a", "team-b"]}})
    held = {key: decoded(value) for key, value in named(objects, "Secret", "rfork-planner")["data"].items()}
    lines = [f"{role} {held[f'{role}-token']}\n" for role in ("operator", "instance", "reader")]
    assert "".join(lines) == held["tokens"]
    assert 4 == len(
        {held[name] for name in ("lease-secret", "operator-token", "instance-token", "reader-token")}
    )
    assert {("team-a", held["instance-token"]), ("team-b", held["instance-token"])} == {
        (each["metadata"]["namespace"], decoded(each["data"]["token"]))
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
        (VALUE_SETS["hooks in the planner"], {"planner": True}),
        (VALUE_SETS["planner alone"], {"planner": False}),
    ],
)
def test_only_who_asks_the_api_server_has_a_token(
    helm: Path, values: dict[str, Any], expected: dict[str, bool]
) -> None:
    """A ServiceAccount's token is mounted where a hook asks the API server, and nowhere else."""
    objects = rendered(helm, values)
    accounts = {
        each["metadata"]["name"].removeprefix("rfork-"): each["automountServiceAccountToken"]
        for each in objects
        if each["kind"] == "ServiceAccount"
    }
    assert expected == accounts
    assert {f"rfork-{name}" for name in expected} == {
        spec["serviceAccountName"] for spec in pod_specs(objects).values()
    }


def test_roles_grant_what_the_hooks_do_and_no_more(helm: Path) -> None:
    """What each hook may do, in full."""
    objects = rendered(helm)
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
            ("", "secrets", "rfork-webhook-tls", "get,update"),
            ("", "secrets", "", "create"),
        ],
        ("ClusterRole", "rfork-controller"): [
            ("", "pods", "", "list,watch,patch"),
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
            {"webhook": {"certificates": {"mode": "certManager"}, "topology": {"enabled": False}}},
            {"rfork-controller"},
        ),
        ({"webhook": {"topology": {"enabled": False}}, "controller": {"enabled": False}}, {"rfork-webhook"}),
        ({"rbac": {"create": False}}, set()),
        (VALUE_SETS["planner alone"], set()),
    ],
)
def test_what_is_not_needed_is_not_granted(helm: Path, values: dict[str, Any], expected: set[str]) -> None:
    """A webhook that keeps no certificate and knows no Nodes may do nothing; roles can be left to others."""
    kinds = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    assert expected == {each["metadata"]["name"] for each in rendered(helm, values) if each["kind"] in kinds}


@pytest.mark.parametrize(
    ("values", "left_out"),
    [
        ({}, ["kube-system"]),
        ({"instances": {"namespaces": ["team-a"]}}, ["kube-system", "rfork-system"]),
        ({"instances": {"namespaces": ["team-a", "rfork-system"]}}, ["kube-system"]),
    ],
)
def test_webhook_sees_pods_of_models(helm: Path, values: dict[str, Any], left_out: list[str]) -> None:
    """Pods with the label, in all namespaces but the system's and, without instances, the release's own."""
    configuration = named(rendered(helm, values), "MutatingWebhookConfiguration", "rfork")
    seen = {
        "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": left_out}]
    }
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


def test_webhook_is_asked_where_it_answers(helm: Path) -> None:
    """The paths of the configuration are routes of the webhook's application."""
    configuration = named(rendered(helm), "MutatingWebhookConfiguration", "rfork")
    asked = {hook["clientConfig"]["service"]["path"] for hook in configuration["webhooks"]}
    hooks = HookSettings()
    app = admission_app(hooks, "http://planner:8700", Topology(hooks), CollectorRegistry())
    with TestClient(app) as client:
        assert {200} == {client.post(path, json=REVIEW).status_code for path in asked}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            VALUE_SETS["webhook elsewhere"],
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
def test_webhook_can_be_elsewhere_or_be_vouched_for_by_others(
    helm: Path, values: dict[str, Any], expected: tuple[Document, str | None]
) -> None:
    """A webhook outside of the cluster is named by URL; cert-manager is told where to write the caBundle."""
    configuration = named(rendered(helm, values), "MutatingWebhookConfiguration", "rfork")
    annotations = configuration["metadata"].get("annotations", {})
    assert expected == (
        configuration["webhooks"][0]["clientConfig"],
        annotations.get("cert-manager.io/inject-ca-from"),
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [(1, 14999), (17001, 18699), (18764, 18799), (18864, 65535)]),
        (
            {
                "networkPolicy": {"instances": {"morePorts": []}},
                "instances": {"peerPort": 1, "httpPort": 65534, "ports": 2},
            },
            [(3, 65533)],
        ),
        (
            {
                "networkPolicy": {
                    "instances": {"morePorts": [{"port": 18690, "endPort": 18800}, {"port": 9}]}
                },
                "instances": {"ports": 1},
            },
            [(1, 8), (10, 18689), (18801, 65535)],
        ),
        ({"networkPolicy": {"instances": {"enginePorts": [8000, 30000]}}}, [(8000, 8000), (30000, 30000)]),
    ],
)
def test_only_instances_reach_what_is_rforks(
    helm: Path, values: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    """Everyone reaches the engines' ports and no port of a peer; instances reach one another's."""
    policy = named(rendered(helm, values), "NetworkPolicy", "rfork-instances")["spec"]
    among, anyone = policy["ingress"]
    ours = {"matchExpressions": [{"key": names.MODEL, "operator": "Exists"}]}
    assert (ours, ["Ingress"], {"from": [{"podSelector": ours}]}) == (
        policy["podSelector"],
        policy["policyTypes"],
        among,
    )
    assert {"ports"} == set(anyone)
    assert expected == [
        (each["port"], each.get("endPort", each["port"]))
        for each in anyone["ports"]
        if each["protocol"] == "TCP"
    ]


def test_instances_of_all_namespaces_reach_one_another(helm: Path) -> None:
    """Each namespace has a policy, which lets the other namespaces' instances in, and who else is named."""
    objects = rendered(helm, VALUE_SETS["many namespaces"])
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


def decoded(value: str) -> str:
    """Text of a Secret's data."""
    return base64.b64decode(value).decode()
