"""Runs the documentation's blocks that need a cluster, verbatim, on a real API server.

Each test replaces the release's name and namespaces with its own, and docker with a stub that prints its
arguments.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.models.apps_v1 import DeploymentSpec
from lightkube.models.core_v1 import Container, PodSpec, PodTemplateSpec
from lightkube.models.meta_v1 import LabelSelector, ObjectMeta
from lightkube.resources.admissionregistration_v1 import MutatingWebhookConfiguration
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Namespace

from planner.integrations.kubernetes import names
from tests.docs.pages import PageBlock
from tests.docs.run_by import blocks_run_by
from tests.kube.control_plane import ControlPlane

ROOT = Path(__file__).parents[2]
DOCKER = """#!/bin/sh
if [ "$1" = build ]; then
    while [ "$1" != -f ]; do shift; done
    test -f "$2"
fi
echo docker: "$@"
"""


@pytest.mark.parametrize("block", blocks_run_by(__file__), ids=lambda block: block.location)
def test_the_documented_installation(
    block: PageBlock,
    plane: ControlPlane,
    admin: Client,
    helm: Path,
    kubectl: Path,
    namespace: str,
    tmp_path: Path,
) -> None:
    """The release exists, with the webhook; if the page labels a workload, its Pods will fork."""
    for name, program in (("helm", helm), ("kubectl", kubectl)):
        (tmp_path / name).symlink_to(program)
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    own = f"{namespace}-rfork"
    admin.create(workload("llama", namespace), namespace=namespace)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join((str(tmp_path), os.environ["PATH"])),
        "KUBECONFIG": str(plane.kubeconfig),
        "HOME": str(tmp_path),
    }
    script = block.text.replace("helm install rfork", f"helm install {namespace}")
    script = script.replace("--namespace rfork", f"--namespace {own}")
    script = re.sub(r"\{(models|inference)\}", f"{{{namespace}}}", script).replace("-n models", f"-n {namespace}")
    command = ["bash", "--noprofile", "--norc", "-e", "-c", script]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stderr + done.stdout
        assert {f"{own}-planner", f"{own}-webhook", f"{own}-controller"} == {
            each.metadata.name for each in admin.list(Deployment, namespace=own) if each.metadata
        }
        images = {
            container.image
            for each in admin.list(Deployment, namespace=own)
            if each.spec and each.spec.template.spec
            for container in each.spec.template.spec.containers
        }
        (repository,) = re.findall(r"image\.repository=(\S+)", block.text)
        assert {repository} == {str(image).rpartition(":")[0] for image in images}
        assert (admin.get(MutatingWebhookConfiguration, own).webhooks or []) != []
        found = admin.get(Deployment, "llama", namespace=namespace)
        assert found.metadata is not None
        assert found.spec is not None
        assert found.spec.template.metadata is not None
        labels = [(each.labels or {}).get(names.MODEL) for each in (found.metadata, found.spec.template.metadata)]
        assert ["llama" if "kubectl" in block.text else None] * 2 == labels
    finally:
        subprocess.run(
            [helm, "uninstall", namespace, "--namespace", own],
            env=environment, capture_output=True, check=False,
        )  # fmt: skip
        admin.delete(Namespace, own)


def workload(name: str, namespace: str) -> Deployment:
    """Return an unlabelled Deployment that serves a model."""
    labels = {"app": name}
    pod = PodSpec(containers=[Container(name="engine", image="none")])
    return Deployment(
        metadata=ObjectMeta(name=name, namespace=namespace),
        spec=DeploymentSpec(
            replicas=0,
            selector=LabelSelector(matchLabels=labels),
            template=PodTemplateSpec(metadata=ObjectMeta(labels=labels), spec=pod),
        ),
    )
