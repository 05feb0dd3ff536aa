"""Settings of rfork and its planner, read from environment variables.

Nothing else in the two packages reads the environment. The variable of a setting is its class's prefix and its
name in upper case: `InstanceSettings.planner` is ``RFORK_PLANNER``, `PlannerSettings.lease_ttl_s` is
``RFORK_PLANNER_LEASE_TTL_S``.

Written on pydantic alone: importing pydantic-settings takes 40 ms, for sources that are not used here.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from typing_extensions import Self

from rfork.addresses import WILDCARDS, is_loopback, own_address
from rfork.errors import SettingsError, reason_of
from rfork.schema import Label, ModelName, Placement, StrictCopyModel, WeightsVersion
from rfork.weights_version import is_shareable

COMMA_SEPARATED: Final = BeforeValidator(
    lambda value: tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value
)
"""Splits the text of a variable at commas, and ignores empty items."""
ADVANCED: Final[JsonDict] = {"advanced": True}
"""`json_schema_extra` of a field that few users need: documented in a separate table, and not a launcher flag."""


class Settings(StrictCopyModel):
    """Base of all settings: a field without an argument is read from its environment variable, unless that is empty.

    A field with a `validation_alias` is read from a variable of another project.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, validate_default=True)
    variable_prefix: ClassVar[str] = ""

    def __init__(self, **values: Any) -> None:
        """Raises pydantic's ValidationError; `load` and `checked` raise SettingsError."""
        super().__init__(**_environment_values(type(self), values), **values)


SettingsT = TypeVar("SettingsT", bound=Settings)


def _environment_values(settings_class: type[Settings], arguments: Mapping[str, object]) -> dict[str, str]:
    """Return the environment's values of all fields without an argument, by argument name."""
    found: dict[str, str] = {}
    for name in settings_class.model_fields:
        variables = variables_of(settings_class, name)
        if name in arguments or not arguments.keys().isdisjoint(variables):
            continue
        for variable in variables:
            if value := os.environ.get(variable):
                found[variable if is_external(settings_class, name) else name] = value
                break
    return found


def is_advanced(field: FieldInfo) -> bool:
    """Return True for a field that is marked `ADVANCED`."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("advanced"))


def is_external(settings_class: type[Settings], name: str) -> bool:
    """Return True for a field that is read from variables of another project."""
    return name in settings_class.model_fields and settings_class.model_fields[name].validation_alias is not None


def is_secret(settings_class: type[Settings], name: str) -> bool:
    """Return True for a field whose value no message may contain."""
    field = settings_class.model_fields.get(name)
    return field is not None and SecretStr.__name__ in repr(field.annotation)


def variables_of(settings_class: type[Settings], name: str) -> tuple[str, ...]:
    """Return the environment variables that a field is read from, in order of precedence."""
    match settings_class.model_fields[name].validation_alias:
        case AliasChoices(choices=choices):
            return tuple(map(str, choices))
        case str(variable):
            return (variable,)
        case _:
            return (f"{settings_class.variable_prefix}{name}".upper(),)


def load(settings_class: type[SettingsT], **overrides: object) -> SettingsT:
    """Read settings from the environment; `overrides` that are not None have precedence.

    Raises SettingsError, one line that names the variable, for an invalid value.
    """
    return _validated(settings_class, {name: value for name, value in overrides.items() if value is not None})


def checked(settings_class: type[SettingsT], settings: object, **overrides: object) -> SettingsT:
    """Return the settings with all `overrides` that are not None, and every value validated.

    Reads nothing from the environment. Raises SettingsError as `load` does, and if `settings` is of another class.
    """
    if not isinstance(settings, settings_class):
        raise SettingsError(f"settings is an object of rfork.{settings_class.__name__}, not a {type(settings).__name__}")
    values: dict[str, object] = {name: getattr(settings, name) for name in settings_class.model_fields}
    return _validated(settings_class, values | {name: value for name, value in overrides.items() if value is not None})


def _validated(settings_class: type[SettingsT], values: Mapping[str, object]) -> SettingsT:
    try:
        return settings_class(**values)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # of several fields: the message names them
            raise SettingsError(message) from None
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise SettingsError(f"{name} is not a setting of rfork.{settings_class.__name__}") from None
        variable = variables_of(settings_class, name)[0] if name in settings_class.model_fields else name
        if is_secret(settings_class, name):
            # pydantic's messages about the length of a secret are about the "items" of a "value".
            for error_type, bound, words in (("too_short", "min_length", "least"), ("too_long", "max_length", "most")):
                if first["type"] == error_type:
                    message = f"it must have at {words} {first['ctx'][bound]} characters"
            raise SettingsError(f"{variable}: {message}") from None
        raise SettingsError(f"{variable}: {message} (got {first['input']!r})") from None


FIRST_UTS = "uts:[4026531838]"
"""UTS namespace of the host itself, in every Linux kernel (PROC_UTS_INIT_INO in proc_ns.h)."""


def node_name(proc: Path = Path("/proc")) -> str:
    """Return a name that all processes of this node agree on: its host name, or its boot id inside a container.

    A container has its own host name, so two containers would not know that they share a node.
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
    """Return the namespace of this process's Pod, ``default`` outside a Pod."""
    try:
        return file.read_text("utf-8").strip() or "default"
    except (OSError, UnicodeDecodeError):
        return "default"


class TlsSettings(Settings):
    """Certificate files of this process. With `ca`, a server requires client certificates (mTLS)."""

    variable_prefix = "RFORK_TLS_"

    certificate: Path | None = Field(None, description="PEM certificate chain that this process presents")
    key: Path | None = Field(None, description="PEM private key of `certificate`")
    ca: Path | None = Field(None, description="PEM certificate authorities that this process trusts; on a server: clients must present a certificate (mTLS)")

    @model_validator(mode="after")
    def _require_pair(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY go together: set both or neither")
        return self

    @property
    def serves(self) -> bool:
        """True if the servers of this process use TLS."""
        return self.certificate is not None

    @property
    def enabled(self) -> bool:
        """True if servers or clients of this process use TLS."""
        return self.serves or self.ca is not None


TransportName = Literal["cuda_ipc", "shared_memory", "transfer_engine", "http", "nixl", "nccl", "gloo"]
LogLevel = Literal["debug", "info", "warning", "error"]
ANY_PORT: Final = range(1)


class InstanceSettings(Settings):
    """Settings of one inference instance: a seed, relay or target."""

    variable_prefix = "RFORK_"

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
    transports: tuple[TransportName, ...] | None = Field(None, description="transports to use, comma separated, in order of preference; unset: all that this machine supports, except nixl, nccl and gloo")
    allow_unauthenticated_tcp: bool = Field(False, description="allow transfer_engine and nixl over plain TCP, where any process on a reader's host can read and write the shared memory (nixl: all memory of the process)")
    rdma_devices: str = Field("", description="RDMA devices for transfer_engine and nixl, comma separated; unset: those nearest to the GPU, or all for host memory")
    nixl_backend: str = Field("UCX", min_length=1, max_length=32, pattern="^[A-Z0-9_]+$", json_schema_extra=ADVANCED, description="NIXL backend of the nixl transport; another one than UCX, for example LIBFABRIC on AWS EFA, is not tested")
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
    forkable_methods: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field((), json_schema_extra=ADVANCED, description="quantisation methods, comma separated, that have passed `rfork doctor --engine` on this hardware: their models are forked, besides those of the methods that rfork knows")

    # Served model.
    model: ModelName | None = Field(None, description="name under which instances of this model find each other; unset: the engine's model name")
    version: WeightsVersion | None = Field(None, description="version of the weights; only instances of the same version share weights; unset: the commit of a Hub model, otherwise a fingerprint of the files")
    replica: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = Field(None, description="prefix of the instance ids of all ranks of this server, unique for each server; set by `rfork launch`, the plug-ins and the webhook")
    cold_start: Literal["cooperative", "independent"] = Field("cooperative", json_schema_extra=ADVANCED, description="behaviour when no source has the weights: `cooperative` instances share one read of storage, `independent` ones each read it all")
    cross_layout: bool = Field(False, json_schema_extra=ADVANCED, description="if no instance serves this layout, read the weights from instances with other layouts (other numbers of ranks, another engine) before the engine's own loader runs; and serve them to such instances")
    race_storage: bool = Field(True, json_schema_extra=ADVANCED, description="read this instance's own storage besides slow sources, and abandon a fork if its own load is faster; off: only once the fork has failed")
    prefetch: Literal["auto", "off"] = Field("auto", json_schema_extra=ADVANCED, description="`auto`: `rfork launch` lets a holder fetch the weights while the engine starts, the host's own or one that ends with the fork, and fetches shared JIT caches; `off`: the weights are read once the engine is ready for them, and no caches are fetched")
    snapshot: str | None = Field(None, description="URI of a snapshot of the model (file, s3, gs, az, https), or of the directory with one snapshot per rank; read when no source has the weights")

    # Source.
    max_egress_bytes_per_s: int | None = Field(None, gt=0, description="maximum rate at which this instance sends weights, over all readers; unset: unlimited")
    max_latency_ratio: float = Field(1.05, ge=0, le=100, description="send more slowly while the engine's own steps take longer than this multiple of their undisturbed time; 0: never")
    max_readers: int = Field(4, ge=1, le=1 << 16, description="maximum number of forks that read from this instance concurrently")
    max_box_bytes: int = Field(64 << 30, ge=1, json_schema_extra=ADVANCED, description="maximum host memory for copies of the weights that instances with other layouts read; see `cross_layout`")
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
    def fork_required_reason(self) -> str | None:
        """Reason why the engine's own loader must not be used; None if it may.

        No files are known to have a version that names a running replica: it is that replica's after an update.
        """
        if self.fail_if_not_forked:
            return "RFORK_FAIL_IF_NOT_FORKED is set"
        if self.version is not None and not is_shareable(self.version):
            return f"version {self.version} is that of a running server"
        return None

    @property
    def placement(self) -> Placement:
        """Location that is reported to the planner."""
        return Placement(host=self.node_name, rack=self.rack, zone=self.zone, nvlink=self.nvlink, pod=self.pod)

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


class StorageSettings(Settings):
    """Settings of reads and writes of tensor files, on disk, in object stores and over HTTP.

    Credentials come from the standard configuration of each object store; for S3: AWS's environment variables,
    profiles, web identity (IRSA) and instance metadata.
    """

    variable_prefix = "RFORK_STORAGE_"

    concurrency: int = Field(8, ge=1, le=256, description="maximum number of concurrent reads, or parts of an upload")
    staging_bytes: int = Field(128 << 20, ge=16 << 20, description="maximum staging memory, in addition to the tensors; concurrency is reduced if it is too small")
    direct_io: Literal["auto", "always", "never"] = Field("auto", json_schema_extra=ADVANCED, description="read local files without the page cache; `auto`: if they are not in it and that is faster")
    timeout_s: float = Field(10.0, gt=0, description="time to wait for a response head, or for 16 KiB of its body, before a request is retried")
    max_attempts: int = Field(5, ge=1, le=100, json_schema_extra=ADVANCED, description="attempts per range before a read fails")
    hedge_ratio: float = Field(4.0, ge=0, json_schema_extra=ADVANCED, description="send a request a second time when it takes this multiple of the median; 0: never")
    http_token: SecretStr | None = Field(None, description="bearer token for http(s):// storage; not sent to hosts that it redirects to")
    s3_addressing: Literal["auto", "path", "virtual"] = Field("auto", json_schema_extra=ADVANCED, description="S3 URLs name the bucket in the `path` or in the host (`virtual`); `auto`: as in AWS's configuration files, else by the endpoint")

    # Variables of AWS and OpenSSL.
    ca: Path | None = Field(None, validation_alias="SSL_CERT_FILE", description="PEM authorities that storage servers are verified with; unset: the system's. For S3, AWS_CA_BUNDLE has precedence")
    s3_endpoint: str | None = Field(None, validation_alias=AliasChoices("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), description="URL of the S3 service; unset: that of the profile, or AWS")
    s3_region: str | None = Field(None, validation_alias=AliasChoices("AWS_REGION", "AWS_DEFAULT_REGION"), description="region of S3; unset: that of the profile, or us-east-1")
    s3_anonymous: bool = Field(False, validation_alias="AWS_SKIP_SIGNATURE", description="send no credentials to S3: public buckets")


class ArtifactSettings(Settings, defer_build=True):
    """Settings of the JIT caches that instances share. The caches contain programs, so sharing is off by default.

    Their directories are found through the environment variables of the engines and libraries that own them.
    """

    variable_prefix = "RFORK_ARTIFACTS_"

    kinds: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field((), description="JIT caches to share, comma separated (`rfork cache ls` lists them), or `all`; unset: off. They are programs: trust the fleet")
    dirs: tuple[tuple[str, Path], ...] = Field((), description="directories of caches, KIND=PATH, comma separated: overrides a detected one, or adds a cache that rfork does not know")
    max_bytes: int = Field(4 << 30, gt=0, json_schema_extra=ADVANCED, description="maximum size of the shared caches; they are kept in memory")
    quiet_period_s: float = Field(5.0, ge=0, json_schema_extra=ADVANCED, description="time since its last change after which a file is considered complete; newer ones are not shared")

    @field_validator("dirs", mode="before")
    @classmethod
    def _parse_dirs(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [item.strip().partition("=") for item in value.split(",") if item.strip()]
        if any(not name or not path for name, _, path in pairs):
            raise ValueError("each entry must be KIND=PATH")
        return tuple((name.strip(), Path(path.strip())) for name, _, path in pairs)


def _home() -> Path:
    """Return the user's home, or ``~`` without one: an error only for a cache below it."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("~")


def _inductor_dir() -> Path:
    """Return torch.compile's default: a directory with the user's name below the temporary one."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


class CacheDirs(Settings):
    """Directories of JIT caches, as the variables of engines and libraries set them."""

    home: Path = Field(default_factory=_home, validation_alias="HOME", description="parent of the caches that no other variable moves")
    xdg_cache_home: Path | None = Field(None, validation_alias="XDG_CACHE_HOME", description="parent of vLLM's cache, without VLLM_CACHE_ROOT")
    triton_cache_dir: Path | None = Field(None, validation_alias="TRITON_CACHE_DIR", description="cache of Triton")
    triton_home: Path | None = Field(None, validation_alias="TRITON_HOME", description="parent of Triton's cache, without TRITON_CACHE_DIR")
    torchinductor_cache_dir: Path = Field(default_factory=_inductor_dir, validation_alias="TORCHINDUCTOR_CACHE_DIR", description="cache of torch.compile")
    flashinfer_workspace_base: Path | None = Field(None, validation_alias="FLASHINFER_WORKSPACE_BASE", description="parent of FlashInfer's cache")
    dg_jit_cache_dir: Path | None = Field(None, validation_alias="DG_JIT_CACHE_DIR", description="cache of DeepGEMM")
    sglang_dg_cache_dir: Path | None = Field(None, validation_alias="SGLANG_DG_CACHE_DIR", description="cache of DeepGEMM under SGLang")
    sglang_cache_dir: Path | None = Field(None, validation_alias="SGLANG_CACHE_DIR", description="cache of SGLang, with that of torch.compile")
    vllm_cache_root: Path | None = Field(None, validation_alias="VLLM_CACHE_ROOT", description="cache of vLLM")
    tvm_ffi_cache_dir: Path | None = Field(None, validation_alias="TVM_FFI_CACHE_DIR", description="cache of tvm-ffi (SGLang's kernels)")


def hub_cache() -> Path:
    """Return the directory in which huggingface_hub keeps models: ``$HF_HUB_CACHE``, or ``$HF_HOME/hub``."""
    environment = os.environ
    if cache := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(cache)).expanduser()
    home = environment.get("HF_HOME")
    if not home:
        home = os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


class TracingSettings(Settings):
    """Settings of the export of spans (OpenTelemetry, OTLP over HTTP), for every process of rfork.

    OpenTelemetry's own variables (``OTEL_*``) configure the engine, so rfork does not read them.
    """

    variable_prefix = "RFORK_TRACING_"

    endpoint: str | None = Field(None, description="URL of an OTLP collector, http://HOST:4318; unset: no tracing")
    sample_ratio: float = Field(1.0, ge=0, le=1, json_schema_extra=ADVANCED, description="ratio of the traces started here that are exported; a trace started by a caller is exported if the caller exports it")
    headers: SecretStr | None = Field(None, json_schema_extra=ADVANCED, description="headers sent to the collector, NAME=VALUE, comma separated")


IntegrationName = Literal["webhook", "controller", "scaler"]


class PlannerSettings(Settings, defer_build=True):
    """Settings of the planner. Its logs are configured by ``RFORK_LOG_JSON`` and ``RFORK_LOG_LEVEL``."""

    variable_prefix = "RFORK_PLANNER_"

    bind: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8700, ge=0, le=65535, description="port to listen on; 0: any free port")
    token: SecretStr | None = Field(None, description="bearer token with full access; without this and `tokens_file`, the planner is open to everyone")
    tokens_file: Path | None = Field(None, description="file with one `ROLE TOKEN` per line (roles: instance, operator, reader); read again when it changes")
    allowed_hosts: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field((), description="host names, besides its own and IP addresses, that are accepted while no token is set, comma separated; `*`: any")
    lease_keys: tuple[SecretStr, ...] = Field((), description="keys for signing leases, comma separated: the first signs, all verify; unset: a new key at each start. Required with a shared store")
    store: str = Field("memory", description="`memory`, or the URL of a Redis (redis://HOST:PORT/DB) shared by several planner replicas")
    store_timeout_s: float = Field(2.0, gt=0, json_schema_extra=ADVANCED, description="timeout of one store operation")
    batch_window_s: float = Field(0.01, ge=0, json_schema_extra=ADVANCED, description="time that the first of several simultaneous arrivals waits, so that they share one plan")
    # At most 8: a fork retries its first request once after `InstanceSettings.planner_timeout_s` (5).
    scaleup_wait_s: float = Field(2.0, ge=0, le=8, description="time that the first fork of an announced scale-up waits for the others, so that they share one plan; must be less than twice RFORK_PLANNER_TIMEOUT_S of the instances")
    integrations: Annotated[tuple[IntegrationName, ...], COMMA_SEPARATED] = Field((), description="integrations that run inside the planner process, comma separated; `rfork k8s` runs them in their own")
    max_requests_per_s: float = Field(0.0, ge=0, description="maximum requests per second of one caller (token and address); 0: unlimited")
    lease_ttl_s: float = Field(30.0, gt=0, le=3600, description="lifetime of a lease unless renewed")
    heartbeat_interval_s: float = Field(5.0, gt=0, description="interval of the instances' heartbeats")
    instance_ttl_s: float = Field(20.0, gt=0, description="time without a heartbeat after which an instance is removed")

    @field_validator("lease_keys", mode="before")
    @classmethod
    def _keys(cls, value: object) -> object:
        return tuple(key.strip() for key in value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _require_shared_keys(self) -> Self:
        if self.store != "memory" and not self.store.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("RFORK_PLANNER_STORE must be `memory` or a redis:// URL")
        if self.store != "memory" and not self.lease_keys:
            raise ValueError(
                "RFORK_PLANNER_LEASE_KEYS is not set, but planner replicas that share a store (RFORK_PLANNER_STORE) "
                "need the same keys"
            )
        return self

    @property
    def tls(self) -> TlsSettings:
        """TLS settings (``RFORK_TLS_*``)."""
        return load(TlsSettings)


class KubernetesSettings(Settings, defer_build=True):
    """Settings of the webhook, the controller and the scaler, in addition to ``RFORK_PLANNER`` and ``RFORK_TOKEN``.

    Those two name the planner that the integration itself uses, with an operator's token. Pods receive
    `pod_planner_url` and the token in `token_secret`.
    """

    variable_prefix = "RFORK_K8S_"

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
    webhook_hosts: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(("localhost", "127.0.0.1"), json_schema_extra=ADVANCED, description="DNS names and addresses of the webhook's own certificate, comma separated; in a cluster SERVICE.NAMESPACE.svc")

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

    @model_validator(mode="after")
    def _require_image(self) -> Self:
        if self.injection_mode != "none" and not self.injection_image:
            raise ValueError(
                f"RFORK_K8S_INJECTION_IMAGE is not set, but RFORK_K8S_INJECTION_MODE is {self.injection_mode}"
            )
        return self


class SidecarSettings(Settings, defer_build=True):
    """Settings of `rfork sidecar`, in addition to `InstanceSettings`."""

    variable_prefix = "RFORK_SIDECAR_"

    engine_url: str | None = Field(None, description="URL of the SGLang server that this sidecar publishes")
    engine_api_key: SecretStr | None = Field(None, description="the server's `--api-key`, if it has one")
    source_model: str | None = Field(None, description="model whose seeds this sidecar offers to SGLang clients; unset: it serves no clients")
    bind: str = Field("127.0.0.1", description="address on which it serves SGLang clients; they present no token")
    port: int = Field(8710, ge=0, le=65535, description="port on which it serves SGLang clients; 0: any free port")
    mooncake_protocol: str = Field("rdma", validation_alias="MOONCAKE_PROTOCOL", description="protocol of the SGLang server's TransferEngine: rdma or tcp")


SETTINGS_CLASSES: Final[tuple[type[Settings], ...]] = (
    InstanceSettings, StorageSettings, ArtifactSettings, TlsSettings, TracingSettings, PlannerSettings, KubernetesSettings,
    SidecarSettings,
)  # fmt: skip
"""The classes that most users need come first."""
PREFIX: Final = "RFORK_"
MIN_SIMILARITY: Final = 0.8
"""Minimum ratio of `difflib` between a misspelt name and the intended one: one letter in five may differ."""
IGNORED_VARIABLES: Final = frozenset({"RFORK_POD_NAME", "RFORK_POD_NAMESPACE"})
"""Helper variables of Pod manifests, which other variables refer to."""
_KUBERNETES_SERVICE_VARIABLE: Final = re.compile(
    r"RFORK_(.*_)?(SERVICE_(HOST|PORT(_.*)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)"
)
"""Variables that Kubernetes sets for each Service of a namespace, here one whose name starts with ``rfork``."""


def variables() -> Iterator[str]:
    """Yield the environment variable of every setting, except variables of other projects."""
    for settings_class in SETTINGS_CLASSES:
        for name in settings_class.model_fields:
            yield from (each for each in variables_of(settings_class, name) if each.startswith(PREFIX))


def find_typos(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return each misspelt variable of `environment` (default: of this process) with the likely intended one."""
    known = set(variables())
    ignored = known | IGNORED_VARIABLES
    typos: dict[str, str] = {}
    for name in sorted(os.environ if environment is None else environment):
        if not name.startswith(PREFIX) or name in ignored or _KUBERNETES_SERVICE_VARIABLE.fullmatch(name):
            continue
        intended = _intended_variable(name, known)
        if intended is not None:
            typos[name] = intended
    return typos


def _intended_variable(name: str, known: Iterable[str]) -> str | None:
    """Return the known variable that is abbreviated by `name`, if it is the only one, else the most similar one."""
    abbreviated = [each for each in known if _is_abbreviation(name, each)]
    if len(abbreviated) == 1:
        return abbreviated[0]
    swapped = [each for each in known if sorted(each) == sorted(name)]
    words = {each.removeprefix(PREFIX): each for each in known}
    similar = get_close_matches(name.removeprefix(PREFIX), words, n=1, cutoff=MIN_SIMILARITY)
    return next(iter([*swapped, *(words[word] for word in similar)]), None)


def _is_abbreviation(name: str, intended: str) -> bool:
    """Return True if `name` is a prefix of `intended` and longer than half of it: ``TLS_CERT``, ``TLS_CERTIFICATE``."""
    return intended.startswith(name) and 2 * (len(name) - len(PREFIX)) > len(intended) - len(PREFIX)
