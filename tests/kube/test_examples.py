"""deploy/examples/kubernetes: documents are valid, consistent, and accepted by the webhook.

No API server is needed. Kubernetes' own kinds are validated strictly against its schemas. For KEDA and
LeaderWorkerSet, the fields that the examples may use are listed here, after their CRDs (keda.sh/v1alpha1,
leaderworkerset.x-k8s.io/v1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from planner.integrations.keda.triggers import parse_trigger
from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.inject import inject
from planner.integrations.kubernetes.pod_request import InjectionRequest, parse_request
from rfork.settings import InstanceSettings, KubernetesSettings, StorageSettings, variables_of

Document = dict[str, Any]
FOLDER = Path(__file__).parents[2] / "deploy" / "examples" / "kubernetes"
FILES = ("lws-tp8.yaml", "rdma.yaml", "s3-irsa.yaml", "same-host.yaml", "sglang-hpa.yaml", "vllm-keda.yaml")
VERSION = "1.37"
HOOK = KubernetesSettings(injection_mode="init", injection_image="rfork:0.1.0")
USERS_ANNOTATIONS = {
    names.MODEL_NAME, names.CONTAINER, names.ENGINE, names.INJECT, names.SNAPSHOT, names.INJECTION_MODE,
    names.SAME_HOST, names.DRAIN_TIMEOUT_S, names.FAIL_IF_NOT_FORKED, names.REPLICA_PODS,
}  # fmt: skip

# Shape of a field: a type, a set of words, a list of one shape, or an object with its fields, of which those
# with ! are required. `...` is checked elsewhere.
Shape = type | set[str] | list[Any] | dict[str, Any] | Any
POLICY = {"type!": {"Percent", "Pods"}, "value!": int, "periodSeconds!": int}
RULES = {"stabilizationWindowSeconds": int, "selectPolicy": {"Max", "Min", "Disabled"}, "policies": [POLICY]}
KNOWN: dict[tuple[str, str], Shape] = {
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef!": {"apiVersion": str, "kind": str, "name!": str, "envSourceContainerName": str},
        "pollingInterval": int,
        "cooldownPeriod": int,
        "minReplicaCount": int,
        "maxReplicaCount": int,
        "triggers!": [
            {
                "type!": {"external", "external-push"},
                "name": str,
                "metricType": {"AverageValue", "Value"},
                "metadata!": ...,
                "authenticationRef": {"name!": str},
            }
        ],
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": RULES, "scaleDown": RULES}}},
    },
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "replicas": int,
        "startupPolicy": {"LeaderCreated", "LeaderReady"},
        "leaderWorkerTemplate!": {
            "size": int,
            "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
            "leaderTemplate": ...,
            "workerTemplate!": ...,
        },
        "rolloutStrategy": {
            "type!": {"RollingUpdate"},
            "rollingUpdateConfiguration": {"maxUnavailable": int, "maxSurge": int, "partition": int},
        },
        "networkConfig": {"subdomainPolicy!": {"Shared", "UniquePerReplica"}},
    },
}


def documents(file: str) -> list[Document]:
    """Return the documents of a file."""
    return list(yaml.safe_load_all((FOLDER / file).read_text("utf-8")))


ALL = [(file, each) for file in FILES for each in documents(file)]


def templates(document: Document) -> Iterator[Document]:
    """Return the Pod templates of a workload."""
    spec: Document = document.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    for found in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")):
        if found is not None:
            yield found


WORKLOADS = [(file, each) for file, each in ALL if list(templates(each))]
TEMPLATES = [(file, each) for file, workload in WORKLOADS for each in templates(workload)]
by_file = pytest.mark.parametrize("file", FILES)
by_template = pytest.mark.parametrize(("file", "template"), TEMPLATES, ids=[file for file, _ in TEMPLATES])


def pod(template: Document) -> Document:
    """Return a Pod of the template, as sent to the API server."""
    metadata = {**template["metadata"], "name": "pod-0", "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def shape_errors(value: object, shape: Shape, at: str = "spec") -> Iterator[str]:
    """Return the violations of the shape."""
    if shape is ...:
        return
    if isinstance(shape, set):
        if value not in shape:
            yield f"{at} is {value}"
    elif isinstance(shape, list):
        for index, item in enumerate(value if isinstance(value, list) else [None]):
            yield from shape_errors(item, shape[0], f"{at}[{index}]")
    elif isinstance(shape, dict):
        fields = {name.rstrip("!"): inner for name, inner in shape.items()}
        there = value if isinstance(value, dict) else {}
        yield from (f"{at} lacks {name}" for name in shape if name[-1] == "!" and name[:-1] not in there)
        yield from (f"{at}.{name} is unknown" for name in there if name not in fields)
        for name in there.keys() & fields.keys():
            yield from shape_errors(there[name], fields[name], f"{at}.{name}")
    elif type(value) is not shape:
        yield f"{at} is {value!r}"


def test_all_examples_are_covered() -> None:
    """Each file of the directory is tested, and its first line describes it."""
    assert list(FILES) == sorted(file.name for file in FOLDER.iterdir())
    assert [] == [file for file in FILES if not re.match(r"# \w.*[.:]\n", (FOLDER / file).read_text("utf-8"))]


@pytest.mark.parametrize(("file", "document"), ALL, ids=[f"{file}-{each['kind']}" for file, each in ALL])
def test_each_document_is_valid(file: str, document: Document) -> None:
    """By Kubernetes' schemas, or by the known fields of the kind."""
    api_type = document["apiVersion"], document["kind"]
    if api_type in KNOWN:
        assert {"apiVersion", "kind", "metadata", "spec"} == set(document)
        assert [] == list(shape_errors(document["spec"], KNOWN[api_type]))
    else:
        kubernetes_validate.validate(document, VERSION, strict=True)


@by_template
def test_each_template_is_a_valid_pod(file: str, template: Document) -> None:
    """By Kubernetes' schema, including those in a LeaderWorkerSet."""
    kubernetes_validate.validate(pod(template), VERSION, strict=True)


@by_file
def test_labels_and_annotations(file: str) -> None:
    """The model is named on the workload and on each template; only user annotations are used."""
    for _, workload in (each for each in WORKLOADS if each[0] == file):
        model = workload["metadata"]["labels"][names.MODEL]
        for template in templates(workload):
            assert model == template["metadata"]["labels"][names.MODEL]
            ours = {name for name in template["metadata"]["annotations"] if name.startswith(names.PREFIX)}
            assert set() == ours - USERS_ANNOTATIONS
        if (selector := workload["spec"].get("selector")) is not None:
            (template,) = templates(workload)
            assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()


@by_template
def test_each_server_has_probes_and_limits(file: str, template: Document) -> None:
    """Probes of existing ports, requests and limits, and an image with a fixed version."""
    (container,) = template["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe")} <= ports
    assert {"requests", "limits"} == container["resources"].keys()
    assert re.fullmatch(r"[a-z./-]+:v?\d+\.\d+\.\d+", container["image"])


@by_file
def test_references_are_valid(file: str) -> None:
    """Services select a template and one of its ports; scalers name a workload."""
    found = documents(file)
    servers = [template for workload in found for template in templates(workload)]
    scaled = {(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in found}
    accounts = {each["metadata"]["name"] for each in found if each["kind"] == "ServiceAccount"}
    for document in found:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            chosen = [each for each in servers if spec["selector"].items() <= each["metadata"]["labels"].items()]
            assert 1 == len(chosen)
            names_of = {port["name"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= names_of
        if (target := spec.get("scaleTargetRef")) is not None:
            assert (target["apiVersion"], target["kind"], target["name"]) in scaled
    used = {each["spec"].get("serviceAccountName") for each in servers}
    assert used - {None} == accounts


@by_template
def test_variables_are_settings(file: str, template: Document) -> None:
    """Each RFORK_* is a setting of rfork, and none is set by the webhook."""
    known = {
        variable
        for settings_class in (InstanceSettings, StorageSettings)
        for name in settings_class.model_fields
        for variable in variables_of(settings_class, name)
    }
    provided = {each["name"] for each in template["spec"]["containers"][0].get("env", ())}
    assert set() == {name for name in provided if name.startswith("RFORK_")} - known


@by_template
def test_injection_has_no_notes(file: str, template: Document) -> None:
    """Each Pod is injected without a note; the result is valid and has the load format."""
    original = pod(template)
    request = parse_request(original)
    assert isinstance(request, InjectionRequest), request
    made, notes = inject(original, request, HOOK, "http://rfork-planner.rfork.svc:8700")
    assert () == notes
    kubernetes_validate.validate(made, VERSION, strict=True)
    assert made["metadata"]["annotations"][names.INJECTED]
    container = made["spec"]["containers"][0]
    assert ["--load-format", "rfork"] == [*container.get("command", ()), *container.get("args", ())][-2:]
    uses_init_container = template["metadata"]["annotations"][names.INJECTION_MODE] == "init"
    assert uses_init_container == bool(made["spec"].get("initContainers"))


def test_each_example_shows_its_subject() -> None:
    """The injected Pods have what the file is about."""
    pods = {}
    for file, template in TEMPLATES:
        request = parse_request(pod(template))
        assert isinstance(request, InjectionRequest)
        made, _ = inject(pod(template), request, HOOK, "http://rfork-planner.rfork.svc:8700")
        pods[file] = made["spec"]
    environment = {each["name"]: each.get("value") for each in pods["s3-irsa.yaml"]["containers"][0]["env"]}
    assert "s3://example-models/qwen3-14b/" == environment["RFORK_SNAPSHOT"]
    assert {"path": "/run/rfork", "type": "DirectoryOrCreate"} in [
        each.get("hostPath") for each in pods["same-host.yaml"]["volumes"]
    ]
    assert pods["rdma.yaml"]["hostNetwork"] is True
    assert {"add": ["IPC_LOCK"]} == pods["rdma.yaml"]["containers"][0]["securityContext"]["capabilities"]
    (group,) = (each for _, each in ALL if each["kind"] == "LeaderWorkerSet")
    servers = [each["spec"]["containers"][0] for each in templates(group)]
    assert 2 == group["spec"]["leaderWorkerTemplate"]["size"]
    assert ["4", "4"] == [server["resources"]["limits"]["nvidia.com/gpu"] for server in servers]
    assert all({"--tp-size=8", "--nnodes=2"} <= set(server["args"]) for server in servers)


def test_triggers_are_valid() -> None:
    """The scaler accepts each trigger; its model is the Pods' model, its port the engine's."""
    found = documents("vllm-keda.yaml")
    scaled = next(each for each in found if each["kind"] == "ScaledObject")
    (template,) = (template for each in found for template in templates(each))
    request = parse_request(pod(template))
    assert isinstance(request, InjectionRequest)
    triggers = [(each["type"], parse_trigger(each["metadata"])) for each in scaled["spec"]["triggers"]]
    assert [("external-push", "waiting"), ("external", "kv_cache"), ("external", "expected")] == [
        (trigger_type, trigger.metric) for trigger_type, trigger in triggers
    ]
    assert {request.model} == {trigger.model for _, trigger in triggers}
    port = template["spec"]["containers"][0]["ports"][0]["containerPort"]
    assert {port, 0} == {trigger.port for _, trigger in triggers}
    metadata = [each["metadata"] for each in scaled["spec"]["triggers"]]
    assert {str} == {type(value) for each in metadata for value in each.values()}
    addresses = {each["scalerAddress"] for each in metadata}
    assert {f"rfork-scaler.rfork.svc:{KubernetesSettings().scaler_port}"} == addresses
