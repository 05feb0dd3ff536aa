"""Settings of one inference instance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, StringConstraints, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from rfork.errors import SettingsError, reason_of
from rfork.schema.types import Label, ModelName, WeightsVersion
from rfork.settings.addresses import WILDCARDS, is_loopback, own_address
from rfork.settings.env import ADVANCED, Settings, load
from rfork.settings.node import node_name
from rfork.settings.tls import TlsSettings

TransportName = Literal["cuda_ipc", "shared_memory", "transfer_engine", "http", "nccl", "gloo"]
LogLevel = Literal["debug", "info", "warning", "error"]
ANY_PORT: Final = range(1)


class InstanceSettings(Settings):
    """Settings of one inference instance: a seed, relay or target."""

    model_config = SettingsConfigDict(env_prefix="RFORK_", env_ignore_empty=True, extra="forbid", frozen=True)

    # Planner.
    planner: str | None = Field(None, description="URL of the planner; unset: no forking, the fallbacks run immediately")
    token: SecretStr | None = Field(None, description="bearer token for the planner")
    token_file: Path | None = Field(None, description="file that contains the token; read again when it changes and when the planner rejects the token")
    owner_secret: Annotated[SecretStr, Field(min_length=32, max_length=256)] | None = Field(None, json_schema_extra=ADVANCED, description="secret that proves to the planner that a record belongs to this server, 32 to 256 characters; unset: generated, and shared by this user's processes of one `replica`")
    planner_timeout_s: float = Field(5.0, gt=0, json_schema_extra=ADVANCED, description="timeout of one planner request")

    # Network and location.
    bind: str = Field("127.0.0.1", description="address on which the peer service and the transports listen")
    advertise: str | None = Field(None, description="address at which other instances reach this one; unset: `bind`, or this host's address if `bind` is a wildcard")
    peer_port: int = Field(0, ge=0, le=65535, description="port of the gRPC peer service; 0: any free port")
    http_port: int = Field(0, ge=0, le=65535, description="port of the HTTP transport, and of the seed endpoint of `rfork sidecar`; 0: any free port")
    port_range_size: int = Field(1, ge=1, le=4096, json_schema_extra=ADVANCED, description="number of consecutive ports, starting at `peer_port` and at `http_port`, that are tried: ranks of a host and models of a process use the first free one")
    node_name: Label = Field(default_factory=node_name, description="name of this node: instances with the same name use same-host transports; unset: the host name, or the kernel's boot id inside a container")
    zone: Label | None = Field(None, description="zone of this node; the planner prefers sources in the same zone")
    rack: Label | None = Field(None, description="rack of this node; the planner prefers sources in the same rack")
    nvlink: Label | None = Field(None, description="NVLink domain of this node; the planner prefers sources in the same domain")
    pod: Label | None = Field(None, json_schema_extra=ADVANCED, description="namespace/name of this instance's Pod, shown by commands and the planner; set by the webhook")

    # Transports.
    transports: Annotated[tuple[TransportName, ...] | None, NoDecode] = Field(None, description="transports to use, comma separated, in order of preference; unset: all that this machine supports, except nccl and gloo")
    allow_unauthenticated_tcp: bool = Field(False, description="allow transfer_engine over plain TCP, where any process on a reader's host can read and write the shared memory")
    rdma_devices: str = Field("", description="RDMA devices for transfer_engine, comma separated; unset: those nearest to the GPU, or all for host memory")
    unix_socket_dir: Path | None = Field(None, description="directory for the Unix sockets of same-host transports, shared by all instances of the host; unset: abstract sockets, visible inside one network namespace")
    shm_mode: Literal["map", "copy"] = Field("map", json_schema_extra=ADVANCED, description="how weights are read from a source on the same host: `map` its pages copy-on-write, without additional memory, or `copy` them")

    # Target.
    deadline_s: float = Field(600.0, gt=0, description="time after which a fork is abandoned and the fallbacks start; extended while this instance reads storage and makes progress")
    no_source_timeout_s: float = Field(5.0, ge=0, description="time to wait for a first source before the fallbacks start")
    max_inflight_chunks: int = Field(4, ge=1, le=64, json_schema_extra=ADVANCED, description="maximum number of chunks in flight")
    source_idle_timeout_s: float = Field(10.0, gt=0, description="time without a byte after which a source is considered stalled and is replaced")
    storage_idle_timeout_s: float = Field(60.0, gt=0, json_schema_extra=ADVANCED, description="time without a byte from storage after which reading it, here or upstream, is considered stalled")
    min_source_bytes_per_s: int = Field(1 << 20, gt=0, json_schema_extra=ADVANCED, description="throughput below which a source is considered stalled")
    verify_chunks: bool = Field(True, json_schema_extra=ADVANCED, description="verify every chunk against the manifest; turn off only for measurements")
    resume_dir: Path | None = Field(None, description="directory, on a local disk or in /dev/shm, for verified chunks, so that a restarted process fetches only the missing ones; unset: nothing is kept")
    fail_if_not_forked: bool = Field(False, description="exit instead of falling back to the engine's own loader when the server can neither fork nor read the snapshot")

    # Served model.
    model: ModelName | None = Field(None, description="name under which instances of this model find each other; unset: the engine's model name")
    version: WeightsVersion | None = Field(None, description="version of the weights; only instances of the same version share weights; unset: the commit of a Hub model, otherwise a fingerprint of the files")
    replica: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = Field(None, description="prefix of the instance ids of all ranks of this server, unique for each server; set by `rfork launch`, the plug-ins and the webhook")
    cold_start: Literal["cooperative", "independent"] = Field("cooperative", json_schema_extra=ADVANCED, description="behaviour when no source has the weights: `cooperative` instances share one read of storage, `independent` ones each read it all")
    snapshot: str | None = Field(None, description="URI of a snapshot of the model (file, s3, gs, az, https), or of the directory with one snapshot per rank; read when no source has the weights")

    # Source.
    max_egress_bytes_per_s: int | None = Field(None, gt=0, description="maximum rate at which this instance sends weights, over all readers; unset: unlimited")
    max_latency_ratio: float = Field(1.03, ge=0, le=100, description="send more slowly while the engine's own steps take longer than this multiple of their undisturbed time; 0: never")
    max_readers: int = Field(4, ge=1, le=1 << 16, description="maximum number of forks that read from this instance concurrently")
    drain_timeout_s: float = Field(30.0, ge=0, description="time that a closing instance waits for its readers to finish")

    # Logs.
    log_json: bool = Field(False, description="write logs as JSON lines; also read by the planner and the Kubernetes integrations")
    log_level: LogLevel = Field("info", description="minimum log level; also read by the planner and the Kubernetes integrations")

    @field_validator("transports", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("RFORK_TOKEN and RFORK_TOKEN_FILE exclude each other: set one of them")
        return self

    @property
    def bearer(self) -> str | None:
        """Token for the planner, read from its file if there is one. Raises SettingsError."""
        if self.token_file is not None:
            try:
                return self.token_file.read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"RFORK_TOKEN_FILE: cannot read {self.token_file}: {reason_of(error)}") from None
        return self.token.get_secret_value() if self.token is not None else None

    @property
    def tls(self) -> TlsSettings:
        """TLS settings (``RFORK_TLS_*``), shared by every server and client of this process."""
        return load(TlsSettings)

    def ports_from(self, first: int) -> range:
        """Return the ports to try for a requested port, in order; only 0 if any port will do."""
        return range(first, min(first + self.port_range_size, 65536)) if first else ANY_PORT

    @property
    def advertised_host(self) -> str:
        """Address that is reported to other instances.

        Raises SettingsError if that is a loopback address and the planner runs on another host.
        """
        if self.advertise:
            return self.advertise
        if self.bind not in WILDCARDS:
            return self.bind
        address = own_address(self.bind)
        if is_loopback(address) and self._planner_is_remote:
            raise SettingsError(
                f"RFORK_BIND is {self.bind}, and this host has no address that other hosts can reach",
                hint="set RFORK_ADVERTISE, or RFORK_BIND to :: on an IPv6-only host",
            )
        return address

    @property
    def _planner_is_remote(self) -> bool:
        try:
            host = urlsplit(self.planner or "").hostname
        except ValueError:
            host = None
        return host is not None and not is_loopback(host)
