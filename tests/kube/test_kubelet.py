"""The stand-in kubelet: a Deployment runs as processes, and ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lightkube import Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod, Secret

from tests.kube.control_plane import ControlPlane
from tests.kube.kubelet import Kubelet

TOKEN = {"token": "s3cret"}
SERVER = """
import http.server, os, signal, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
def ended(*_):
    print("SIGTERM", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
print(*(os.environ[name] for name in ("POD", "WHERE", "TOKEN", "COLOUR")), *sys.argv[1:], flush=True)
http.server.HTTPServer((os.environ["ADDRESS"], 18080), Answers).serve_forever()
"""


def field(name: str, path: str) -> dict[str, object]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def deployment(replicas: int) -> dict[str, object]:
    container = {
        "name": "server",
        "image": "none",
        "command": ["python", "-c", SERVER],
        "args": ["--pod=$(POD)", "$$(POD)", "$(UNDEFINED)"],
        "env": [
            field("NAME", "metadata.name"),
            field("SPACE", "metadata.namespace"),
            {"name": "POD", "value": "$(SPACE)/$(NAME)"},
            field("WHERE", "spec.nodeName"),
            field("ADDRESS", "status.podIP"),
            field("COLOUR", "metadata.annotations['example.com/colour']"),
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}}},
            {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "no", "key": "no", "optional": True}}},
        ],
        "ports": [{"name": "http", "containerPort": 18080}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}},
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", 'echo "preStop of $POD" >&2']}}},
    }
    template = {
        "metadata": {"labels": {"app": "it"}, "annotations": {"example.com/colour": "red"}},
        "spec": {
            "terminationGracePeriodSeconds": 20,
            "readinessGates": [{"conditionType": "example.com/open"}],
            "initContainers": [
                {"name": "rfork-files", "image": "none", "command": ["false"]},
                {"name": "first", "image": "none", "command": ["echo", "first"]},
            ],
            "containers": [container],
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "it"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "it"}}, "template": template},
    }


def until(predicate: Callable[[], bool], what: str) -> None:
    """Poll until the predicate is true. Raises TimeoutError."""
    deadline = time.monotonic() + 60
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out waiting for {what}")
        time.sleep(0.1)


def test_a_deployment_runs_scales_and_stops(plane: ControlPlane, admin: Client, namespace: str, tmp_path: Path) -> None:
    """Two replicas are Ready once their gates open; one ends, then both, each with its preStop hook."""

    def pods() -> list[Pod]:
        return list(admin.list(Pod, namespace=namespace))

    def condition_is_true(pod: Pod, condition_type: str) -> bool:
        conditions = (pod.status.conditions if pod.status else None) or []
        return any(each.type == condition_type and each.status == "True" for each in conditions)

    def ready() -> int:
        status = admin.get(Deployment, "it", namespace=namespace).status
        return (status.readyReplicas if status else None) or 0

    def scale(replicas: int) -> None:
        admin.patch(Deployment, "it", {"spec": {"replicas": replicas}}, namespace=namespace)

    with Kubelet(plane, namespace, tmp_path) as kubelet:
        admin.create(Secret(metadata=ObjectMeta(name="token", namespace=namespace), stringData=TOKEN))
        with plane.client() as api:
            made = api.post(f"/apis/apps/v1/namespaces/{namespace}/deployments", json=deployment(2))
            assert 201 == made.status_code, made.text
        until(
            lambda: sum(condition_is_true(pod, "ContainersReady") for pod in pods()) == 2,
            "ready containers",
        )
        both = pods()
        assert 0 == ready()
        assert set(kubelet.nodes) == {pod.spec.nodeName for pod in both if pod.spec}
        for pod in both:
            name = pod.metadata.name if pod.metadata else ""
            node = pod.spec.nodeName if pod.spec else ""
            expected_output = f"{namespace}/{name} {node} s3cret red --pod={namespace}/{name} $(POD) $(UNDEFINED)"
            assert ["first", expected_output] == kubelet.log(name or "").splitlines()[:2]
            gate = {"status": {"conditions": [{"type": "example.com/open", "status": "True"}]}}
            admin.patch(Pod.Status, name or "", gate, namespace=namespace)
        until(lambda: ready() == 2, "two ready Pods")
        scale(1)
        until(lambda: len(pods()) == 1, "one Pod")
        assert 1 == ready()
        scale(0)
        until(lambda: not pods(), "no Pods")
        for pod in both:
            name = (pod.metadata.name if pod.metadata else "") or ""
            assert [f"preStop of {namespace}/{name}", "SIGTERM"] == kubelet.log(name).splitlines()[-2:]
