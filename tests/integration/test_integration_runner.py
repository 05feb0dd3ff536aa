"""Integrations as processes: `rfork k8s`, and inside the planner; and a TLS server whose certificate changes."""

from __future__ import annotations

import base64
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonpatch
import pytest
import trustme

from planner.clock import Clock
from planner.http_server import listen, run_server
from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes import certificates
from planner.integrations.kubernetes.certificates import CertBundle, ServingCertificate
from tests.conftest import StartRfork

DAYS = 30.0
HOSTS = ("localhost", "127.0.0.1")
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "a", "namespace": "default", "labels": {"rfork.dev/model": "llama"}},
    "spec": {
        "containers": [{"name": "engine", "image": "vllm", "command": ["vllm", "serve", "meta-llama/Llama-3.1-8B"]}]
    },
}


def review(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the API server's admission request for a new Pod."""
    request = {
        "uid": "1",
        "operation": "CREATE",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "namespace": "default",
        "object": pod,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


class WebhookCertificates:
    """A certificate directory, and the authority that clients trust."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own = self.renew()

    def renew(self, days: float = DAYS) -> CertBundle:
        """Replace the certificate by one of another authority."""
        self.own = certificates.generate_bundle(HOSTS, days, time.time())
        for name, content in self.own.data().items():
            (self.path / name).write_bytes(content)
        return self.own


@pytest.fixture
def folder(tmp_path: Path) -> WebhookCertificates:
    return WebhookCertificates(tmp_path)


@pytest.fixture
def environment(folder: WebhookCertificates, tmp_path: Path) -> dict[str, str]:
    """Environment of a webhook that needs no cluster, and finds none."""
    return {
        "HOME": str(tmp_path),
        "KUBECONFIG": str(tmp_path / "none"),
        "RFORK_K8S_POD_PLANNER_URL": "http://planner:8700",
        "RFORK_K8S_CERTIFICATE_DIR": str(folder.path),
        "RFORK_K8S_WEBHOOK_PORT": "0",
        "RFORK_K8S_HEALTH_PORT": "0",
        "RFORK_K8S_POLL_INTERVAL_S": "0.05",
    }


def trusted_context(own: CertBundle) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=own.ca.decode())


def mutate(url: str, own: CertBundle) -> dict[str, Any]:
    """Return the labelled Pod as the webhook modifies it."""
    response = httpx.post(f"{url}/mutate", json=review(POD), verify=trusted_context(own))
    patch = json.loads(base64.b64decode(response.raise_for_status().json()["response"]["patch"]))
    changed: dict[str, Any] = jsonpatch.apply_patch(POD, patch)
    return changed


def injected_planner_urls(pod: dict[str, Any]) -> list[str]:
    """Return the planner URLs in the Pod's containers."""
    return [
        variable["value"]
        for container in pod["spec"]["containers"]
        for variable in container.get("env", ())
        if variable["name"] == "RFORK_PLANNER"
    ]


async def test_a_certificate_changes_while_connections_are_open() -> None:
    """Open connections continue; new ones get the new certificate, even with another key type."""
    first = trustme.CA(key_type=trustme.KeyType.RSA).issue_cert(*HOSTS, key_type=trustme.KeyType.RSA)
    second = certificates.generate_bundle(HOSTS, DAYS, time.time())
    live = ServingCertificate(IntegrationStatus("webhook"), Clock())
    live.set_certificate(
        certificates.load_pair(b"".join(pem.bytes() for pem in first.cert_chain_pems), first.private_key_pem.bytes())
    )
    listener = listen("127.0.0.1", 0, prefix="RFORK_K8S_", port_setting="WEBHOOK_PORT")
    port = listener.getsockname()[1]
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    async with (
        run_server(hello, listener, live.context),
        httpx.AsyncClient(verify=unchecked, base_url=f"https://127.0.0.1:{port}") as old,
    ):
        before = await old.get("/")
        connection = before.extensions["network_stream"].get_extra_info("ssl_object")
        live.set_certificate(second.pair)
        after = await old.get("/")
        same = after.extensions["network_stream"].get_extra_info("ssl_object") is connection
        seen = []
        for host in HOSTS:  # by name (SNI), and by address (without)
            async with httpx.AsyncClient(verify=trusted_context(second)) as new:
                seen.append((await new.get(f"https://{host}:{port}/")).text)
    assert "hello" == before.text
    assert "hello" == after.text
    assert same
    assert ["hello", "hello"] == seen


async def test_without_a_certificate_no_handshake_succeeds() -> None:
    """Until it has a certificate, the server listens and refuses handshakes without failing."""
    live = ServingCertificate(IntegrationStatus("webhook"), Clock())
    listener = listen("127.0.0.1", 0, prefix="RFORK_K8S_", port_setting="WEBHOOK_PORT")
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
    own = certificates.generate_bundle(HOSTS, DAYS, time.time())
    async with (
        run_server(hello, listener, live.context),
        httpx.AsyncClient(verify=trusted_context(own)) as client,
    ):
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
        live.set_certificate(own.pair)
        assert "hello" == (await client.get(url)).text


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that responds with one word."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})


def test_integrations_do_not_import_torch() -> None:
    """The planner's container image has no torch: the integrations and their command import without it."""
    code = (
        "import sys; sys.modules['torch'] = None;"
        "import rfork.cli.app, planner.server, planner.integrations.keda.scaler, planner.integrations.planner_api;"
        "import planner.integrations.kubernetes.webhook, planner.integrations.kubernetes.controller.controller"
    )
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


def test_the_webhook_serves_without_a_cluster(
    rfork_process: StartRfork, environment: dict[str, str], folder: WebhookCertificates
) -> None:
    """With certificates from elsewhere it needs no cluster: it modifies Pods, its probes succeed, and SIGTERM
    ends it with code 0.
    """
    process = rfork_process("k8s", "webhook", until="webhook ready", environment=environment)
    url = process.wait_for(r"webhook ready.*url=(\S+)")[1]
    probes = process.wait_for(r"probes=(\S+)")[1]
    process.wait_for("the webhook cannot connect to the cluster")
    planner_urls = injected_planner_urls(mutate(url, folder.own))
    ready = httpx.get(f"{probes}/readyz")
    metrics = httpx.get(f"{probes}/metrics").text
    process.signal(signal.SIGTERM)
    assert ["http://planner:8700"] == planner_urls
    assert 200 == ready.status_code
    assert "webhook: ready\n" == ready.text
    assert 'rfork_webhook_reviews_total{path="mutate",result="injected"} 1.0' in metrics
    assert 0 == process.wait()


def test_the_webhook_reloads_a_renewed_certificate(
    rfork_process: StartRfork, environment: dict[str, str], folder: WebhookCertificates
) -> None:
    """Changed files are used without a restart; a broken key in between is logged once."""
    process = rfork_process("k8s", "webhook", until="webhook ready", environment=environment)
    url, old = process.wait_for(r"webhook ready.*url=(\S+)")[1], folder.own
    (folder.path / "tls.key").write_text("half of")
    process.wait_for("unusable webhook certificate.*the key is not unencrypted PEM")
    planner_urls = [injected_planner_urls(mutate(url, old))]
    new = folder.renew(2 * DAYS)
    process.wait_for(f"certificate in use.*{new.pair.validity_text}")
    planner_urls.append(injected_planner_urls(mutate(url, new)))
    assert [["http://planner:8700"]] * 2 == planner_urls


@pytest.fixture
def port_in_use() -> Iterator[str]:
    """A port that is in use."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield str(holder.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "changed", "error"),
    [
        (("webhook",), {"RFORK_K8S_WEBHOOK_PORT": "taken"}, "the address is in use"),
        (("webhook",), {"RFORK_K8S_HEALTH_PORT": "taken"}, "the address is in use"),
        (
            ("webhook",),
            {"RFORK_K8S_CERTIFICATE_DIR": "/nowhere"},
            "/nowhere/tls.crt: No such file or directory",
        ),
        (("webhook",), {"RFORK_K8S_CERTIFICATE_DIR": ""}, "cannot use the kubeconfig"),
        (
            ("webhook",),
            {"RFORK_K8S_POD_PLANNER_URL": ""},
            "the webhook does not know the URL at which Pods reach the planner",
        ),
        (("webhook",), {"RFORK_K8S_BIND": "203.0.113.1"}, "cannot listen on 203.0.113.1"),
        (("controller",), {}, "cannot use the kubeconfig"),
        (("webhook", "nothing"), {}, "unknown integration 'nothing': choose from webhook, controller, scaler"),
    ],
)
def test_an_invalid_configuration_is_one_line(
    rfork_process: StartRfork,
    environment: dict[str, str],
    port_in_use: str,
    arguments: tuple[str, ...],
    changed: dict[str, str],
    error: str,
) -> None:
    """Exit code 2, no traceback, and the reason."""
    changed = {name: port_in_use if value == "taken" else value for name, value in changed.items()}
    process_environment = environment | {"RFORK_PLANNER": "http://planner:8700"} | changed
    if not changed.get("RFORK_K8S_POD_PLANNER_URL", "set"):
        process_environment["RFORK_PLANNER"] = ""
    process = rfork_process("k8s", *arguments, environment=process_environment)
    assert 2 == process.wait(), process.transcript()
    assert error in process.stderr, process.transcript()
    assert "Traceback" not in process.stderr, process.transcript()


def test_a_failing_integration_ends_the_others(
    rfork_process: StartRfork, environment: dict[str, str], port_in_use: str
) -> None:
    """A Pod that runs two integrations is restarted as a unit."""
    process_environment = {"RFORK_PLANNER": "http://planner:8700", "RFORK_K8S_SCALER_PORT": port_in_use}
    process = rfork_process("k8s", "webhook", "scaler", environment=environment | process_environment)
    assert 2 == process.wait(), process.transcript()


def test_the_planner_runs_the_webhook(
    rfork_process: StartRfork, environment: dict[str, str], folder: WebhookCertificates, free_port: int
) -> None:
    """One process serves the REST API and the webhook over TLS; its metrics include the webhook, and it exits
    with code 0.
    """
    process_environment = {"RFORK_PLANNER_INTEGRATIONS": "webhook", "RFORK_PLANNER_PORT": str(free_port)}
    process = rfork_process("planner", until="webhook ready", environment=environment | process_environment)
    url = process.wait_for(r"webhook ready.*url=(\S+)")[1]
    planner = f"http://127.0.0.1:{free_port}"
    process.wait_for("certificate in use")
    changed = mutate(url, folder.own)
    models = httpx.get(f"{planner}/v1/models").status_code
    metrics = httpx.get(f"{planner}/metrics").text
    process.signal(signal.SIGTERM)
    assert ["http://planner:8700"] == injected_planner_urls(changed)
    assert 200 == models
    assert [True, True] == [
        line in metrics
        for line in (
            'rfork_integration_ready{integration="webhook"} 1.0',
            'rfork_webhook_reviews_total{path="mutate",result="injected"} 1.0',
        )
    ]
    assert 0 == process.wait()


def test_a_failing_integration_does_not_affect_the_planner(
    rfork_process: StartRfork, environment: dict[str, str], free_port: int
) -> None:
    """Its port is in use: the log has the reason and the retry delay; the planner keeps serving and exits
    with code 0.
    """
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        process_environment = {
            "RFORK_PLANNER_INTEGRATIONS": "webhook",
            "RFORK_PLANNER_PORT": str(free_port),
            "RFORK_K8S_WEBHOOK_PORT": port,
        }
        process = rfork_process(
            "planner", until="integration failed.*retry_in_s=1", environment=environment | process_environment
        )
        status_code = httpx.get(f"http://127.0.0.1:{free_port}/v1/models").status_code
    process.wait_for("webhook ready")
    process.signal(signal.SIGTERM)
    assert 200 == status_code
    assert 0 == process.wait()


def test_a_planner_with_misconfigured_integrations_does_not_start(
    rfork_process: StartRfork, environment: dict[str, str]
) -> None:
    """Invalid settings are reported in one line, like all others of the planner."""
    process_environment = {
        "RFORK_PLANNER_INTEGRATIONS": "webhook",
        "RFORK_PLANNER_PORT": "0",
        "RFORK_K8S_POD_PLANNER_URL": "",
    }
    process = rfork_process("planner", environment=environment | process_environment)
    assert 2 == process.wait(), process.transcript()
    assert "the webhook does not know the URL at which Pods reach the planner" in process.stderr, process.transcript()
