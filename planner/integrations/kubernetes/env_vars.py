"""The environment that an instance in a Pod gets: variables of `rfork.settings.InstanceSettings`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.manifests import Document
from planner.integrations.kubernetes.pod_request import InjectionRequest
from rfork.settings import KubernetesSettings

Variable = Document
"""An entry of a container's `env`."""

FOLDER: Final = "/opt/rfork"
"""Where rfork's files are mounted."""
SOCKETS: Final = "/run/rfork"
"""Where sockets of one host lie, in the node as in its Pods."""
TLS: Final = "/etc/rfork/tls"
TOKEN_KEY: Final = "token"
"""The key of `KubernetesSettings.token_secret`."""
PYTHON_PATH: Final = "PYTHONPATH"
OWN_PYTHON_PATH: Final = "RFORK_OWN_PYTHONPATH"
"""What PYTHONPATH would have been, where the Pod takes it from elsewhere."""


def environment(
    request: InjectionRequest,
    settings: KubernetesSettings,
    planner_url: str,
    *,
    same_host: bool,
    drains: bool,
) -> Iterator[Variable]:
    """The variables, in the order that they may refer to one another in.

    With `hostNetwork` the Pod's address is its node's, and so is each port: instances of one node then take
    the next free ones (RFORK_PORT_RANGE_SIZE). Annotations that the Pod's binding does not bring are empty, as unset.
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
    yield _value("RFORK_PORT_RANGE_SIZE", str(settings.ports))
    yield _field("RFORK_ZONE", f"metadata.annotations['{names.ZONE}']")
    yield _field("RFORK_RACK", f"metadata.annotations['{names.RACK}']")
    yield _field("RFORK_NVLINK", f"metadata.annotations['{names.NVLINK}']")
    token = {"name": settings.token_secret, "key": TOKEN_KEY, "optional": True}
    yield {"name": "RFORK_TOKEN", "valueFrom": {"secretKeyRef": token}}
    if settings.tls_secret:
        yield _value("RFORK_TLS_CERTIFICATE", f"{TLS}/tls.crt")
        yield _value("RFORK_TLS_KEY", f"{TLS}/tls.key")
        yield _value("RFORK_TLS_CA", f"{TLS}/ca.crt")
    if request.snapshot is not None:
        # Not escaped: who writes $(BUCKET) in the annotation means the container's.
        yield {"name": "RFORK_SNAPSHOT", "value": request.snapshot}
    if request.required:
        yield _value("RFORK_FAIL_IF_NOT_FORKED", "1")
    if same_host:
        yield _value("RFORK_UNIX_SOCKET_DIR", SOCKETS)
    if drains:
        yield _value("RFORK_DRAIN_TIMEOUT_S", "0")  # the preStop hook has seen its readers off by then


def python_path(variables: Iterable[Variable], folder: str, note: Callable[[str], None]) -> list[Variable]:
    """The variables with the folder first in PYTHONPATH; again is harmless.

    A value that the Pod takes from elsewhere cannot be added to: it gets another name, which is referred to.
    What the image itself, or `envFrom`, sets as PYTHONPATH is not known here, and replaced.
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
            note(f"{PYTHON_PATH} is set from elsewhere: it is kept as {OWN_PYTHON_PATH}, behind rfork's own")
            entries.append({**variable, "name": OWN_PYTHON_PATH})
            before = f"$({OWN_PYTHON_PATH})"
        if folder not in before.split(":"):
            before = f"{folder}:{before}" if before else folder
        entries.append({"name": PYTHON_PATH, "value": before})
    return entries if found else [*entries, {"name": PYTHON_PATH, "value": folder}]


def includes(existing: object, injected: object) -> bool:
    """Whether a document says all that ours says; it may say more, as where defaults were filled in."""
    if isinstance(existing, Mapping) and isinstance(injected, Mapping):
        return all(key in existing and includes(existing[key], value) for key, value in injected.items())
    return existing == injected


def _value(name: str, value: str) -> Variable:
    # Kubernetes reads $$ as $, and $(NAME) as a reference.
    return {"name": name, "value": value.replace("$", "$$")}


def _field(name: str, path: str) -> Variable:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
