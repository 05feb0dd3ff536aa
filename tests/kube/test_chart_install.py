"""The Helm chart on a real API server: installed, upgraded after its integrations wrote data, uninstalled."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightkube import ApiError, Client, KubeConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.admissionregistration_v1 import MutatingWebhookConfiguration
from lightkube.resources.apps_v1 import DaemonSet, Deployment
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import ConfigMap, Namespace, Pod, Secret, Service, ServiceAccount
from lightkube.resources.networking_v1 import NetworkPolicy
from lightkube.resources.rbac_authorization_v1 import ClusterRole, ClusterRoleBinding, Role, RoleBinding

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import ClusterUnavailable, open_server
from planner.integrations.kubernetes.certificates import CertificateStore
from planner.integrations.kubernetes.cluster import connect
from rfork.settings import KubernetesSettings
from tests.kube.chart import CHART, Document, HelmFailed, helm_run
from tests.kube.chart_values import VALUE_SETS
from tests.kube.control_plane import ControlPlane
from tests.kube.watch_recorder import observe_pod, pod

CLUSTER_WIDE: tuple[type[Any], ...] = (ClusterRole, ClusterRoleBinding, MutatingWebhookConfiguration)
NAMESPACED: tuple[type[Any], ...] = (
    ConfigMap,
    DaemonSet,
    Deployment,
    Lease,
    NetworkPolicy,
    Role,
    RoleBinding,
    Secret,
    Service,
    ServiceAccount,
)
ELSEWHERE = (
    "KEDA, monitored",
    "cert-manager",
    "cert-manager's own issuer, mTLS",
    "many namespaces",
    "holders of two namespaces, TLS",
)
"""Sets of values that need kinds or namespaces that the cluster lacks."""
KEY, CERTIFICATE, AUTHORITY = b"a key", b"a certificate", b"an authority"


@dataclass(frozen=True)
class HelmRelease:
    """A release of the chart in its own namespace, which also is its name."""

    helm: Path
    plane: ControlPlane
    admin: Client
    namespace: str

    @property
    def fullname(self) -> str:
        """Prefix of the names of its objects."""
        return f"{self.namespace}-rfork"

    def run(self, verb: str, *words: str, values: Document | None = None) -> str:
        """Run helm VERB. Raises HelmFailed."""
        chart = () if verb == "uninstall" else (str(CHART),)
        return helm_run(
            self.helm, verb, self.namespace, *chart, "--namespace", self.namespace, *words,
            values=values, kubeconfig=self.plane.kubeconfig,
        )  # fmt: skip

    def objects(self) -> list[str]:
        """Return its objects as KIND/NAME, including cluster-scoped ones."""
        found = [
            f"{kind.__name__}/{each.metadata.name}"
            for kind in NAMESPACED
            for each in self.admin.list(kind, namespace=self.namespace)
            if each.metadata and each.metadata.name not in ("default", "kube-root-ca.crt")
        ]
        return found + [
            f"{kind.__name__}/{each.metadata.name}"
            for kind in CLUSTER_WIDE
            for each in self.admin.list(kind, labels={"app.kubernetes.io/instance": self.namespace})
            if each.metadata
        ]

    def secret(self, name: str) -> dict[str, str]:
        """Return the data of a Secret, in base64."""
        return dict(self.admin.get(Secret, name, namespace=self.namespace).data or {})

    def bundles(self) -> list[str | None]:
        """Return the caBundle of each of its webhooks, in base64."""
        found = self.admin.get(MutatingWebhookConfiguration, self.fullname).webhooks or []
        return [hook.clientConfig.caBundle or None for hook in found]

    def settings(self, component: str) -> KubernetesSettings:
        """Return the settings of a Pod of that component, with its ServiceAccount's rights."""
        return KubernetesSettings(
            namespace=self.namespace,
            kubeconfig=self.plane.kubeconfig_for(self.namespace, f"{self.fullname}-{component}"),
        )


@pytest.fixture
def release(helm: Path, plane: ControlPlane, admin: Client, namespace: str) -> Iterator[HelmRelease]:
    """A release that is not installed yet; removed at the end."""
    here = HelmRelease(helm, plane, admin, namespace)
    yield here
    for kind in CLUSTER_WIDE:
        for each in admin.list(kind, labels={"app.kubernetes.io/instance": namespace}):
            if each.metadata and each.metadata.name:
                admin.delete(kind, each.metadata.name)


def test_install_creates_all_objects_and_prints_notes(release: HelmRelease) -> None:
    """All objects exist after an install, including Deployments, and the notes list the next steps."""
    output = release.run("install")
    deployments = release.admin.list(Deployment, namespace=release.namespace)
    name = release.fullname
    assert {f"{name}-planner": 1, f"{name}-webhook": 2, f"{name}-controller": 2} == {
        each.metadata.name: each.spec.replicas for each in deployments if each.metadata and each.spec
    }
    assert [None, None] == release.bundles()
    assert '"rfork.dev/model": "MODEL"' in output
    assert "<no value>" not in output
    policy = f"NetworkPolicy/{name}-instances"
    assert policy not in release.objects()

    output = release.run("upgrade", values={"networkPolicy": {"instances": {"enabled": True}}})
    # Kubernetes 1.20 has no port ranges: the notes warn that the instances get no policy.
    guarded = policy in release.objects()
    assert (guarded, not guarded) == (
        "without support for `endPort` the engines become unreachable" in output,
        "instances got no NetworkPolicy" in output,
    )


def test_a_dry_run_on_the_server_creates_nothing(release: HelmRelease) -> None:
    """`--dry-run=server` validates every object on the API server."""
    values = {"keda": {"enabled": True}, "planner": {"store": {"redis": {"url": "redis://redis:6379/0"}}}}
    assert "kind: MutatingWebhookConfiguration" in release.run("install", "--dry-run=server", values=values)
    assert [] == release.objects()


@pytest.mark.parametrize("server_side", ["true", "false"])
async def test_an_upgrade_keeps_data_of_the_integrations(release: HelmRelease, server_side: str) -> None:
    """An upgrade applies changed values; tokens, certificate, caBundle and leader stay as they are.

    The data is written with the rights that the chart grants.
    """
    applied = f"--server-side={server_side}"
    release.run("install", applied)
    tokens = (release.secret(f"{release.fullname}-planner"), release.secret("rfork-instance"))
    await _write_certificate(release)
    await _lead(release, "controller-1")
    tls = release.secret(f"{release.fullname}-webhook-tls")

    changed = {
        "webhook": {"timeoutSeconds": 3, "replicas": 3},
        "planner": {"store": {"redis": {"url": "redis://redis:6379/0"}}},
        "keda": {"enabled": True},
    }
    release.run("upgrade", applied, values=changed)

    assert tokens == (release.secret(f"{release.fullname}-planner"), release.secret("rfork-instance"))
    assert {"tls.key": KEY, "tls.crt": CERTIFICATE} == {name: base64.b64decode(value) for name, value in tls.items()}
    assert tls == release.secret(f"{release.fullname}-webhook-tls")
    assert [base64.b64encode(AUTHORITY).decode()] * 2 == release.bundles()
    lease = release.admin.get(Lease, f"{release.fullname}-controller", namespace=release.namespace)
    assert lease.spec is not None
    assert "controller-1" == lease.spec.holderIdentity
    webhook = release.admin.get(Deployment, f"{release.fullname}-webhook", namespace=release.namespace)
    hooks = release.admin.get(MutatingWebhookConfiguration, release.fullname).webhooks or []
    assert webhook.spec is not None
    assert (3, [3, 2]) == (webhook.spec.replicas, [hook.timeoutSeconds for hook in hooks])
    assert f"Service/{release.fullname}-scaler" in release.objects()

    # And back: from several planners to one that is never run twice.
    release.run("upgrade", applied, values={"webhook": {"replicas": 2}})
    planner = release.admin.get(Deployment, f"{release.fullname}-planner", namespace=release.namespace)
    assert planner.spec is not None
    assert planner.spec.strategy is not None
    assert (1, "Recreate", None) == (
        planner.spec.replicas,
        planner.spec.strategy.type,
        planner.spec.strategy.rollingUpdate,
    )
    assert f"Service/{release.fullname}-scaler" not in release.objects()
    assert tokens == (release.secret(f"{release.fullname}-planner"), release.secret("rfork-instance"))
    assert [base64.b64encode(AUTHORITY).decode()] * 2 == release.bundles()


@pytest.mark.parametrize("server_side", ["true", "false"])
def test_upgrades_between_any_values(release: HelmRelease, server_side: str) -> None:
    """One release is upgraded through very different sets of values without conflicts."""
    applied = f"--server-side={server_side}"
    release.run("install", applied)
    sets = {name: values for name, values in VALUE_SETS.items() if name not in ELSEWHERE}
    mutual = {"tls": {"enabled": True, "existingSecret": "t", "clientCertificates": True}}
    for values in (*sets.values(), {"planner": mutual}, {"logs": {"json": False}}):
        release.run("upgrade", applied, "--reset-values", values=values)
    planner = release.admin.get(Deployment, f"{release.fullname}-planner", namespace=release.namespace)
    assert planner.spec is not None
    assert 1 == planner.spec.replicas


async def test_uninstall_leaves_nothing(release: HelmRelease) -> None:
    """After an uninstall no object is left, including those that integrations wrote."""
    release.run("install")
    await _write_certificate(release)
    await _lead(release, "controller-1")
    release.run("uninstall", "--cascade=background")
    # Deployments are deleted without finalizers, and no kubelet keeps Pods.
    assert [] == release.objects()


async def test_rights_of_webhook_and_controller_are_minimal(release: HelmRelease) -> None:
    """The webhook can read no other Secret, in particular not the planner's; the controller no other Lease."""
    release.run("install")
    store = CertificateStore(open_server(release.settings("webhook")))
    try:
        with pytest.raises(ClusterUnavailable, match="forbidden"):
            await store.read_secret(f"{release.fullname}-planner", release.namespace)
    finally:
        await store.close()
    cluster = connect(release.settings("controller"))
    try:
        with pytest.raises(ClusterUnavailable, match="forbidden"):
            await cluster.read_lease("another", release.namespace)
    finally:
        await cluster.close()


async def test_the_controller_can_only_change_status_and_annotations(release: HelmRelease) -> None:
    """It can write conditions and annotations of a Pod, but neither change its spec nor delete it."""
    release.run("install")
    release.admin.create(pod(release.namespace, "mine"))
    settings = release.settings("controller")
    cluster = connect(settings)
    try:
        mine = await observe_pod(cluster, release.namespace, "mine")
        await cluster.annotate(mine, {names.DELETION_COST: "1"})
        await cluster.set_condition(mine, names.WEIGHTS_READY, status=True, reason="Forked", message="")
    finally:
        await cluster.close()
    image = {"spec": {"containers": [{"name": "engine", "image": "another"}]}}
    assert settings.kubeconfig is not None
    with Client(KubeConfig.from_file(settings.kubeconfig), trust_env=False) as controller:
        for change in (
            lambda: controller.patch(Pod, "mine", image, namespace=release.namespace),
            lambda: controller.delete(Pod, "mine", namespace=release.namespace),
        ):
            with pytest.raises(ApiError, match="forbidden"):
                change()
        # The status is accepted; the rest of the patch has no effect.
        controller.patch(Pod.Status, "mine", image, namespace=release.namespace)
    marked = release.admin.get(Pod, "mine", namespace=release.namespace)
    assert marked.metadata is not None
    assert marked.spec is not None
    assert marked.status is not None
    conditions = {each.type: each.status for each in marked.status.conditions or ()}
    assert ({names.DELETION_COST: "1"}, "True", ["none"]) == (
        marked.metadata.annotations,
        conditions.get(names.WEIGHTS_READY),
        [each.image for each in marked.spec.containers],
    )


async def test_the_webhook_can_only_read_the_lease(release: HelmRelease) -> None:
    """It can read the controller's Lease but not write it."""
    release.run("install")
    await _lead(release, "controller-1")
    name = f"{release.fullname}-controller"
    cluster = connect(release.settings("webhook"))
    try:
        seen = await cluster.read_lease(name, release.namespace)
        assert "controller-1" == seen.holder
        with pytest.raises(ClusterUnavailable, match="forbidden"):
            await cluster.write_lease(name, release.namespace, "webhook", 15.0, seen.version)
    finally:
        await cluster.close()


def test_tokens_reach_the_namespaces_of_instances(release: HelmRelease) -> None:
    """Each namespace with instances gets its own token, which is removed with the release."""
    other = f"{release.namespace}-team"
    release.admin.create(Namespace(metadata=ObjectMeta(name=other)))
    try:
        release.run("install", values={"instances": {"namespaces": [other]}})
        token = release.admin.get(Secret, "rfork-instance", namespace=other).data or {}
        assert release.secret(f"{release.fullname}-planner")[f"instance-token-{other}"] == token["token"]
        release.run("uninstall")
        with pytest.raises(ApiError, match="not found"):
            release.admin.get(Secret, "rfork-instance", namespace=other)
    finally:
        release.admin.delete(Namespace, other, grace_period=0)


def test_a_second_release_does_not_adopt_existing_objects(release: HelmRelease) -> None:
    """If objects belong to another release or none, the install fails and names them."""
    release.run("install", values={"controller": {"enabled": False}})
    with pytest.raises(HelmFailed, match="cannot be imported into the current release"):
        helm_run(
            release.helm, "install", "second", str(CHART), "--namespace", release.namespace,
            values={"fullnameOverride": release.fullname}, kubeconfig=release.plane.kubeconfig,
        )  # fmt: skip


def test_rendered_manifests_work_with_kubectl(release: HelmRelease, kubectl: Path, tmp_path: Path) -> None:
    """Rendering with helm and applying with kubectl has the same result."""
    text = helm_run(
        release.helm, "template", release.namespace, str(CHART), "--namespace", release.namespace,
        "--kube-version", "{}.{}".format(*release.plane.version), values={},
    )  # fmt: skip
    manifest = tmp_path / "rfork.yaml"
    manifest.write_text(text)
    done = subprocess.run(
        [kubectl, "--kubeconfig", release.plane.kubeconfig, "apply", "--dry-run=server", "-f", manifest],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ("", 0) == (done.stderr, done.returncode)
    assert len([each for each in yaml.safe_load_all(text) if each]) == len(done.stdout.splitlines())


async def _write_certificate(release: HelmRelease) -> None:
    """Write what the webhook writes: its certificate to the Secret, its CA to the configuration."""
    store = CertificateStore(open_server(release.settings("webhook")))
    try:
        name = f"{release.fullname}-webhook-tls"
        empty = await store.read_secret(name, release.namespace)
        assert {} == empty.data
        data = {"tls.key": KEY, "tls.crt": CERTIFICATE}
        await store.write_secret(name, release.namespace, data, empty.version)
        seen = await store.read_bundles(release.fullname)
        await store.write_bundles(release.fullname, dict.fromkeys(seen.data, AUTHORITY), seen.version)
    finally:
        await store.close()


async def _lead(release: HelmRelease, holder: str) -> None:
    """Acquire the Lease as the controller does."""
    cluster = connect(release.settings("controller"))
    try:
        name = f"{release.fullname}-controller"
        free = await cluster.read_lease(name, release.namespace)
        assert free.holder is None
        await cluster.write_lease(name, release.namespace, holder, 15.0, free.version)
    finally:
        await cluster.close()
