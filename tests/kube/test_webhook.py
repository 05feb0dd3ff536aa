"""The webhook as a process, with a real API server: its certificates, another webhook, its failure.

The chart is installed; the API server calls one replica, by a URL. A second one is tested with TLS
handshakes, because in a cluster a Service may send any call to either.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, cast

import pytest
import trustme
from lightkube import Client
from lightkube.resources.admissionregistration_v1 import MutatingWebhookConfiguration
from lightkube.resources.core_v1 import Pod, Secret

from planner.integrations.kubernetes import certificates, names
from tests.kube.control_plane import ControlPlane
from tests.kube.installation import Installation, installed
from tests.kube.test_kubelet import until
from tests.ports import free_ports

FAST_POLL: Final = {"RFORK_K8S_POLL_INTERVAL_S": "0.2"}
MESHED: Final = {"mesh": "yes"}
"""Label of Pods to which the other webhook adds a sidecar."""
SIDECAR: Final = {"name": "mesh", "image": "mesh:1", "args": ["proxy"]}
EXPIRED: Final = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def installation(
    plane: ControlPlane, admin: Client, helm: Path, namespace: str, tmp_path: Path
) -> Iterator[Installation]:
    """The chart without processes. The webhook does not need a planner."""
    with installed(plane, admin, helm, namespace, tmp_path) as made:
        yield made


class LabelledPods:
    """Pods with the label, created by a test."""

    def __init__(self, admin: Client, namespace: str) -> None:
        self._admin, self._namespace = admin, namespace
        self.made = 0

    def create(self, labels: Mapping[str, str] | None = None, *, dry_run: bool = False) -> Pod:
        """Create a Pod and return the API server's response."""
        document = {
            "metadata": {"generateName": "engine-", "labels": {names.MODEL: "llama", **(labels or {})}},
            "spec": {"containers": [{"name": "engine", "image": "none", "command": ["vllm", "serve", "m"]}]},
        }
        self.made += not dry_run
        pod = cast(Pod, Pod.from_dict(document))
        return self._admin.create(pod, namespace=self._namespace, dry_run=dry_run)

    def injected(self) -> bool:
        """Create a Pod and return True if it was injected; if not, it must be unchanged."""
        made = self.create()
        assert made.metadata is not None
        assert made.spec is not None
        if names.INJECTED in (made.metadata.annotations or {}):
            return True
        assert (None, None, None, ["vllm", "serve", "m"]) == (
            made.metadata.annotations,
            made.spec.readinessGates,
            made.spec.containers[0].env,
            made.spec.containers[0].command,
        )
        return False


def test_replicas_share_their_certificate_through_failures(
    installation: Installation, admin: Client, namespace: str
) -> None:
    """The caBundle is emptied, the Secret deleted, then corrupted; Pods are injected all the time."""
    pods, (port, health) = LabelledPods(admin, namespace), free_ports(2)
    installation.start("webhook", "a", **FAST_POLL)
    installation.start("webhook", "b", RFORK_K8S_WEBHOOK_PORT=str(port), RFORK_K8S_HEALTH_PORT=str(health), **FAST_POLL)
    secret = f"{installation.release}-webhook-tls"
    until(lambda: all(bundles(admin, installation)), "the caBundle to be set")
    until(pods.injected, "an injected Pod")

    # Without the caBundle the API server does not trust the webhook: until it is restored, Pods start
    # unchanged.
    emptied = admin.get(MutatingWebhookConfiguration, installation.release)
    for each in emptied.webhooks or ():
        each.clientConfig.caBundle = None
    admin.replace(emptied)
    until(lambda: all(bundles(admin, installation)), "the caBundle to be restored")
    until(pods.injected, "an injected Pod with the restored caBundle")

    def wait_while_pods_injected(predicate: Callable[[], bool], what: str) -> None:
        def check_pods_injected() -> bool:
            assert pods.injected()
            for bundle in bundles(admin, installation):
                handshake(port, bundle)
            return predicate()

        until(check_pods_injected, what)

    def certificate_change_counts() -> list[float]:
        return [installation.metric(name, "rfork_webhook_certificate_changes_total") for name in ("a", "b")]

    def replaced(before: str) -> bool:
        found = admin.list(Secret, namespace=installation.namespace, fields={"metadata.name": secret})
        return any((each.data or {}).get(certificates.CA) not in (None, before) for each in found)

    begun = certificate_change_counts()
    first = authority_of(admin, installation, secret)
    admin.delete(Secret, secret, namespace=installation.namespace)
    wait_while_pods_injected(lambda: replaced(first), "a new Secret")
    wait_while_pods_injected(
        lambda: all(len(certificates.authorities(bundle)) == 2 for bundle in bundles(admin, installation)),
        "both CAs in the caBundle",
    )
    wait_while_pods_injected(
        lambda: certificate_change_counts() == [count + 1 for count in begun],
        "the new certificate on both replicas",
    )

    second = authority_of(admin, installation, secret)
    broken = {"tls.crt": base64.b64encode(b"rubbish").decode(), "tls.key": ""}
    admin.patch(Secret, secret, {"data": {**broken, "ca.crt": None}}, namespace=installation.namespace)
    wait_while_pods_injected(lambda: replaced(second), "the corrupt Secret to be replaced")
    wait_while_pods_injected(
        lambda: certificate_change_counts() == [count + 2 for count in begun],
        "the third certificate on both replicas",
    )
    assert any("replacing an unusable certificate Secret" in installation.log(name) for name in ("a", "b"))
    assert pods.made == len(list(admin.list(Pod, namespace=namespace)))


def test_an_external_certificate_expires(
    installation: Installation, admin: Client, namespace: str, tmp_path: Path
) -> None:
    """Pods start unchanged, log and metric have the reason; a renewed certificate is used without a restart."""
    pods, issuer, mount = LabelledPods(admin, namespace), trustme.CA(), tmp_path / "tls"
    bundle = base64.b64encode(issuer.cert_pem.bytes()).decode()
    installation.values["webhook"] |= {
        "certificates": {"mode": "secret", "existingSecret": "tls"},
        "caBundle": bundle,
    }
    installation.helm("upgrade")
    write_mounted_secret(mount, issuer.issue_cert("127.0.0.1", not_after=EXPIRED))
    installation.start("webhook", RFORK_K8S_CERTIFICATE_DIR=str(mount), **FAST_POLL)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(installation.webhook_port, issuer.cert_pem.bytes())
    assert not pods.injected()
    assert 0 == installation.metric("webhook", "rfork_webhook_certificate_valid")
    assert EXPIRED.timestamp() == installation.metric("webhook", "rfork_webhook_certificate_not_after_seconds")
    assert 1 == installation.log("webhook").count("webhook certificate expired")

    write_mounted_secret(mount, issuer.issue_cert("127.0.0.1"))
    until(lambda: installation.metric("webhook", "rfork_webhook_certificate_valid") == 1, "the renewed certificate")
    until(pods.injected, "an injected Pod")
    assert 2 == installation.metric("webhook", "rfork_webhook_certificate_changes_total")
    assert 0 == installation.metric("webhook", "rfork_webhook_certificate_errors_total")


def test_another_webhook_adds_a_container_afterwards(installation: Installation, admin: Client, namespace: str) -> None:
    """The Pod is reviewed again, with the same result as without the other webhook, or in a dry run."""
    pods = LabelledPods(admin, namespace)
    installation.start("webhook", **FAST_POLL)
    until(pods.injected, "an injected Pod")
    alone = pods.create()
    assert without_mesh(alone) == without_mesh(pods.create(dry_run=True))
    with mesh(admin, namespace):
        # The API server may need a moment to notice the other webhook.
        until(lambda: containers(pods.create(MESHED))[0] == SIDECAR["name"], "a sidecar")
        before = review_count(installation)
        both = pods.create(MESHED)
        assert 2 == review_count(installation) - before
    assert ["mesh", "engine"] == containers(both)
    assert without_mesh(alone) == without_mesh(both)
    assert 0 == installation.log("webhook").count("review failed")


def test_a_crashed_webhook_blocks_no_pod(installation: Installation, admin: Client, namespace: str) -> None:
    """After a SIGKILL Pods are created unchanged; after a restart the next ones are injected."""
    pods = LabelledPods(admin, namespace)
    installation.start("webhook", **FAST_POLL)
    until(pods.injected, "an injected Pod")
    installation.kill("webhook")
    assert [False] * 3 == [pods.injected() for _ in range(3)]
    installation.start("webhook", **FAST_POLL)
    assert pods.injected()


def bundles(admin: Client, installation: Installation) -> list[bytes]:
    """Return the caBundle of each webhook of the release."""
    found = admin.get(MutatingWebhookConfiguration, installation.release).webhooks or []
    assert 2 == len(found)
    return [base64.b64decode(each.clientConfig.caBundle or "") for each in found]


def authority_of(admin: Client, installation: Installation, secret: str) -> str:
    """Return the CA in the webhook's Secret, in base64."""
    return str((admin.get(Secret, secret, namespace=installation.namespace).data or {})[certificates.CA])


def handshake(port: int, bundle: bytes) -> None:
    """Do a TLS handshake that trusts the bundle. Raises ssl.SSLError if the certificate is not signed by it."""
    context = ssl.create_default_context(cadata=bundle.decode())
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1"),
    ):
        pass


def write_mounted_secret(folder: Path, pair: trustme.LeafCert) -> None:
    """Write a certificate to a directory as the kubelet mounts a Secret: all files change atomically."""
    folder.mkdir(exist_ok=True)
    data = folder / f"..{len(list(folder.iterdir()))}"
    data.mkdir()
    chain = b"".join(part.bytes() for part in pair.cert_chain_pems)
    for name, content in {"tls.crt": chain, "tls.key": pair.private_key_pem.bytes()}.items():
        (data / name).write_bytes(content)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data", name))
    (folder / "..new").symlink_to(data.name)
    os.replace(folder / "..new", folder / "..data")


def containers(pod: Pod) -> list[str]:
    """Return their names, in order."""
    return [each.name for each in (pod.spec.containers if pod.spec else ())]


def review_count(installation: Installation) -> float:
    """Return the number of Pod reviews."""
    return installation.metric("webhook", "rfork_webhook_reviews_total", path="mutate")


def without_mesh(pod: Pod) -> dict[str, Any]:
    """Return the expected Pod without the other webhook's additions."""
    document = pod.to_dict()
    spec = dict(document["spec"])
    spec["containers"] = [each for each in spec["containers"] if each["name"] != SIDECAR["name"]]
    return {"annotations": document["metadata"]["annotations"], "spec": spec}


@contextlib.contextmanager
def mesh(admin: Client, namespace: str) -> Iterator[None]:
    """Another webhook, called after rfork's, which inserts a container into Pods with `MESHED`."""
    issuer = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issuer.issue_cert("127.0.0.1").configure_cert(context)
    server = ThreadingHTTPServer(("127.0.0.1", 0), MeshHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    webhook = {
        "name": "mesh.example.com",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "reinvocationPolicy": "IfNeeded",
        "objectSelector": {"matchLabels": MESHED},
        "clientConfig": {
            "url": f"https://127.0.0.1:{server.server_port}/",
            "caBundle": base64.b64encode(issuer.cert_pem.bytes()).decode(),
        },
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
    }
    # Webhooks are called in the order of their names.
    document = {"metadata": {"name": f"zz-{namespace}"}, "webhooks": [webhook]}
    try:
        admin.create(cast(MutatingWebhookConfiguration, MutatingWebhookConfiguration.from_dict(document)))
        yield
    finally:
        admin.delete(MutatingWebhookConfiguration, f"zz-{namespace}")
        server.shutdown()
        server.server_close()


class MeshHandler(BaseHTTPRequestHandler):
    """Handles AdmissionReviews."""

    def do_POST(self) -> None:
        review_request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        there = [each["name"] for each in review_request["object"]["spec"]["containers"]]
        patch = [{"op": "add", "path": "/spec/containers/0", "value": SIDECAR}]
        response = {
            "uid": review_request["uid"],
            "allowed": True,
            "patchType": "JSONPatch",
            "patch": base64.b64encode(json.dumps([] if SIDECAR["name"] in there else patch).encode()).decode(),
        }
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(review).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass
