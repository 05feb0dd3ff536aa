"""What the planner's hooks into Kubernetes are told."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rfork.schema.types import Label
from rfork.settings.node import own_namespace


class KubernetesSettings(BaseSettings):
    """What the planner's hooks into Kubernetes are told, beside ``RFORK_PLANNER`` and ``RFORK_TOKEN``.

    Those two say where the planner is, for the hook itself; it needs an operator's token. What instances get
    are their own: `planner` and `token_secret` here.
    """

    model_config = SettingsConfigDict(
        env_prefix="RFORK_K8S_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    namespace: str = Field(default_factory=own_namespace, description="namespace of the hook's own objects; without: that of its Pod")
    identity: Label = Field(default_factory=socket.gethostname, description="what tells this process from its replicas; without: its host name, which is its Pod's")
    bind: str = Field("127.0.0.1", description="address that the webhook, the scaler and the probes listen on")
    health_port: int = Field(8081, ge=0, le=65535, description="port of /healthz, /readyz and /metrics of hooks that run in a process of their own; 0 picks one")
    kubeconfig: Path | None = Field(None, description="how to reach the cluster from outside of it; none: as a Pod, else as kubectl would")

    # The webhook: what Pods get.
    webhook_port: int = Field(9443, ge=0, le=65535, description="port that the API server calls, over TLS; 0 picks one")
    pod_planner_url: str | None = Field(None, description="URL of the planner that Pods are told; none: RFORK_PLANNER")
    injection_mode: Literal["none", "init", "image"] = Field("none", description="how rfork comes into containers whose image lacks it: by an `init` container, or as an `image` volume (Kubernetes 1.35)")
    injection_image: str = Field("", description="image that holds rfork's files, for `files`")
    image_volumes: bool = Field(False, description="whether the cluster knows image volumes (Kubernetes 1.35); where not, Pods with files by `image` are left as they are")
    token_secret: str = Field("rfork-instance", description="Secret of the Pod's own namespace whose key `token` is shown to the planner; it may be missing")
    tls_secret: str = Field("", description="Secret of the Pod's own namespace with tls.crt, tls.key and ca.crt, for TLS between instances; empty: none")
    readiness_gate: bool = Field(True, description="give Pods the gate rfork.dev/weights-ready; only where the controller runs, which opens it")
    same_host: bool = Field(False, description="let Pods of one node fork past the network, by a folder of sockets that they share (hostPath); a Pod's annotation goes first")
    drain_timeout_s: float = Field(60.0, ge=0, le=3600, description="most seconds that a Pod which ends waits for its readers; 0: no preStop hook")
    peer_port: int = Field(18700, ge=1, le=65535, description="first port of the peer services of a Pod's ranks")
    http_port: int = Field(18800, ge=1, le=65535, description="first port of their http transports")
    ports: int = Field(64, ge=1, le=4096, description="how many ports from each of the two on are used; NetworkPolicies have to let them through")

    # The webhook: its certificate.
    certificate_dir: Path | None = Field(None, description="folder with tls.crt and tls.key that others renew (cert-manager); none: the webhook makes its own, and renews it")
    certificate_secret: str = Field("rfork-webhook-tls", description="Secret that replicas of the webhook share their own certificate in")
    certificate_days: float = Field(90.0, gt=0, le=3650, description="days that an own certificate lives; it is renewed after two thirds of them")
    webhook_configuration: str = Field("rfork", description="MutatingWebhookConfiguration whose caBundle is kept up to date; empty: none is")
    webhook_hosts: Annotated[tuple[str, ...], NoDecode] = Field(("localhost", "127.0.0.1"), description="names and addresses that an own certificate is for, comma separated; in a cluster SERVICE.NAMESPACE.svc")

    # The controller.
    lease: str = Field("rfork-controller", description="Lease by which replicas of the controller choose the one that acts")
    lease_duration_s: float = Field(15.0, ge=1, description="seconds after which a leader that says nothing is replaced")
    poll_interval_s: float = Field(2.0, gt=0, description="seconds between two looks at the planner")
    scaleup_ttl_s: float = Field(900.0, gt=0, le=86_400, description="seconds that Pods of a scale-up may take to come; those are not waited for that come later")
    readiness_grace_s: float = Field(10.0, ge=0, description="seconds after which a Pod whose containers are ready is so too, if the planner does not know it; without a readinessProbe or startupProbe that says nothing, and it is `scaleup_s`")
    versions_s: float = Field(3600.0, gt=0, description="seconds after which several versions of a model among the Pods of one workload are reported; less than that is a rollout")
    inject_topology: bool = Field(True, description="tell Pods the zone, rack and NVLink domain of their node as they are bound to it, by the labels named next; off: Nodes are not watched")
    zone_label: str = Field("topology.kubernetes.io/zone", description="label of Nodes that tells their zone")
    rack_label: str = Field("topology.kubernetes.io/rack", description="label of Nodes that tells their rack")
    nvlink_label: str = Field("nvidia.com/gpu.clique", description="label of Nodes that tells their NVLink domain")

    # The scaler for KEDA.
    scaler_port: int = Field(9444, ge=0, le=65535, description="port that KEDA's gRPC calls come to; 0 picks one")
    engine_timeout_s: float = Field(2.0, gt=0, description="most seconds that one engine's /metrics may take")

    @field_validator("webhook_hosts", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _require_image(self) -> Self:
        if self.injection_mode != "none" and not self.injection_image:
            raise ValueError(f"files by {self.injection_mode} come from an image: set RFORK_K8S_INJECTION_IMAGE")
        return self
