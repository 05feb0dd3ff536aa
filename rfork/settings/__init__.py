"""Settings of rfork and its planner, read from environment variables.

Nothing else in the two packages reads the environment. The variable of a setting is its class's prefix and its
name in upper case: `InstanceSettings.planner` is ``RFORK_PLANNER``, `PlannerSettings.lease_ttl_s` is
``RFORK_PLANNER_LEASE_TTL_S``.
"""

from __future__ import annotations

from rfork.settings.addresses import LOOPBACK, host_port, own_address, redacted
from rfork.settings.artifacts import ArtifactSettings
from rfork.settings.env import checked, load
from rfork.settings.instance import InstanceSettings, TransportName
from rfork.settings.kubernetes import KubernetesSettings
from rfork.settings.node import node_name, own_namespace
from rfork.settings.planner import IntegrationName, PlannerSettings
from rfork.settings.sidecar import SidecarSettings
from rfork.settings.storage import StorageSettings
from rfork.settings.tls import TlsSettings
from rfork.settings.tracing import TracingSettings

__all__ = [
    "LOOPBACK",
    "ArtifactSettings",
    "InstanceSettings",
    "IntegrationName",
    "KubernetesSettings",
    "PlannerSettings",
    "SidecarSettings",
    "StorageSettings",
    "TlsSettings",
    "TracingSettings",
    "TransportName",
    "checked",
    "host_port",
    "load",
    "node_name",
    "own_address",
    "own_namespace",
    "redacted",
]
