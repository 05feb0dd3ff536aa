"""Every option of rfork and of its planner, and the environment variable that sets it.

Nothing else in the two packages reads the environment. An option's name in upper case behind the
prefix is its variable: `Settings.planner` is ``RFORK_PLANNER``, `PlannerSettings.lease_ttl_s` is
``RFORK_PLANNER_LEASE_TTL_S``.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, SecretStr, StringConstraints, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rfork.errors import SettingsError
from rfork.fields import Label, ModelName

TransportName = Literal["cuda_ipc", "shared_memory", "transfer_engine", "http", "nccl", "gloo"]
HookName = Literal["webhook", "controller", "scaler"]
FIRST_UTS = "uts:[4026531838]"
"""The namespace of the node's own host name, in every Linux kernel (PROC_UTS_INIT_INO in proc_ns.h)."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class TlsSettings(BaseSettings):
    """Files for TLS; with `ca` on a server, clients must show a certificate (mTLS)."""

    model_config = SettingsConfigDict(
        env_prefix="RFORK_TLS_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    certificate: Path | None = Field(None, description="PEM certificate chain this process shows")
    key: Path | None = Field(None, description="PEM private key of `certificate`")
    ca: Path | None = Field(None, description="PEM authorities this process trusts")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together: set both or neither")
        return self

    @property
    def serves(self) -> bool:
        """Whether servers of this process speak TLS."""
        return self.certificate is not None

    @property
    def enabled(self) -> bool:
        """Whether any side of this process speaks TLS."""
        return self.serves or self.ca is not None


class TracingSettings(BaseSettings):
    """Where spans go (OpenTelemetry, OTLP over HTTP); the same for instances, planner and hooks."""

    model_config = SettingsConfigDict(
        env_prefix="RFORK_TRACING_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    endpoint: str | None = Field(None, description="URL of an OTLP collector, http://HOST:4318; none: nothing is traced")
    share: float = Field(1.0, ge=0, le=1, description="part of the traces that begin here which is sent; one that came with a call is sent if its caller sends it")
    headers: SecretStr | None = Field(None, description="NAME=VALUE, comma separated: headers shown to the collector")


class Settings(BaseSettings):
    """What an inference instance (seed, relay or target) is told."""

    model_config = SettingsConfigDict(env_prefix="RFORK_", env_ignore_empty=True, extra="ignore", frozen=True)

    # The planner.
    planner: str | None = Field(None, description="URL of the planner; none: fall back at once")
    token: SecretStr | None = Field(None, description="bearer token shown to the planner")
    planner_timeout_s: float = Field(5.0, gt=0, description="most seconds one call to the planner may take")

    # Where this instance is, and how others reach it.
    bind: str = Field("127.0.0.1", description="address the peer service and the transports listen on")
    advertise: str | None = Field(
        None,
        description="address others reach this instance at; none: `bind`, or this host's address when bound to all",
    )
    peer_port: int = Field(0, ge=0, le=65535, description="port of the gRPC peer service; 0 picks one")
    http_port: int = Field(0, ge=0, le=65535, description="port of the http transport; 0 picks one")
    ports: int = Field(
        1, ge=1, le=4096, description="how many ports from `peer_port`, and from `http_port`, on may be tried: the ranks of one host, and the models of one process, each take the first that is free"
    )
    host: Label = Field(
        default_factory=lambda: node_name(),
        description="name of this node: instances with one name share a host; without: its host name, or, in a container that has a host name of its own, the kernel's boot id, which all containers of a node see",
    )
    rack: Label | None = Field(None, description="rack label, for planning")
    zone: Label | None = Field(None, description="zone label, for planning")
    nvlink: Label | None = Field(None, description="NVLink domain label, for planning")
    pod: Label | None = Field(None, description="namespace/name of the Kubernetes Pod it runs in, which people are told")

    # Transports.
    transports: Annotated[tuple[TransportName, ...] | None, NoDecode] = Field(
        None,
        description="transports to use, best first, comma separated; none: chosen by what this machine has",
    )
    unguarded_tcp: bool = Field(
        False,
        description="let transfer_engine run over plain TCP, where a lease lets the reader's whole host read, and write",
    )
    rdma_devices: str = Field(
        "", description="RDMA devices for transfer_engine, comma separated; empty: those nearest to the GPU (all, for host memory)"
    )
    local_sockets: Path | None = Field(
        None,
        description="folder for the Unix sockets of same-host transports, shared by all instances of the host (hostPath, or an emptyDir of one pod); none: sockets without a file, which containers see that share the network namespace",
    )
    shared_memory: Literal["map", "copy"] = Field(
        "map",
        description="how weights are taken from a source on the same host: `map` its pages, copy on write, which takes no further memory; or `copy` them",
    )

    # Receiving.
    deadline_s: float = Field(
        600.0,
        gt=0,
        description="most seconds a fork may take before its fallback starts; "
        "put off as long as this instance itself reads storage, for all that wait, and that advances",
    )
    patience_s: float = Field(
        5.0,
        ge=0,
        description="most seconds a fork without any route waits for one before its fallback starts",
    )
    window: int = Field(4, ge=1, le=64, description="chunks in flight at once")
    stall_s: float = Field(
        10.0, gt=0, description="seconds without a byte after which a source counts as stalled"
    )
    storage_stall_s: float = Field(
        60.0,
        gt=0,
        description="seconds without a byte from storage (its own, or that of whom it waits for) "
        "after which that counts as stalled",
    )
    min_rate: int = Field(1 << 20, gt=0, description="bytes a second below which a source counts as stalled")
    verify: bool = Field(True, description="check every chunk against the manifest; off only to measure")
    resume: Path | None = Field(
        None,
        description="folder (local disk, or /dev/shm) where a fork keeps what it has verified, so that a process "
        "that dies and comes back fetches only what is missing; none: nothing is kept",
    )

    required: bool = Field(
        False, description="a server that cannot be forked (nor read the snapshot) does not start, instead of loading its weights by itself"
    )

    # The server that this process is part of.
    model: ModelName | None = Field(
        None, description="name that seeds and forks of this server meet under; none: the model's own, as the server was given it"
    )
    replica: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = Field(
        None, description="what the instance ids of all ranks of one server begin with; unique for each server, as two with one name are drained together; set by `rfork launch` and the plug-ins"
    )

    # The cold start.
    cold_start: Literal["share", "own"] = Field(
        "share",
        description="nobody holds the image: `share` one read among those that wait, or each reads its `own`",
    )
    snapshot: str | None = Field(
        None,
        description="URI of a snapshot of this model (file:///…, s3://…, https://…), or of the folder that holds one for each rank; read where nobody holds the image",
    )

    # Giving.
    weight: float = Field(
        1.0, gt=0, le=100, description="share of the readers it wants, beside others that say 1"
    )
    egress_rate: int | None = Field(
        None,
        gt=0,
        description="most bytes a second this instance gives in all; readers on one-sided transports keep to their "
        "part of it by themselves; none: no cap",
    )
    latency_setpoint: float = Field(
        1.03,
        ge=0,
        le=100,
        description="this instance gives less while its own work takes longer than so many times what it takes "
        "alone (the engine tells: `Seed.observe`); 0: never",
    )
    giving_nice: int = Field(
        5,
        ge=0,
        le=19,
        description="by how much the threads that give are nicer than the process, so that what serves goes first; "
        "much more, and one that holds Python's lock on a busy core holds up the others",
    )
    max_readers: int = Field(
        4, ge=1, le=1 << 16, description="most forks that may read from this instance at once"
    )
    drain_s: float = Field(30.0, ge=0, description="seconds a closing seed waits for its readers to finish")

    log_json: bool = Field(False, description="log as JSON lines instead of text")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )

    @field_validator("transports", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value

    @property
    def tls(self) -> TlsSettings:
        """The TLS files (``RFORK_TLS_*``), shared by every server and client of this process."""
        return load(TlsSettings)

    def ports_from(self, first: int) -> range:
        """The ports that may be tried where `first` is asked for, in that order; just 0 where any will do."""
        return range(first, min(first + self.ports, 65536)) if first else range(1)

    @property
    def reachable_at(self) -> str:
        """The address that others are told."""
        if self.advertise:
            return self.advertise
        if self.bind in ("0.0.0.0", "::"):
            return own_address()
        return self.bind


class StorageSettings(BaseSettings):
    """How tensor files are read and written, on disk, in S3 and its like, or behind HTTP.

    Credentials of object stores are found where their own tools look for them: AWS's environment variables,
    profiles, web identity (IRSA) and instance metadata.
    """

    model_config = SettingsConfigDict(
        env_prefix="RFORK_STORAGE_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    streams: int = Field(8, ge=1, le=256, description="reads, or parts of a write, in flight at once")
    memory: int = Field(
        128 << 20,
        ge=16 << 20,
        description="most bytes of staging memory, beside the tensors themselves; fewer streams are used where it is short",
    )
    direct: Literal["auto", "always", "never"] = Field(
        "auto", description="read local files past the page cache: `auto` where they are not in it and it is faster"
    )
    timeout_s: float = Field(10.0, gt=0, description="seconds for an answer's head, and for each 16 KiB of its body, after which a request is sent again; a read fails no sooner than that")
    attempts: int = Field(5, ge=1, le=100, description="least times that one range is asked for before the read fails")
    hedge: float = Field(
        4.0,
        ge=0,
        description="a request that takes so many times as long as most do is sent a second time, and whichever answers first counts; 0: never",
    )
    http_token: SecretStr | None = Field(None, description="bearer token shown to http(s):// storage, not to hosts it redirects to")
    ca: Path | None = Field(None, description="PEM authorities that storage servers are checked by; none: the system's")

    s3_endpoint: str | None = Field(None, description="URL of the S3 service; none: AWS, or what the profile says")
    s3_region: str | None = Field(None, description="region; none: what the profile says, or us-east-1")
    s3_profile: str | None = Field(None, description="profile of AWS's configuration files")
    s3_addressing: Literal["auto", "path", "virtual"] = Field(
        "auto", description="where the bucket is named: in the `path` or in the host (`virtual`); `auto`: path with an endpoint that is not AWS's"
    )
    s3_anonymous: bool = Field(False, description="send no credentials: public buckets")


class ArtifactSettings(BaseSettings):
    """Which JIT caches travel between instances, where they lie, and how much of them is taken.

    They are programs: off unless `kinds` names some. Where an engine or library was told to keep its cache by a
    variable of its own, that one holds here too.
    """

    model_config = SettingsConfigDict(
        env_prefix="RFORK_ARTIFACTS_", env_ignore_empty=True, extra="ignore", frozen=True, populate_by_name=True
    )

    kinds: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="caches to give and take, comma separated (`rfork artifacts ls` names them), or `all`; none: off"
    )
    folders: Annotated[tuple[tuple[str, Path], ...], NoDecode] = Field(
        (), description="KIND=PATH, comma separated: where a cache lies instead; also of kinds that rfork does not know"
    )
    most_bytes: int = Field(4 << 30, gt=0, description="most bytes that are given or taken; they are held in memory")
    most_files: int = Field(200_000, ge=1, le=1_000_000, description="most files that are given or taken")
    settle_s: float = Field(
        5.0, ge=0, description="seconds since its last change after which a file counts as whole; younger ones are left out"
    )
    deadline_s: float = Field(120.0, gt=0, description="most seconds that taking them may hold up a start")
    interval_s: float = Field(30.0, gt=0, description="seconds after which `rfork artifacts seed` looks for new files")
    peer_port: int = Field(0, ge=0, le=65535, description="port of the gRPC peer service that gives them; 0 picks one")
    http_port: int = Field(0, ge=0, le=65535, description="port of the http transport that gives them; 0 picks one")

    # What others call their folders.
    home: Path = Field(default_factory=lambda: _home(), description="where caches lie that nothing moves")
    xdg_cache_home: Path | None = Field(None, validation_alias="XDG_CACHE_HOME", description="vLLM's, without `VLLM_CACHE_ROOT`")
    triton_cache_dir: Path | None = Field(None, validation_alias="TRITON_CACHE_DIR", description="Triton's")
    triton_home: Path | None = Field(None, validation_alias="TRITON_HOME", description="Triton's, without `TRITON_CACHE_DIR`")
    torchinductor_cache_dir: Path = Field(
        default_factory=lambda: _inductor_folder(), validation_alias="TORCHINDUCTOR_CACHE_DIR", description="torch.compile's"
    )
    flashinfer_workspace_base: Path | None = Field(None, validation_alias="FLASHINFER_WORKSPACE_BASE", description="FlashInfer's")
    dg_jit_cache_dir: Path | None = Field(None, validation_alias="DG_JIT_CACHE_DIR", description="DeepGEMM's")
    sglang_dg_cache_dir: Path | None = Field(None, validation_alias="SGLANG_DG_CACHE_DIR", description="DeepGEMM's, under SGLang")
    sglang_cache_dir: Path | None = Field(None, validation_alias="SGLANG_CACHE_DIR", description="SGLang's torch.compile")
    vllm_cache_root: Path | None = Field(None, validation_alias="VLLM_CACHE_ROOT", description="vLLM's")
    tvm_ffi_cache_dir: Path | None = Field(None, validation_alias="TVM_FFI_CACHE_DIR", description="tvm-ffi's (SGLang's kernels)")

    @field_validator("kinds", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @field_validator("folders", mode="before")
    @classmethod
    def _placed(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [item.strip().partition("=") for item in value.split(",") if item.strip()]
        if any(not name or not path for name, _, path in pairs):
            raise ValueError("each is KIND=PATH")
        return tuple((name.strip(), Path(path.strip())) for name, _, path in pairs)


class PlannerSettings(BaseSettings):
    """What the planner is told."""

    model_config = SettingsConfigDict(
        env_prefix="RFORK_PLANNER_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    bind: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8700, ge=0, le=65535, description="port to listen on; 0 picks one")
    token: SecretStr | None = Field(
        None, description="bearer token that may do everything; none, and no `tokens`: open to all"
    )
    tokens: Path | None = Field(
        None,
        description="file of further tokens, one `ROLE TOKEN` a line (roles: instance, operator, reader); read again when it changes",
    )
    secret: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="keys that lease tokens are derived from, comma separated: the first signs, the others still open; none: a new one at each start",
    )
    store: str = Field("memory", description="`memory`, or redis://HOST:PORT/DB for several replicas")
    store_timeout_s: float = Field(2.0, gt=0, description="most seconds one call to the store may take")
    batch_s: float = Field(
        0.01,
        ge=0,
        description="seconds that the first of several arrivals waits, so that they share one plan",
    )
    gather_s: float = Field(
        2.0,
        ge=0,
        le=4,  # a fork whose first call is not answered in time (`Settings.planner_timeout_s`) does not ask again
        description="most seconds that the first fork of an announced scale-up waits for the others, to share one plan; less than RFORK_PLANNER_TIMEOUT_S of instances",
    )
    hooks: Annotated[tuple[HookName, ...], NoDecode] = Field(
        (), description="hooks that run in the planner's process, comma separated (`rfork hook` runs them in one of their own); none: no hook"
    )
    rate_limit: float = Field(
        0.0, ge=0, description="requests a second that one caller (token and address) may send; 0: no limit"
    )
    max_body: int = Field(4 << 20, gt=0, description="largest request body, in bytes")
    lease_ttl_s: float = Field(30.0, gt=0, description="seconds a lease lives unless renewed")
    heartbeat_s: float = Field(5.0, gt=0, description="seconds between an instance's heartbeats")
    forget_s: float = Field(20.0, gt=0, description="seconds of silence after which an instance is forgotten")
    quarantine_s: float = Field(
        60.0, ge=0, description="seconds a source that lied or stalled gets no reader"
    )
    keep_forks: int = Field(1000, ge=1, description="finished forks kept for the lists")
    log_json: bool = Field(False, description="log as JSON lines instead of text")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )

    @field_validator("secret", mode="before")
    @classmethod
    def _keys(cls, value: object) -> object:
        return tuple(key.strip() for key in value.split(",")) if isinstance(value, str) else value

    @field_validator("hooks", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _shared(self) -> Self:
        if self.store != "memory" and not self.store.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("store is `memory` or a redis:// URL")
        if self.store != "memory" and not self.secret:
            raise ValueError("replicas that share a store must share the lease key: set RFORK_PLANNER_SECRET")
        return self

    @property
    def tls(self) -> TlsSettings:
        """The TLS files (``RFORK_TLS_*``)."""
        return load(TlsSettings)


class HookSettings(BaseSettings):
    """What the planner's hooks into Kubernetes are told, beside ``RFORK_PLANNER`` and ``RFORK_TOKEN``.

    Those two say where the planner is, for the hook itself; it needs an operator's token. What instances get
    are their own: `planner` and `token_secret` here.
    """

    model_config = SettingsConfigDict(
        env_prefix="RFORK_HOOK_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    namespace: str = Field(default_factory=lambda: own_namespace(), description="namespace of the hook's own objects; without: that of its Pod")
    identity: Label = Field(default_factory=socket.gethostname, description="what tells this process from its replicas; without: its host name, which is its Pod's")
    bind: str = Field("127.0.0.1", description="address that the webhook, the scaler and the probes listen on")
    health_port: int = Field(8081, ge=0, le=65535, description="port of /healthz, /readyz and /metrics of hooks that run in a process of their own; 0 picks one")
    kubeconfig: Path | None = Field(None, description="how to reach the cluster from outside of it; none: as a Pod, else as kubectl would")

    # The webhook: what Pods get.
    webhook_port: int = Field(9443, ge=0, le=65535, description="port that the API server calls, over TLS; 0 picks one")
    planner: str | None = Field(None, description="URL of the planner that Pods are told; none: RFORK_PLANNER")
    files: Literal["none", "init", "image"] = Field("none", description="how rfork comes into containers whose image lacks it: by an `init` container, or as an `image` volume (Kubernetes 1.35)")
    image: str = Field("", description="image that holds rfork's files, for `files`")
    image_volumes: bool = Field(False, description="whether the cluster knows image volumes (Kubernetes 1.35); where not, Pods with files by `image` are left as they are")
    token_secret: str = Field("rfork-instance", description="Secret of the Pod's own namespace whose key `token` is shown to the planner; it may be missing")
    ca_secret: str = Field("", description="Secret of the Pod's own namespace with tls.crt, tls.key and ca.crt, for TLS between instances; empty: none")
    readiness_gate: bool = Field(True, description="give Pods the gate rfork.dev/weights-ready; only where the controller runs, which opens it")
    same_host: bool = Field(False, description="let Pods of one node fork past the network, by a folder of sockets that they share (hostPath); a Pod's annotation goes first")
    drain_s: float = Field(60.0, ge=0, le=3600, description="most seconds that a Pod which ends waits for its readers; 0: no preStop hook")
    peer_port: int = Field(18700, ge=1, le=65535, description="first port of the peer services of a Pod's ranks")
    http_port: int = Field(18800, ge=1, le=65535, description="first port of their http transports")
    ports: int = Field(64, ge=1, le=4096, description="how many ports from each of the two on are used; NetworkPolicies have to let them through")

    # The webhook: its certificate.
    certificates: Path | None = Field(None, description="folder with tls.crt and tls.key that others renew (cert-manager); none: the webhook makes its own, and renews it")
    certificate_secret: str = Field("rfork-webhook-tls", description="Secret that replicas of the webhook share their own certificate in")
    certificate_days: float = Field(90.0, gt=0, le=3650, description="days that an own certificate lives; it is renewed after two thirds of them")
    webhook_configuration: str = Field("rfork", description="MutatingWebhookConfiguration whose caBundle is kept up to date; empty: none is")
    webhook_hosts: Annotated[tuple[str, ...], NoDecode] = Field(("localhost", "127.0.0.1"), description="names and addresses that an own certificate is for, comma separated; in a cluster SERVICE.NAMESPACE.svc")

    # The controller.
    lease: str = Field("rfork-controller", description="Lease by which replicas of the controller choose the one that acts")
    lease_s: float = Field(15.0, ge=1, description="seconds after which a leader that says nothing is replaced")
    look_s: float = Field(2.0, gt=0, description="seconds between two looks at the planner")
    scaleup_s: float = Field(900.0, gt=0, le=86_400, description="seconds that Pods of a scale-up may take to come; those are not waited for that come later")
    grace_s: float = Field(10.0, ge=0, description="seconds after which a Pod whose containers are ready is so too, if the planner does not know it; without a readinessProbe or startupProbe that says nothing, and it is `scaleup_s`")
    topology: bool = Field(True, description="tell Pods the zone, rack and NVLink domain of their node as they are bound to it, by the labels named next; off: Nodes are not watched")
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
    def _whole(self) -> Self:
        if self.files != "none" and not self.image:
            raise ValueError(f"files by {self.files} come from an image: set RFORK_HOOK_IMAGE")
        return self


class SidecarSettings(BaseSettings):
    """What `rfork sidecar` is told beside `Settings`."""

    model_config = SettingsConfigDict(
        env_prefix="RFORK_SIDECAR_", env_ignore_empty=True, extra="ignore", frozen=True, populate_by_name=True
    )

    engine: str | None = Field(None, description="URL of the SGLang server beside it")
    engine_token: SecretStr | None = Field(None, description="the server's --api-key, if it has one")
    model: str | None = Field(None, description="name that its weights are given under; none: the name it serves")
    client_of: str | None = Field(None, description="name of the model whose seeds it gives to clients; none: it answers no clients")
    bind: str = Field("127.0.0.1", description="address that clients ask at; they show no token")
    port: int = Field(8710, ge=0, le=65535, description="port that clients ask at; 0 picks one")
    seed_port: int = Field(0, ge=0, le=65535, description="port, at `RFORK_BIND`, that other sidecars ask at, who show a lease; 0 picks one")
    look_s: float = Field(5.0, gt=0, description="seconds between two looks at the server's health")
    wait_s: float = Field(60.0, ge=0, description="most seconds that a client waits for a seed with a place")
    hold_s: float = Field(600.0, gt=0, description="most seconds that a client's lease is held for while its server is not yet healthy")
    mooncake_protocol: str = Field("rdma", validation_alias="MOONCAKE_PROTOCOL", description="what the server's TransferEngine runs over")


def node_name(proc: Path = Path("/proc")) -> str:
    """What this node is called where nobody says it: one name for all containers of a node.

    A container's host name is its own, so two of one node would not know that they share it. The boot id is
    the node's, but says nothing to people: it stands in only where the host name is not the node's.
    """
    try:
        namespace = os.readlink(proc / "self/ns/uts")
        boot_id = (proc / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return socket.gethostname()
    if namespace == FIRST_UTS or not boot_id:
        return socket.gethostname()
    return f"boot-{boot_id.replace('-', '')[:16]}"


def own_namespace(file: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")) -> str:
    """The namespace of the Pod that this process runs in; ``default`` outside of one."""
    try:
        return file.read_text("utf-8").strip() or "default"
    except (OSError, UnicodeDecodeError):
        return "default"


def own_address() -> str:
    """This host's address on the interface of its default route; loopback where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # A connected UDP socket sends nothing: the kernel only picks the source address.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _home() -> Path:
    """The user's home; ``~`` where there is none, which is an error only for who needs it."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("~")


def _inductor_folder() -> Path:
    """Where torch.compile keeps its cache when it is told nothing: by the user's name, in the temporary folder."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


Kind = TypeVar("Kind", bound=BaseSettings)


def load(kind: type[Kind], **overrides: object) -> Kind:
    """Read `kind` from the environment, with `overrides` (None means: not given) on top.

    Raises SettingsError, one line naming the variable, when a value cannot be used.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return kind(**given)  # type: ignore[arg-type]  # pydantic validates each value
    except ValidationError as error:
        first = error.errors()[0]
        prefix = kind.model_config.get("env_prefix", "")
        name = f"{prefix}{'_'.join(str(part) for part in first['loc'][:1]).upper()}".rstrip("_")
        got = f" (got {first['input']!r})" if first["loc"] else ""
        raise SettingsError(f"{name}: {first['msg'].removeprefix('Value error, ')}{got}") from None


def host_port(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
