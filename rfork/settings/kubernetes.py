"""Settings of the planner's Kubernetes integrations."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from rfork.schema.types import Label
from rfork.settings.env import ADVANCED, ExternalSettings
from rfork.settings.node import own_namespace


class KubernetesSettings(ExternalSettings):
    """Settings of the webhook, the controller and the scaler, in addition to ``RFORK_PLANNER`` and ``RFORK_TOKEN``.

    Those two name the planner that the integration itself uses, with an operator's token. Pods receive
    `pod_planner_url` and the token in `token_secret`.
    """

    model_config = SettingsConfigDict(env_prefix="RFORK_K8S_", env_ignore_empty=True, extra="forbid", frozen=True, populate_by_name=True)

    # Variables that Kubernetes' own tools use.
    namespace: str = Field(default_factory=own_namespace, validation_alias="POD_NAMESPACE", description="namespace of the integrations' own objects; unset: that of the Pod's ServiceAccount")
    identity: Label = Field(default_factory=socket.gethostname, validation_alias="POD_NAME", description="name that distinguishes this replica from others; unset: the host name")
    kubeconfig: Path | None = Field(None, validation_alias="KUBECONFIG", description="kubeconfig file of the cluster; unset: the Pod's ServiceAccount, then ~/.kube/config")

    bind: str = Field("127.0.0.1", json_schema_extra=ADVANCED, description="address on which the webhook, the scaler and the health endpoint listen")
    health_port: int = Field(8081, ge=0, le=65535, json_schema_extra=ADVANCED, description="port of /healthz, /readyz and /metrics of `rfork k8s`; 0: any free port")

    # Webhook.
    webhook_port: int = Field(9443, ge=0, le=65535, json_schema_extra=ADVANCED, description="port on which the API server calls the webhook (TLS); 0: any free port")
    pod_planner_url: str | None = Field(None, description="URL of the planner that Pods receive; unset: RFORK_PLANNER")
    injection_mode: Literal["none", "init", "image"] = Field("none", description="how rfork is added to containers whose image lacks it: `none`, `init` (init container) or `image` (image volume, Kubernetes 1.35)")
    injection_image: str = Field("", description="image that contains rfork's files")
    image_volumes: bool = Field(False, json_schema_extra=ADVANCED, description="the cluster supports image volumes (Kubernetes 1.35); if not, Pods that request injection by `image` are not changed")
    token_secret: str = Field("rfork-instance", json_schema_extra=ADVANCED, description="Secret in the Pod's namespace whose key `token` is the Pod's planner token; it may be missing")
    tls_secret: str = Field("", description="Secret in the Pod's namespace with tls.crt, tls.key and ca.crt for mutual TLS between instances; unset: no TLS")
    readiness_gate: bool = Field(True, json_schema_extra=ADVANCED, description="add the readiness gate rfork.dev/weights-ready to Pods; requires the controller")
    same_host: bool = Field(False, json_schema_extra=ADVANCED, description="mount a shared socket directory (hostPath), so that Pods of a node use same-host transports; a Pod's annotation has precedence")
    drain_timeout_s: float = Field(60.0, ge=0, le=3600, json_schema_extra=ADVANCED, description="time that a terminating Pod waits for its readers (preStop hook); 0: no hook; a Pod's annotation has precedence")
    peer_port: int = Field(18700, ge=1, le=65535, json_schema_extra=ADVANCED, description="first port of the peer services of a Pod's ranks")
    http_port: int = Field(18800, ge=1, le=65535, json_schema_extra=ADVANCED, description="first port of the HTTP transports of a Pod's ranks")
    port_range_size: int = Field(64, ge=1, le=4096, json_schema_extra=ADVANCED, description="number of ports from each of these two; NetworkPolicies must allow them")

    # Certificate of the webhook.
    certificate_dir: Path | None = Field(None, description="directory with tls.crt and tls.key that are renewed externally (cert-manager); unset: the webhook creates and renews its own certificate")
    certificate_secret: str = Field("rfork-webhook-tls", json_schema_extra=ADVANCED, description="Secret in which the replicas of the webhook share their own certificate")
    webhook_configuration: str = Field("rfork", json_schema_extra=ADVANCED, description="MutatingWebhookConfiguration whose caBundle is kept up to date; empty: none")
    webhook_hosts: Annotated[tuple[str, ...], NoDecode] = Field(("localhost", "127.0.0.1"), json_schema_extra=ADVANCED, description="DNS names and addresses of the webhook's own certificate, comma separated; in a cluster SERVICE.NAMESPACE.svc")

    # Controller.
    lease: str = Field("rfork-controller", json_schema_extra=ADVANCED, description="Lease with which the replicas of the controller elect a leader")
    lease_duration_s: float = Field(15.0, ge=1, json_schema_extra=ADVANCED, description="time after which a leader that does not renew its Lease is replaced")
    poll_interval_s: float = Field(2.0, gt=0, json_schema_extra=ADVANCED, description="interval at which the controller polls the planner")
    scaleup_ttl_s: float = Field(900.0, gt=0, le=86_400, json_schema_extra=ADVANCED, description="time within which the Pods of a scale-up must appear; later ones are not waited for")
    readiness_grace_s: float = Field(10.0, ge=0, json_schema_extra=ADVANCED, description="time after which a Pod with ready containers becomes ready although the planner does not know it; `scaleup_ttl_s` without a readinessProbe or startupProbe")
    inject_topology: bool = Field(True, description="pass zone, rack and NVLink domain of its node to each Pod when it is bound, from the labels below; off: nodes are not watched")
    zone_label: str = Field("topology.kubernetes.io/zone", json_schema_extra=ADVANCED, description="node label that contains the zone")
    rack_label: str = Field("topology.kubernetes.io/rack", json_schema_extra=ADVANCED, description="node label that contains the rack")
    nvlink_label: str = Field("nvidia.com/gpu.clique", json_schema_extra=ADVANCED, description="node label that contains the NVLink domain")

    # Scaler for KEDA.
    scaler_port: int = Field(9444, ge=0, le=65535, description="port of the external scaler for KEDA (gRPC); 0: any free port")

    @field_validator("webhook_hosts", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _require_image(self) -> Self:
        if self.injection_mode != "none" and not self.injection_image:
            raise ValueError(
                f"RFORK_K8S_INJECTION_IMAGE is not set, but RFORK_K8S_INJECTION_MODE is {self.injection_mode}"
            )
        return self
