"""What an inference instance is told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, StringConstraints, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rfork.errors import SettingsError
from rfork.schema.types import Label, ModelName, WeightsVersion
from rfork.settings.addresses import WILDCARDS, is_loopback, own_address
from rfork.settings.env import load
from rfork.settings.node import node_name
from rfork.settings.tls import TlsSettings

TransportName = Literal["cuda_ipc", "shared_memory", "transfer_engine", "http", "nccl", "gloo"]


class InstanceSettings(BaseSettings):
    """What an inference instance (seed, relay or target) is told."""

    model_config = SettingsConfigDict(env_prefix="RFORK_", env_ignore_empty=True, extra="ignore", frozen=True)

    # The planner.
    planner: str | None = Field(None, description="URL of the planner; none: fall back at once")
    token: SecretStr | None = Field(None, description="bearer token shown to the planner")
    token_file: Path | None = Field(
        None, description="file that holds that token instead; read again when it changes, and when the planner refuses the token"
    )
    owner_secret: Annotated[SecretStr, Field(min_length=32, max_length=256)] | None = Field(
        None, description="secret that proves to the planner that a record is this server's own, at least 32 characters; none: drawn, and shared by this user's processes of one `replica` through a file in the temporary folder"
    )
    planner_timeout_s: float = Field(5.0, gt=0, description="most seconds one call to the planner may take")

    # Where this instance is, and how others reach it.
    bind: str = Field("127.0.0.1", description="address the peer service and the transports listen on")
    advertise: str | None = Field(
        None,
        description="address others reach this instance at; none: `bind`, or this host's address when bound to all",
    )
    peer_port: int = Field(0, ge=0, le=65535, description="port of the gRPC peer service; 0 picks one")
    http_port: int = Field(0, ge=0, le=65535, description="port of the http transport; 0 picks one")
    port_range_size: int = Field(
        1, ge=1, le=4096, description="how many ports from `peer_port`, and from `http_port`, on may be tried: the ranks of one host, and the models of one process, each take the first that is free"
    )
    node_name: Label = Field(
        default_factory=node_name,
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
    allow_unauthenticated_tcp: bool = Field(
        False,
        description="let transfer_engine run over plain TCP, where a lease lets the reader's whole host read, and write",
    )
    rdma_devices: str = Field(
        "", description="RDMA devices for transfer_engine, comma separated; empty: those nearest to the GPU (all, for host memory)"
    )
    unix_socket_dir: Path | None = Field(
        None,
        description="folder for the Unix sockets of same-host transports, shared by all instances of the host (hostPath, or an emptyDir of one pod); none: sockets without a file, which containers see that share the network namespace",
    )
    shm_mode: Literal["map", "copy"] = Field(
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
    no_source_timeout_s: float = Field(
        5.0,
        ge=0,
        description="most seconds a fork without any route waits for one before its fallback starts",
    )
    max_inflight_chunks: int = Field(4, ge=1, le=64, description="chunks in flight at once")
    source_idle_timeout_s: float = Field(
        10.0, gt=0, description="seconds without a byte after which a source counts as stalled"
    )
    storage_idle_timeout_s: float = Field(
        60.0,
        gt=0,
        description="seconds without a byte from storage (its own, or that of whom it waits for) "
        "after which that counts as stalled",
    )
    min_source_bytes_per_s: int = Field(1 << 20, gt=0, description="bytes a second below which a source counts as stalled")
    verify_chunks: bool = Field(True, description="check every chunk against the manifest; off only to measure")
    resume_dir: Path | None = Field(
        None,
        description="folder (local disk, or /dev/shm) where a fork keeps what it has verified, so that a process "
        "that dies and comes back fetches only what is missing; none: nothing is kept",
    )

    fail_if_not_forked: bool = Field(
        False, description="a server that cannot be forked (nor read the snapshot) does not start, instead of loading its weights by itself"
    )

    # The server that this process is part of.
    model: ModelName | None = Field(
        None, description="name that seeds and forks of this server meet under; none: the model's own, as the server was given it"
    )
    version: WeightsVersion | None = Field(
        None, description="which weights of the model these are: instances share weights only where their versions are equal; none: the commit of a hub id, else a fingerprint of the files that this instance would load"
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
    egress_share: float = Field(
        1.0, gt=0, le=100, description="share of the readers it wants, beside others that say 1"
    )
    max_egress_bytes_per_s: int | None = Field(
        None,
        gt=0,
        description="most bytes a second this instance gives in all; readers on one-sided transports keep to their "
        "part of it by themselves; none: no cap",
    )
    max_latency_ratio: float = Field(
        1.03,
        ge=0,
        le=100,
        description="this instance gives less while its own work takes longer than so many times what it takes "
        "alone (the engine tells: `Seed.observe`); 0: never",
    )
    serving_thread_nice: int = Field(
        5,
        ge=0,
        le=19,
        description="by how much the threads that give are nicer than the process, so that what serves goes first; "
        "much more, and one that holds Python's lock on a busy core holds up the others",
    )
    max_readers: int = Field(
        4, ge=1, le=1 << 16, description="most forks that may read from this instance at once"
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds a closing seed waits for its readers to finish")

    log_json: bool = Field(False, description="log as JSON lines instead of text")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )

    @field_validator("transports", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("RFORK_TOKEN and RFORK_TOKEN_FILE exclude each other: set one of them")
        return self

    @property
    def bearer(self) -> str | None:
        """The token shown to the planner, read from its file if it is in one. Raises SettingsError."""
        if self.token_file is not None:
            try:
                return self.token_file.read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"RFORK_TOKEN_FILE: cannot read {self.token_file}: {error}") from None
        return self.token.get_secret_value() if self.token is not None else None

    @property
    def tls(self) -> TlsSettings:
        """The TLS files (``RFORK_TLS_*``), shared by every server and client of this process."""
        return load(TlsSettings)

    def ports_from(self, first: int) -> range:
        """The ports that may be tried where `first` is asked for, in that order; just 0 where any will do."""
        return range(first, min(first + self.port_range_size, 65536)) if first else range(1)

    @property
    def advertised_host(self) -> str:
        """The address that others are told.

        Raises SettingsError where that would be loopback, though the planner is on another host.
        """
        if self.advertise:
            return self.advertise
        if self.bind not in WILDCARDS:
            return self.bind
        address = own_address(self.bind)
        if is_loopback(address) and self._planner_is_remote:
            raise SettingsError(
                f"RFORK_BIND is {self.bind}, and no address is known that others reach this host at",
                hint="set RFORK_ADVERTISE to one, or RFORK_BIND to :: where the host has IPv6 only",
            )
        return address

    @property
    def _planner_is_remote(self) -> bool:
        try:
            node_name = urlsplit(self.planner or "").hostname
        except ValueError:
            node_name = None
        return node_name is not None and not is_loopback(node_name)
