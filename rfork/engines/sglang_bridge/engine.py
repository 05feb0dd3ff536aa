"""Client of an unmodified SGLang server's HTTP endpoints (checked with 0.5.23).

Runs in the sidecar of the engine. Nothing of SGLang is imported. The endpoints:

* ``GET /health``: 200 while the scheduler responds. It takes a second; an idle engine generates one token.
* ``GET /server_info`` (older name: ``/get_server_info``): launch settings, of which the parallel sizes
  are used.
* ``GET /model_info`` (``/get_model_info``): the served name, and the path and version of the weights, which
  updates change.
* ``GET /remote_instance_transfer_engine_info?rank=N`` (``/get_remote_instance_transfer_engine_info``, the
  one that clients use): ``{"rank": N, "remote_instance_transfer_engine_info": [session, {name: [address,
  numel, element size]}]}`` of tensor-parallel rank N, as its ranks published it to the engine's bootstrap
  port.

An engine with ``--api-key`` requires it as a bearer token for every endpoint but ``/health``. SGLang's own
clients send none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Final, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import Self

from rfork.errors import SettingsError, SourceCorrupt, SourceError, SourceTimeout, SourceUnavailable, reason_of
from rfork.net.tls import client_context
from rfork.settings import TlsSettings

INFO_PATHS: Final = ("/remote_instance_transfer_engine_info", "/get_remote_instance_transfer_engine_info")
SERVER_PATHS: Final = ("/server_info", "/get_server_info")
MODEL_PATHS: Final = ("/model_info", "/get_model_info")
SEED_FLAG: Final = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
HEALTH_TIMEOUT_S: Final = 30.0
"""Timeout of `/health` in seconds. The engine itself gives up after 20."""
TIMEOUT_S: Final = 10.0
NO_KEEPALIVE: Final = httpx.Limits(max_keepalive_connections=0)
"""No connection reuse: the server could close an idle connection just as a request is sent on it."""

Positive = Annotated[int, Field(gt=0, lt=1 << 64)]
Tensor = tuple[Positive, Annotated[int, Field(ge=0, lt=1 << 48)], Annotated[int, Field(gt=0, le=64)]]
"""Address in the seed's rank, number of elements, element size in bytes."""


class TransferInfoResponse(BaseModel):
    """Response body that SGLang, and therefore a sidecar, sends to a client."""

    rank: Annotated[int, Field(ge=0)]
    remote_instance_transfer_engine_info: tuple[Annotated[str, Field(min_length=1, max_length=256)], dict[str, Tensor]]


class _ServerInfo(BaseModel):
    tp_size: Annotated[int, Field(ge=1)] = 1
    pp_size: Annotated[int, Field(ge=1)] = 1
    ep_size: Annotated[int, Field(ge=1)] = 1
    dtype: str | None = None
    quantization: str | None = None
    speculative_algorithm: str | None = None


class _ModelInfo(BaseModel):
    model_config = ConfigDict(protected_namespaces=())  # before pydantic 2.10, `model_` is one

    model_path: str
    served_model_name: str | None = None
    weight_version: str | None = None


TRANSFER_INFO_RESPONSE: Final = TypeAdapter(TransferInfoResponse)
_SERVER_INFO: Final = TypeAdapter(_ServerInfo)
_MODEL_INFO: Final = TypeAdapter(_ModelInfo)
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True)
class WeightInfo:
    """Location of one rank's weights: all that a stock client receives."""

    session: str
    """host:port of the rank's TransferEngine."""
    tensors: Mapping[str, Tensor]

    @property
    def image_bytes(self) -> int:
        """Total size of all tensors. Aliased tensors are counted once per name."""
        return sum(count * size for _, count, size in self.tensors.values())


@dataclass(frozen=True)
class Version:
    """The weights that the engine serves, as far as it reports them."""

    path: str
    version: str


@dataclass(frozen=True)
class EngineDescription:
    """Launch settings of the engine. `served_name` is the model name that its own clients use."""

    served_name: str
    tp_size: int
    pp_size: int
    ep_size: int
    dtype: str
    quantization: str
    speculative: str
    version: Version


class StockEngine:
    """HTTP client of one engine.

    Thread-safe. Methods raise SourceUnavailable, SourceTimeout, SourceCorrupt (not a response of SGLang), or
    SettingsError if the engine must be started with other options.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        tls: TlsSettings | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`transport` replaces the network in tests. Raises SettingsError for an invalid URL."""
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise SettingsError(f"invalid engine URL {url!r}: {error}", hint="e.g. http://127.0.0.1:30000") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise SettingsError(
                f"invalid engine URL {url!r}: it must begin with http:// or https:// and a host",
                hint="e.g. http://127.0.0.1:30000",
            )
        secure = parsed.scheme == "https" and tls is not None
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=TIMEOUT_S,
            limits=NO_KEEPALIVE,
            verify=client_context(tls) if secure and tls is not None else True,
            transport=transport,
            trust_env=False,
        )

    def healthy(self) -> bool:
        """Return True if the engine's scheduler responds."""
        try:
            return self._http.get("/health", timeout=HEALTH_TIMEOUT_S).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def describe(self) -> EngineDescription:
        """Return the engine's launch settings and parallel sizes."""
        server, model = self._get_json(_SERVER_INFO, SERVER_PATHS), self._get_json(_MODEL_INFO, MODEL_PATHS)
        return EngineDescription(
            served_name=model.served_model_name or model.model_path,
            tp_size=server.tp_size,
            pp_size=server.pp_size,
            ep_size=server.ep_size,
            dtype=server.dtype or "",
            quantization=server.quantization or "",
            speculative=server.speculative_algorithm or "",
            version=_version(model),
        )

    def version(self) -> Version:
        """Return the version of the weights that the engine serves now."""
        return _version(self._get_json(_MODEL_INFO, MODEL_PATHS))

    def info(self, rank: int) -> WeightInfo:
        """Return the location of the weights of a rank."""
        response_model = self._get_json(TRANSFER_INFO_RESPONSE, INFO_PATHS, rank=rank)
        if response_model.rank != rank:
            raise SourceCorrupt(f"engine {self.url} returned rank {response_model.rank} instead of {rank}")
        session, tensors = response_model.remote_instance_transfer_engine_info
        if not tensors:
            raise SourceCorrupt(f"engine {self.url} returned no tensors for rank {rank}")
        return WeightInfo(session, tensors)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _get_json(self, adapter: TypeAdapter[ResponseT], paths: tuple[str, ...], **query: int) -> ResponseT:
        """Return the response of the first of `paths` that this release of SGLang has."""
        response: httpx.Response | None = None
        for path in paths:
            try:
                response = self._http.get(path, params=query)
            except httpx.HTTPError as error:
                raise unreachable_error(f"engine {self.url}", error, TIMEOUT_S) from error
            if response.status_code != httpx.codes.NOT_FOUND:
                break
        if response is None or not response.is_success:
            raise self._error_from_response(response)
        try:
            return adapter.validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"][:2]) or "body"
            raise SourceCorrupt(f"engine {self.url} returned an invalid response: {where}: {first['msg']}") from None

    def _error_from_response(self, response: httpx.Response | None) -> SourceError | SettingsError:
        status = response.status_code if response is not None else 0
        path = response.request.url.path if response is not None else ""
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            return SettingsError(
                f"engine {self.url} requires an API key", hint="set RFORK_SIDECAR_ENGINE_API_KEY to its --api-key"
            )
        if path in INFO_PATHS and status in (httpx.codes.BAD_REQUEST, httpx.codes.NOT_FOUND):
            return SettingsError(
                f"engine {self.url} does not serve its weights",
                hint=f"start it with {SEED_FLAG}; an engine that was loaded as a client never serves weights",
            )
        return SourceUnavailable(f"engine {self.url} returned status {status} for {path}")


def unreachable_error(peer_name: str, error: httpx.HTTPError, within_s: float) -> SourceError:
    """Return the source error that matches an HTTP error."""
    if isinstance(error, httpx.TimeoutException):
        return SourceTimeout(f"{peer_name} did not respond within {within_s:g} s")
    return SourceUnavailable(f"{peer_name} is unreachable: {reason_of(error)}")


def _version(model: _ModelInfo) -> Version:
    return Version(model.model_path, model.weight_version or "")
