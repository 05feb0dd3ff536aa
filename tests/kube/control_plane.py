"""A real Kubernetes control plane for tests: etcd, kube-apiserver with RBAC, kube-controller-manager.

There is no scheduler and no kubelet: Pods stay Pending until `tests.kube.kubelet` runs them, or a test
patches their status. ServiceAccount admission is off, so Pods get no token. All processes listen on
127.0.0.1.

In a test, use the fixtures of `tests/kube/conftest.py` (each test has its own namespace)::

    def test_it(plane: ControlPlane, admin: Client, namespace: str) -> None:
        admin.create(ServiceAccount(metadata=ObjectMeta(name="rfork-controller", namespace=namespace)))
        kubeconfig = plane.kubeconfig_for(namespace, "rfork-controller")  # KUBECONFIG
        start("rfork", "k8s", "controller", environment={"KUBECONFIG": str(kubeconfig)})
        assert plane.calls(f"system:serviceaccount:{namespace}:rfork-controller") == ...

or directly: ``with control_plane(folder) as plane: …``. `plane.kubeconfig` is an administrator's.

The binaries are found as by controller-runtime's envtest: in the directory KUBEBUILDER_ASSETS. etcd may be on
the PATH instead. Without them, tests are skipped with a message. Kubernetes 1.20 and newer are known to work.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import httpx
import pytest
import trustme
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.ports import free_ports

ASSETS_VARIABLE: Final = "KUBEBUILDER_ASSETS"
SETUP_HINT: Final = (
    f"set {ASSETS_VARIABLE} to a directory with kube-apiserver, as created by setup-envtest of "
    "sigs.k8s.io/controller-runtime, and add kube-controller-manager to it"
)
START_S: Final = 180.0
STOP_S: Final = 10.0
CONTROLLERS: Final = "deployment,replicaset,statefulset,garbagecollector,namespace,serviceaccount,disruption"
"""Enabled controllers: enough for scaling, rollouts, deletion and disruption budgets."""


@dataclass(frozen=True)
class Binaries:
    """Paths of the three programs."""

    etcd: Path
    api_server: Path
    controller_manager: Path


@dataclass(frozen=True)
class AuditedCall:
    """One completed call, from the API server's audit log."""

    user: str
    verb: str
    """get, list, watch, create, update, patch, delete, deletecollection."""
    group: str
    """API group; empty: core."""
    resource: str
    """Plural name, with subresource: ``pods``, ``pods/status``."""
    namespace: str
    name: str
    code: int
    """HTTP status."""


def find_binaries() -> Binaries:
    """Return the programs, or skip the test and name the missing ones."""
    folder = os.environ.get(ASSETS_VARIABLE, "")
    if not folder:
        pytest.skip(f"no Kubernetes control plane: {SETUP_HINT}")
    found = {name: shutil.which(name, path=folder) for name in ("etcd", "kube-apiserver", "kube-controller-manager")}
    found["etcd"] = found["etcd"] or shutil.which("etcd")
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not in {folder}: {SETUP_HINT}")
    etcd, api_server, manager = (Path(path) for path in found.values() if path is not None)
    return Binaries(etcd, api_server, manager)


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """A running control plane with its files in `folder`; stopped at the end in any case."""
    plane = ControlPlane(folder, find_binaries())
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


class Program:
    """One process of the control plane. If it does not start, the error includes its output."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, launcher: Executor) -> None:
        self.name = name
        self._launcher = launcher
        self._command = [*parent_death_launcher(), *command]
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, ready_url: str, client: httpx.Client) -> None:
        """Start it and wait until `ready_url` returns 200. Raises RuntimeError with the end of its log."""
        with self._log.open("ab") as log:
            self._process = process = self._launcher.submit(self._open, log).result()
        deadline = time.monotonic() + START_S
        last_status: object = None
        while time.monotonic() < deadline and process.poll() is None:
            try:
                response = client.get(ready_url)
                last_status = response.text
                if response.status_code == 200:
                    return
            except httpx.HTTPError as error:
                last_status = error
            time.sleep(0.05)  # poll interval
        code = process.poll()
        self.stop()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{self.name} did not start (exit code {code}; {last_status})\n{tail}")

    def _open(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def stop(self, *, kill: bool = False) -> None:
        """Send SIGTERM, then SIGKILL; with `kill` SIGKILL immediately. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if not kill:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        process.kill()
        process.wait()

    def pause(self) -> None:
        """Stop it with SIGSTOP until `resume`."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue it after `pause`. It may not be paused, or not be running."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


class ControlPlane:
    """The running control plane. Not thread-safe."""

    def __init__(self, folder: Path, binaries: Binaries) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.version = _version(binaries.api_server)
        self._etcd_port, peer_port, self._port, self._manager_port = free_ports(4)
        self.url = f"https://127.0.0.1:{self._port}"
        self.ca = folder / "ca.crt"
        self.audit = folder / "audit.log"
        authority = trustme.CA(organization_name="rfork tests")
        authority.cert_pem.write_to_path(self.ca)
        _write_pair(authority.issue_cert("127.0.0.1", "localhost"), folder, "server")
        _write_service_account_key(folder)
        self.kubeconfig = self._certificate_config(authority, "admin")
        """An administrator's kubeconfig."""
        manager_config = self._certificate_config(authority, "controller-manager")
        self._client = self.client()
        # The death signal is bound to the thread that starts a process, so this thread lives as long as the
        # object.
        self._launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="control-plane")
        self._etcd = Program("etcd", self._etcd_command(binaries.etcd, peer_port), folder, self._launcher)
        self._api_server = Program("kube-apiserver", self._api_command(binaries.api_server), folder, self._launcher)
        self._manager = Program(
            "kube-controller-manager",
            self._manager_command(binaries.controller_manager, manager_config),
            folder,
            self._launcher,
        )

    def start(self) -> None:
        """Start all three. Raises RuntimeError with a program's log; call `stop` even then."""
        self._etcd.start(f"http://127.0.0.1:{self._etcd_port}/health", self._client)
        self.start_api_server()
        with httpx.Client(verify=False) as unchecked:  # its certificate is self-signed
            self._manager.start(f"https://127.0.0.1:{self._manager_port}/healthz", unchecked)

    def stop(self) -> None:
        """Stop all. Idempotent."""
        for program in (self._manager, self._api_server, self._etcd):
            program.stop(kill=program is not self._manager)
        self._client.close()
        self._launcher.shutdown()

    def kill_api_server(self) -> None:
        """Kill the API server with SIGKILL; its state stays in etcd."""
        # A starting API server does not serve all groups yet. The controller manager would delete only the objects
        # that it finds in a terminating namespace, and the namespace: the other objects would stay for ever, and
        # other tests' controllers would act on them.
        self._manager.pause()
        self._api_server.stop(kill=True)

    def start_api_server(self) -> None:
        """Start it on its previous port and wait until it is ready. Raises RuntimeError with its log."""
        self._api_server.start(f"{self.url}/readyz", self._client)
        self._manager.resume()

    def client(self) -> httpx.Client:
        """Return an administrator's HTTP client for API paths (``/api/v1/…``). Close it after use."""
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.folder / "admin.pem")
        return httpx.Client(base_url=self.url, verify=context, timeout=10.0)

    def compact(self) -> None:
        """Compact etcd: it forgets all revisions but the last, as it does periodically."""
        etcd = f"http://127.0.0.1:{self._etcd_port}/v3"
        header = self._client.post(f"{etcd}/maintenance/status", json={}).raise_for_status().json()["header"]
        compaction = {"revision": header["revision"], "physical": True}
        self._client.post(f"{etcd}/kv/compaction", json=compaction).raise_for_status()

    def kubeconfig_for(self, namespace: str, service_account: str) -> Path:
        """Return a kubeconfig with a token of an existing ServiceAccount; `namespace` is its default."""
        token = self.service_account_token(namespace, service_account)
        return self._config(f"{namespace}-{service_account}", {"token": token}, namespace)

    def service_account_token(self, namespace: str, service_account: str) -> str:
        """Return a token of an existing ServiceAccount."""
        path = f"api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": []},
        }
        response = self._client.post(f"{self.url}/{path}", json=request)
        if response.is_error:
            raise RuntimeError(f"no token for {namespace}/{service_account}: {response.text}")
        return str(response.json()["status"]["token"])

    def calls(self, user: str | None = None) -> list[AuditedCall]:
        """Return the completed calls to resources, oldest first, optionally of one user only.

        A ServiceAccount's user is ``system:serviceaccount:NAMESPACE:NAME``. A watch is logged when it ends.
        """
        with self.audit.open() as log:
            # The last line may be incomplete.
            events = [json.loads(line) for line in log if line.endswith("\n")]
        return [_call(event) for event in events if "objectRef" in event and user in (None, event["user"]["username"])]

    def _etcd_command(self, program: Path, peer_port: int) -> list[str]:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{peer_port}"
        return [
            str(program), f"--data-dir={self.folder / 'etcd'}", "--name=default", "--log-level=error",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]  # fmt: skip

    def _api_command(self, program: Path) -> list[str]:
        policy = self.folder / "audit-policy.yaml"
        rules = {"omitStages": ["RequestReceived", "ResponseStarted"], "rules": [{"level": "Metadata"}]}
        policy.write_text(yaml.safe_dump({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", **rules}))
        command = [
            str(program), f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={self._port}",
            "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.0.0.0/24",
            f"--cert-dir={self.folder}",
            f"--tls-cert-file={self.folder / 'server.crt'}",
            f"--tls-private-key-file={self.folder / 'server.key'}",
            f"--client-ca-file={self.ca}",
            f"--service-account-key-file={self.folder / 'service-account.key'}",
            f"--service-account-signing-key-file={self.folder / 'service-account.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true", "--profiling=false",
            f"--audit-log-path={self.audit}", f"--audit-policy-file={policy}",
        ]  # fmt: skip
        # Until 1.23 it also listens on a port without TLS by default.
        return [*command, "--insecure-port=0"] if self.version < (1, 24) else command

    def _manager_command(self, program: Path, kubeconfig: Path) -> list[str]:
        command = [
            str(program), f"--kubeconfig={kubeconfig}", f"--controllers={CONTROLLERS}",
            "--bind-address=127.0.0.1", f"--secure-port={self._manager_port}",
            f"--cert-dir={self.folder / 'manager'}", "--leader-elect=false", "--profiling=false",
            "--kube-api-qps=500", "--kube-api-burst=1000",
        ]  # fmt: skip
        return [*command, "--port=0"] if self.version < (1, 24) else command

    def _certificate_config(self, authority: trustme.CA, name: str) -> Path:
        # Without a server name its list of names would be empty, which Go rejects.
        pair = authority.issue_cert(name, common_name=name, organization_name="system:masters")
        _write_pair(pair, self.folder, name)
        files = {"client-certificate": f"{name}.crt", "client-key": f"{name}.key"}
        return self._config(name, {key: str(self.folder / file) for key, file in files.items()}, "default")

    def _config(self, name: str, user: dict[str, str], namespace: str) -> Path:
        cluster = {"server": self.url, "certificate-authority": str(self.ca)}
        path = self.folder / f"{name}.kubeconfig"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": name, "namespace": namespace}}],
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
        }
        path.write_text(yaml.safe_dump(document))
        return path


def _call(event: dict[str, Any]) -> AuditedCall:
    about, code = event["objectRef"], event.get("responseStatus", {}).get("code", 0)
    resource = "/".join(filter(None, (about.get("resource", ""), about.get("subresource", ""))))
    return AuditedCall(
        user=event["user"]["username"],
        verb=event["verb"],
        group=about.get("apiGroup", ""),
        resource=resource,
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        code=code,
    )


def _version(api_server: Path) -> tuple[int, int]:
    """Return the version of a program that prints ``Kubernetes v1.20.2``."""
    output = subprocess.run([api_server, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"v(\d+)\.(\d+)", output)
    if match is None:
        raise RuntimeError(f"unexpected output of {api_server} --version: {output!r}")
    return int(match[1]), int(match[2])


def parent_death_launcher() -> list[str]:
    """Return a command prefix that ends the process with the *thread* that started it, if available."""
    program = shutil.which("setpriv")
    return [program, "--pdeathsig", "KILL", "--"] if program is not None else []


def _write_pair(pair: trustme.LeafCert, folder: Path, name: str) -> None:
    """Write NAME.crt, NAME.key, and both to NAME.pem."""
    (folder / f"{name}.crt").write_bytes(b"".join(part.bytes() for part in pair.cert_chain_pems))
    pair.private_key_pem.write_to_path(folder / f"{name}.key")
    pair.private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")


def _write_service_account_key(folder: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "service-account.key").write_bytes(key.private_bytes(*form))
