"""Rollouts, canaries and rollbacks on a real API server: a fork never gets weights of another version."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from lightkube import Client
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod

from planner.integrations.kubernetes import names
from rfork.schema import source_type
from tests.kube.control_plane import ControlPlane
from tests.kube.installation import Component, Installation, installed
from tests.kube.kubelet import Kubelet
from tests.kube.model_server import write_checkpoint
from tests.kube.test_kubelet import until
from tests.kube.test_scaling import MEBIBYTES, NODES, PORT, SERVER, NamespaceView, deployment, scale

MODEL: Final = "llama"
COMPONENTS: Final[tuple[Component, ...]] = ("planner", "controller", "webhook")


@pytest.fixture
def fleet(plane: ControlPlane, admin: Client, helm: Path, namespace: str, tmp_path: Path) -> Iterator[Installation]:
    """The chart with all processes. The planner waits long enough for processes on a busy machine."""
    with installed(plane, admin, helm, namespace, tmp_path) as made:
        made.values["planner"]["settings"] = {"scaleup_wait_s": 4}
        for component in COMPONENTS:
            made.start(component)
        yield made


@pytest.fixture
def planner(fleet: Installation) -> Iterator[httpx.Client]:
    """A client of the planner with an operator token."""
    with fleet.client() as client:
        yield client


@pytest.fixture
def seen(plane: ControlPlane, admin: Client, namespace: str, tmp_path: Path) -> Iterator[NamespaceView]:
    """View of a namespace whose Pods run."""
    with Kubelet(plane, namespace, tmp_path / "pods", nodes=NODES):
        yield NamespaceView(admin, namespace)


def server_command(folder: Path) -> list[str]:
    """Return the command of a server that loads a checkpoint."""
    return [sys.executable, str(SERVER), str(PORT), str(MEBIBYTES), "0", str(folder)]


def uids(seen: NamespaceView) -> set[str]:
    return {str(pod.metadata.uid) for pod in seen.pods() if pod.metadata}


def wait_serving(
    seen: NamespaceView, app: str, replicas: int, digest: str, *, without: AbstractSet[str] = frozenset()
) -> None:
    """Wait until this many Pods are Ready with these weights, and those in `without` are deleted."""

    def done() -> bool:
        pods = [pod for pod in seen.pods() if pod.metadata and (pod.metadata.labels or {})["app"] == app]
        names_of = {pod.metadata.name for pod in pods if pod.metadata}
        if uids(seen) & without or len(pods) != replicas or not names_of <= set(seen.ready()):
            return False
        return all(digest_of(pod) == digest for pod in pods)

    until(done, f"{app} to serve these weights")


def wait_other_pods_removed(planner: httpx.Client, pods: AbstractSet[str]) -> None:
    """Wait until the planner knows no other Pods: draining Pods are still sources."""
    until(lambda: versions(planner).keys() <= pods, "old Pods to end")


def digest_of(pod: Pod) -> str:
    address = pod.status.podIP if pod.status else None
    try:
        return str(httpx.get(f"http://{address}:{PORT}/digest", timeout=10).json()["digest"])
    except httpx.HTTPError:
        return ""  # it is terminating


def versions(planner: httpx.Client) -> dict[str, str]:
    """Return the version that the planner knows of each Pod, by its UID."""
    views = planner.get("/v1/instances").raise_for_status().json()["items"]
    return {view["report"]["instance_id"][:36]: view["version"] for view in views}


def sources(planner: httpx.Client, pods: set[str]) -> dict[str, set[str]]:
    """Return for each Pod the UIDs of the Pods that it read weights from; empty if it loaded from storage."""
    found: dict[str, set[str]] = {}
    for fork in planner.get("/v1/forks", params={"limit": 1000}).raise_for_status().json()["items"]:
        uid = fork["instance_id"][:36]
        if uid in pods and fork["finish"] is not None:
            served_by = fork["finish"]["sources"]
            found[uid] = {name[:36] for name in served_by if source_type(name) == "peer"}
    return found


def patch_container(admin: Client, namespace: str, name: str, container: dict[str, Any]) -> None:
    """Change the container in the Pod template, which starts a rollout."""
    template = {"spec": {"containers": [{"name": "server", **container}]}}
    admin.patch(Deployment, name, {"spec": {"template": template}}, namespace=namespace)


@pytest.mark.slow
def test_a_rollout_loads_new_weights_once(
    fleet: Installation,
    seen: NamespaceView,
    planner: httpx.Client,
    admin: Client,
    namespace: str,
    tmp_path: Path,
) -> None:
    """The first new Pod loads its files, the others fork from it; the same on the rollback."""
    old, new = (write_checkpoint(tmp_path / name, MEBIBYTES, seed) for seed, name in enumerate(("v1", "v2")))
    admin.create(deployment(MODEL, 2, server_command(tmp_path / "v1"), engine="pytorch"), namespace=namespace)
    wait_serving(seen, MODEL, 2, old)
    for folder, expected in (("v2", new), ("v1", old)):
        before = uids(seen)
        patch_container(admin, namespace, MODEL, {"command": server_command(tmp_path / folder)})
        wait_serving(seen, MODEL, 2, expected, without=before)
        after = uids(seen)
        wait_other_pods_removed(planner, after)
        read = sources(planner, after)
        assert after == read.keys()
        assert 1 == sum(not peers for peers in read.values())
        assert set().union(*read.values()) < after
    until(lambda: len(seen.events("FirstOfVersion")) == 2, "Events for two Pods that loaded from storage")
    for _, message in seen.events("FirstOfVersion"):
        assert message.startswith("loaded from storage: first of version files:")
        assert "instances serve files:" in message
    assert [] == seen.events("FellBack")
    assert [] == seen.events("MixedVersions")


@pytest.mark.slow
def test_a_rollout_with_the_same_weights_forks_from_old_pods(
    fleet: Installation,
    seen: NamespaceView,
    planner: httpx.Client,
    admin: Client,
    namespace: str,
    tmp_path: Path,
) -> None:
    """Only an environment variable changes: no Pod loads its files again."""
    expected = write_checkpoint(tmp_path / "v1", MEBIBYTES, 1)
    admin.create(deployment(MODEL, 1, server_command(tmp_path / "v1"), engine="pytorch"), namespace=namespace)
    wait_serving(seen, MODEL, 1, expected)
    before = uids(seen)
    patch_container(admin, namespace, MODEL, {"env": [{"name": "LOG_LEVEL", "value": "debug"}]})
    wait_serving(seen, MODEL, 1, expected, without=before)
    (new,) = uids(seen)
    assert {new: before} == sources(planner, {new})
    until(lambda: bool(seen.events("Forked")), "the Event of the fork")
    ((_, message),) = seen.events("Forked")
    assert ", version files:" in message


@pytest.mark.slow
def test_a_canary_shares_weights_only_with_its_own_version(
    fleet: Installation,
    seen: NamespaceView,
    planner: httpx.Client,
    admin: Client,
    namespace: str,
    tmp_path: Path,
) -> None:
    """Two versions that Pods state, concurrently under one model, are each scaled up."""
    digests: dict[str, str] = {}
    members: dict[str, set[str]] = {}
    for seed, version in enumerate(("stable", "canary")):
        digests[version] = write_checkpoint(tmp_path / version, MEBIBYTES, seed)
        made = deployment(
            version,
            1,
            server_command(tmp_path / version),
            engine="pytorch",
            version=version,
            model_name=MODEL,
        )
        before = uids(seen)
        admin.create(made, namespace=namespace)
        wait_serving(seen, version, 1, digests[version])
        members[version] = uids(seen) - before
    for version in digests:
        before = uids(seen)
        scale(admin, namespace, version, 2)
        wait_serving(seen, version, 2, digests[version])
        (new,) = uids(seen) - before
        assert {new: members[version]} == sources(planner, {new})
        expected = f"1 replica of version {version} is expected: they fork from 1 seed"
        assert (version, expected) in seen.events("ScaleUp")
    stated = {
        str(pod.metadata.uid): (pod.metadata.annotations or {})[names.VERSION] for pod in seen.pods() if pod.metadata
    }
    assert stated == versions(planner)
    assert [] == seen.events("MixedVersions")
