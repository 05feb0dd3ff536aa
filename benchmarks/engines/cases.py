"""Cases: an engine, and the source of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

EngineName = Literal["vllm", "sglang"]
WeightSource = Literal["disk", "seed", "snapshot", "stock seed"]

NETWORK: Mapping[str, str] = MappingProxyType({"RFORK_TRANSPORTS": "http"})
"""Settings as between hosts: no transport that two processes of one host could share."""


@dataclass(frozen=True, eq=False)
class EngineCase:
    """One table row. `arguments` are those of the engine's Python interface."""

    engine: EngineName
    name: str
    source: WeightSource = "disk"
    cold: bool = False
    """True if the files it reads are dropped from the page cache before it starts."""
    is_bare: bool = False
    """True if its model folder has no weights."""
    checkpoint: str = "model"
    """Name of its model folder, below the benchmark's folder."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 300.0
    """Timeout in seconds; a case that exceeds it "did not run"."""

    @property
    def key(self) -> str:
        """Unique name of the row."""
        return f"{self.engine}: {self.name}"

    @property
    def is_rfork(self) -> bool:
        """True if rfork loads the weights."""
        return self.source in ("seed", "snapshot")


RFORK: Mapping[str, object] = MappingProxyType({"load_format": "rfork"})
REMOTE: Mapping[str, object] = MappingProxyType(
    {"load_format": "remote_instance", "remote_instance_weight_loader_backend": "transfer_engine"}
)

CASES = (
    EngineCase("vllm", "default loader, cold cache", cold=True),
    EngineCase("vllm", "default loader, warm cache"),
    EngineCase("vllm", "Run:ai streamer, cold cache", cold=True, arguments={"load_format": "runai_streamer"}),
    EngineCase("vllm", "Run:ai streamer, warm cache", arguments={"load_format": "runai_streamer"}),
    EngineCase(
        "vllm",
        "tensorizer, cold cache",
        cold=True,
        checkpoint="tensorized",
        arguments={"load_format": "tensorizer"},
    ),
    EngineCase("vllm", "rfork from a seed, http", "seed", is_bare=True, arguments=RFORK, environment=NETWORK),
    EngineCase("vllm", "rfork from a seed of this host", "seed", is_bare=True, arguments=RFORK),
    EngineCase("vllm", "rfork from a snapshot, cold cache", "snapshot", cold=True, is_bare=True, arguments=RFORK),
    EngineCase("sglang", "default loader, cold cache", cold=True),
    EngineCase("sglang", "default loader, warm cache"),
    EngineCase("sglang", "remote_instance (TransferEngine)", "stock seed", arguments=REMOTE, limit_s=120.0),
    EngineCase("sglang", "rfork from a seed, http", "seed", is_bare=True, arguments=RFORK, environment=NETWORK),
    EngineCase("sglang", "rfork from a seed of this host", "seed", is_bare=True, arguments=RFORK),
    EngineCase("sglang", "rfork from a snapshot, cold cache", "snapshot", cold=True, is_bare=True, arguments=RFORK),
)


@dataclass(frozen=True)
class EngineRun:
    """Measurements of one run of a case."""

    weights_s: float
    """Seconds from the call of the engine's loader to its return: model built, filled, post-processed."""
    first_token_s: float
    """Seconds from the start of the process to the first token of the first response."""
    read_bytes: int
    """Bytes that its processes had read from block devices by then."""
    tokens: tuple[int, ...]
    """First tokens of a greedy response."""
