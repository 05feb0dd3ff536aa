"""What is run: an engine, and the way in which it gets its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

EngineName = Literal["vllm", "sglang"]
WeightSource = Literal["disk", "seed", "snapshot", "stock seed"]

NETWORK: Mapping[str, str] = MappingProxyType({"RFORK_TRANSPORTS": "http"})
"""As between hosts: nothing that two processes of one host can share."""


@dataclass(frozen=True, eq=False)
class EngineCase:
    """One row. `arguments` are the engine's own, as its Python interface names them."""

    engine: EngineName
    name: str
    source: WeightSource = "disk"
    cold: bool = False
    """Whether the files it reads are out of the page cache when it starts."""
    is_bare: bool = False
    """Whether it is given a folder without weights."""
    checkpoint: str = "model"
    """The folder, under the benchmark's, that it is given."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 300.0
    """How long it may take to answer: longer is "did not run"."""

    @property
    def key(self) -> str:
        """Its name among all rows."""
        return f"{self.engine}: {self.name}"

    @property
    def is_rfork(self) -> bool:
        """Whether rfork brings the weights."""
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
    """What one run of a case took."""

    weights_s: float
    """From the call of the engine's loader to its return: model built, weights in it, post-processed."""
    first_token_s: float
    """From the start of the process to the first token of the first answer."""
    read_bytes: int
    """What its processes had read from block devices by then."""
    tokens: tuple[int, ...]
    """The first tokens of a greedy answer."""
