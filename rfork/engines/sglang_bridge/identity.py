"""What stock seeds and clients are called at the planner: names that no fork of rfork's own ever meets.

As `planner.integrations.vllm_ascend` does for vLLM-Ascend: an instance with one chunk, a model name behind a prefix of its
own, a transport of its own and a layout of its own kind. Three walls, each enough: another group is looked
at, no layout is alike, and no transport is shared.

* `layout`: hash of names, element counts and element sizes of all tensors, which is what a stock client
  compares, and of dtype, quantisation and parallel sizes, which it cannot (float16 and bfloat16 are of one
  size).
* `weights`: hash of the model's name and of the version that the engine tells. There are no digests: the
  name is what the operator vouches for.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Final

from rfork.engines.sglang_bridge.engine import EngineDescription, Version, WeightInfo
from rfork.engines.version_selection import version_of_files
from rfork.errors import StorageError
from rfork.logs import logger
from rfork.schema import InstanceReport, Placement, Rank
from rfork.settings import InstanceSettings
from rfork.weights_version import of_weights

log = logger(__name__)

PREFIX: Final = "sglang:"
"""Of the names of models and instances."""
TRANSPORT: Final = "sglang_remote_instance"
SINGLE_CHUNK: Final = ((0, 1),)
"""The one chunk."""


def placement(settings: InstanceSettings) -> Placement:
    """Where the sidecar runs, and so the engine beside it."""
    return Placement(
        host=settings.node_name, rack=settings.rack, zone=settings.zone, nvlink=settings.nvlink, pod=settings.pod
    )


def layout_id(description: EngineDescription, info: WeightInfo) -> str:
    """What two seeds must agree in to be interchangeable."""
    tensors = sorted((name, count, size) for name, (_, count, size) in info.tensors.items())
    split = [description.tp_size, description.ep_size, description.dtype, description.quantization]
    return _hash("layout", [split, tensors])


def weights_id(model: str, first: Version, now: Version) -> str:
    """Which weights these are. `first`: what the engine served when it was first looked at; the path they
    came from counts once an update has moved it, for folders are mounted at other places on other hosts.
    """
    return _hash("weights", [model, now.version, now.path if now.path != first.path else ""])


def version_of(stated: str | None, weights: str, first: Version, now: Version) -> str:
    """Return the version of an engine's weights: as stated, that of its files, or by what the engine reports.

    `first` is what the engine served when the sidecar came up. Weights that were updated other than from disk
    are not those of any files; nor can files be read that the sidecar does not see.
    """
    if now == first and stated is not None:
        return stated
    if (now == first or now.path != first.path) and Path(now.path).is_dir():
        try:
            return version_of_files(now.path) or of_weights(weights)
        except StorageError as error:
            log.warning("the version of the engine's files is not known", because=str(error))
    return of_weights(weights)


def instance_id(settings: InstanceSettings, rank: int, info: WeightInfo) -> str:
    """One run of one rank of an engine: memory that was freed is never taken for the new one."""
    run = _hash("instance", [settings.node_name, rank, info.session, sorted(info.tensors.items())])
    session = re.sub("[^A-Za-z0-9._:-]", "-", info.session)[:64]
    return f"{PREFIX}{session}:{rank}:{run[:8]}"


def seed_report(
    settings: InstanceSettings, *, model: str, version: str, rank: int, description: EngineDescription, info: WeightInfo,
    weights: str, generation: int, address: str,
) -> InstanceReport:  # fmt: skip
    """A seed's heartbeat. `address`: host:port of its sidecar, which gives the info to who shows a lease."""
    return InstanceReport(
        instance_id=instance_id(settings, rank, info),
        model=PREFIX + model,
        version=version,
        rank=Rank(tp=rank, tp_size=description.tp_size),
        layout_id=layout_id(description, info),
        weights_id=weights,
        generation=generation,
        image_bytes=info.image_bytes,
        chunk_count=1,
        state="serving",
        verified=SINGLE_CHUNK,
        address=address,
        transports=(TRANSPORT,),
        placement=placement(settings),
        max_readers=settings.max_readers,
        egress_share=settings.egress_share,
    )


def client_report(settings: InstanceSettings, seed: InstanceReport, fork_id: str) -> InstanceReport:
    """A client's side of a fork, as its sidecar asks: it wants what `seed` is one of, and serves nobody."""
    return InstanceReport(
        instance_id=f"{PREFIX}client-{fork_id}",
        model=seed.model,
        version=seed.version,
        rank=seed.rank,
        layout_id=seed.layout_id,
        image_bytes=seed.image_bytes,
        chunk_count=seed.chunk_count,
        state="loading",
        address=settings.node_name,
        transports=(TRANSPORT,),
        placement=placement(settings),
        max_readers=0,
    )


def _hash(domain: str, value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"rfork/stock-sglang/{domain}:{text}".encode()).hexdigest()[:32]
