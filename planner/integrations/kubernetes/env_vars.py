"""Environment variables of an instance in a Pod, see `rfork.settings.InstanceSettings`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.manifests import Document
from planner.integrations.kubernetes.pod_request import InjectionRequest
from rfork.settings import KubernetesSettings

Variable = Document
"""An entry of a container's `env`."""

FILES_DIR: Final = "/opt/rfork"
"""Mount path of rfork's files."""
SOCKET_DIR: Final = "/run/rfork"
"""Directory of the sockets that instances on a node share; the same path on the node and in its Pods."""
TLS_DIR: Final = "/etc/rfork/tls"
TOKEN_KEY: Final = "token"
"""Key in the Secret `KubernetesSettings.token_secret`."""
PYTHON_PATH: Final = "PYTHONPATH"
OWN_PYTHON_PATH: Final = "RFORK_OWN_PYTHONPATH"
"""Original value of PYTHONPATH, if the Pod sets it with `valueFrom`."""


def environment(
    request: InjectionRequest,
    settings: KubernetesSettings,
    planner_url: str,
    *,
    same_host: bool,
    drains: bool,
) -> Iterator[Variable]:
    """Yield the variables, ordered so that each refers only to earlier ones.

    With `hostNetwork`, the Pod shares the node's address and ports: further instances on the node use the
    next free ports (RFORK_PORT_RANGE_SIZE). Annotations that are set at binding are empty if unknown, which
    counts as unset.
    """
    yield _value("RFORK_PLANNER", planner_url)
    yield _value("RFORK_MODEL", request.model)
    if request.version is not None:
        yield _value("RFORK_VERSION", request.version)
    yield _field("RFORK_REPLICA", "metadata.uid")
    yield _field("RFORK_POD_NAMESPACE", "metadata.namespace")
    yield _field("RFORK_POD_NAME", "metadata.name")
    yield {"name": "RFORK_POD", "value": "$(RFORK_POD_NAMESPACE)/$(RFORK_POD_NAME)"}
    yield _field("RFORK_NODE_NAME", "spec.nodeName")
    yield _field("RFORK_BIND", "status.podIP")
    yield _field("RFORK_ADVERTISE", "status.podIP")
    yield _value("RFORK_PEER_PORT", str(settings.peer_port))
    yield _value("RFORK_HTTP_PORT", str(settings.http_port))
    yield _value("RFORK_PORT_RANGE_SIZE", str(settings.port_range_size))
    yield _field("RFORK_ZONE", f"metadata.annotations['{names.ZONE}']")
    yield _field("RFORK_RACK", f"metadata.annotations['{names.RACK}']")
    yield _field("RFORK_NVLINK", f"metadata.annotations['{names.NVLINK}']")
    token = {"name": settings.token_secret, "key": TOKEN_KEY, "optional": True}
    yield {"name": "RFORK_TOKEN", "valueFrom": {"secretKeyRef": token}}
    if settings.tls_secret:
        yield _value("RFORK_TLS_CERTIFICATE", f"{TLS_DIR}/tls.crt")
        yield _value("RFORK_TLS_KEY", f"{TLS_DIR}/tls.key")
        yield _value("RFORK_TLS_CA", f"{TLS_DIR}/ca.crt")
    if request.snapshot is not None:
        # Not escaped: $(BUCKET) in the annotation refers to the container's variable.
        yield {"name": "RFORK_SNAPSHOT", "value": request.snapshot}
    if request.fail_if_not_forked:
        yield _value("RFORK_FAIL_IF_NOT_FORKED", "1")
    if same_host:
        yield _value("RFORK_UNIX_SOCKET_DIR", SOCKET_DIR)
    if drains:
        yield _value("RFORK_DRAIN_TIMEOUT_S", "0")  # the preStop hook has already waited for the readers


def python_path(variables: Iterable[Variable], folder: str, note: Callable[[str], None]) -> list[Variable]:
    """Return the variables with the directory first in PYTHONPATH. Idempotent.

    A `valueFrom` cannot be extended: it is kept under another name and referenced. A PYTHONPATH from the
    image or from `envFrom` is unknown here and gets replaced.
    """
    entries: list[Variable] = []
    found = False
    for variable in variables:
        if variable["name"] != PYTHON_PATH:
            entries.append(variable)
            continue
        found = True
        before = variable.get("value") or ""
        if variable.get("valueFrom"):
            note(f"{PYTHON_PATH} is set with valueFrom: its value is kept as {OWN_PYTHON_PATH}, after rfork's own path")
            entries.append({**variable, "name": OWN_PYTHON_PATH})
            before = f"$({OWN_PYTHON_PATH})"
        if folder not in before.split(":"):
            before = f"{folder}:{before}" if before else folder
        entries.append({"name": PYTHON_PATH, "value": before})
    return entries if found else [*entries, {"name": PYTHON_PATH, "value": folder}]


def includes(existing: object, injected: object) -> bool:
    """Return True if a document contains everything of ours. It may contain more, such as defaults."""
    if isinstance(existing, Mapping) and isinstance(injected, Mapping):
        return all(key in existing and includes(existing[key], value) for key, value in injected.items())
    return existing == injected


def _value(name: str, value: str) -> Variable:
    # Kubernetes expands $$ to $, and $(NAME) to a variable.
    return {"name": name, "value": value.replace("$", "$$")}


def _field(name: str, path: str) -> Variable:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
