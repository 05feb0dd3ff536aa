"""Planner identities of stock seeds and clients, kept apart from those of rfork's own instances.

As in `planner.integrations.vllm_ascend`, a stock instance has one chunk, a model name with a reserved prefix,
its own transport and its own layout ids. Each of these alone prevents a match: the group differs, no layout
is equal, and no transport is shared.

* `layout_id` is a hash of the names, element counts and element sizes of all tensors, which a stock client
  compares, and of dtype, quantisation and parallel sizes, which it cannot compare (float16 and bfloat16
  have the same size).
* `weights_id` is a hash of the model's name and of the version that the engine reports. There are no digests:
  the operator vouches for the name.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Final

from rfork import weights_version
from rfork.engines.sglang_bridge.engine import EngineDescription, Version, WeightInfo
from rfork.errors import StorageError
from rfork.logs import logger
from rfork.schema import InstanceReport, Placement, Rank
from rfork.settings import InstanceSettings
from rfork.storage.versions.version import version_of_files

log = logger(__name__)

STOCK_PREFIX: Final = "sglang:"
"""Prefix of model names and instance ids."""
STOCK_TRANSPORT: Final = "sglang_remote_instance"
SINGLE_CHUNK: Final = ((0, 1),)
"""Range of the only chunk."""


def placement(settings: InstanceSettings) -> Placement:
    """Return the placement of the sidecar, which is also the engine's."""
    return Placement(
        host=settings.node_name, rack=settings.rack, zone=settings.zone, nvlink=settings.nvlink, pod=settings.pod
    )


def layout_id(description: EngineDescription, info: WeightInfo) -> str:
    """Return a hash of the properties that two interchangeable seeds share."""
    tensors = sorted((name, count, item_bytes) for name, (_, count, item_bytes) in info.tensors.items())
    configuration = [description.tp_size, description.ep_size, description.dtype, description.quantization]
    return _hash("layout", [configuration, tensors])


def weights_id(model: str, initial: Version, current: Version) -> str:
    """Return a hash of the served weights.

    `initial` is the version when the sidecar started. The path counts only after an update has changed it,
    because hosts mount folders at different paths.
    """
    return _hash("weights", [model, current.version, current.path if current.path != initial.path else ""])


def version_of(stated: str | None, weights: str, initial: Version, current: Version) -> str:
    """Return the version of an engine's weights: the stated one, that of its files, or one derived from `weights`.

    `weights` is their weights_id, `initial` the version when the sidecar started. Weights updated from
    anything but disk have no files, and files that are not visible to the sidecar cannot be fingerprinted.
    """
    if current == initial and stated is not None:
        return stated
    if (current == initial or current.path != initial.path) and Path(current.path).is_dir():
        try:
            return version_of_files(current.path) or weights_version.of_weights(weights)
        except StorageError as error:
            log.warning("version of the engine's files unknown", reason=str(error))
    return weights_version.of_weights(weights)


def instance_id(settings: InstanceSettings, rank: int, info: WeightInfo) -> str:
    """Return an id of one run of an engine's rank, so that freed memory is never mistaken for the new one's."""
    run_id = _hash("instance", [settings.node_name, rank, info.session, sorted(info.tensors.items())])
    session = re.sub("[^A-Za-z0-9._:-]", "-", info.session)[:64]
    return f"{STOCK_PREFIX}{session}:{rank}:{run_id[:8]}"


def seed_report(
    settings: InstanceSettings, *, model: str, version: str, rank: int, description: EngineDescription,
    info: WeightInfo, weights: str, generation: int, address: str,
) -> InstanceReport:  # fmt: skip
    """Return the report of a seed.

    `weights`: its weights_id. `address`: host:port of its sidecar, which sends the weight info to the bearer of
    a lease.
    """
    return InstanceReport(
        instance_id=instance_id(settings, rank, info),
        model=STOCK_PREFIX + model,
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
        transports=(STOCK_TRANSPORT,),
        placement=placement(settings),
        max_readers=settings.max_readers,
    )


def client_report(settings: InstanceSettings, seed: InstanceReport, fork_id: str) -> InstanceReport:
    """Return a client's report for a fork request: it requests what `seed` serves, and has no readers."""
    return InstanceReport(
        instance_id=f"{STOCK_PREFIX}client-{fork_id}",
        model=seed.model,
        version=seed.version,
        rank=seed.rank,
        layout_id=seed.layout_id,
        image_bytes=seed.image_bytes,
        chunk_count=seed.chunk_count,
        state="loading",
        address=settings.node_name,
        transports=(STOCK_TRANSPORT,),
        placement=placement(settings),
        max_readers=0,
    )


def _hash(domain: str, value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"rfork/stock-sglang/{domain}:{text}".encode()).hexdigest()[:32]
