"""Save a module's weights, or named tensors, to any storage. Runs wherever the weights are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from rfork.errors import SettingsError
from rfork.image.capture import capture, image_from_tensors
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage.module_io.save_report import SaveReport
from rfork.storage.snapshots.destination import validate_destination
from rfork.storage.snapshots.writer import write_snapshot
from rfork.storage.tensorizer.file_set import SUFFIX, of_rank
from rfork.storage.tensorizer.writer import write_tensors


def save(
    module: nn.Module | Mapping[str, torch.Tensor],
    uri: str | Path,
    *,
    rank: Rank | None = None,
    version: str | None = None,
    shared: bool = False,
    check: bool = False,
    key: bytes | None = None,
    password: str | None = None,
    progress: Callable[[int], None] | None = None,
    settings: StorageSettings | None = None,
) -> SaveReport:
    """Write the weights as they are now, on any device; they must not change meanwhile.

    Runs in the process that calls it, and asks no planner. `module` is one, or tensors by name; `uri` a path,
    or ``file:`` or ``s3:``, and what `rfork[cloud]` brings; `settings` are those of the environment where
    none are given. A URI that ends with ``.tensors`` becomes a tensorizer file of parameters and persistent
    buffers, under `key` (32 bytes) or `password` where one is given. Any other becomes a snapshot of all that
    the module serves with, as a ``….safetensors`` file or as the rank's in a folder; with `shared` its chunks
    are stored once for all snapshots around it, and with `check` those that are there are read, and replaced
    where they are damaged; `version` is recorded as that of the weights. In a name as
    ``model-rank-%03d.tensors`` or ``….safetensors`` the number is that of `rank`.

    `progress` is told bytes as they go. What was there under the name is replaced once all is written. Raises
    UnsupportedTensor, SettingsError, MissingExtra and StorageError kinds.
    """
    text = of_rank(str(uri), rank or Rank())
    if text.endswith(SUFFIX):
        if shared:
            raise SettingsError(f"a {SUFFIX} file shares nothing: save a snapshot to a folder")
        return write_tensors(
            module,
            text,
            key=key,
            password=password,
            settings=settings,
            progress=progress,
        )
    if key is not None or password is not None:
        raise SettingsError(f"only {SUFFIX} files are encrypted, and {text!r} is a snapshot's name")
    validate_destination(text, settings)
    began = time.monotonic()
    image = capture(module) if isinstance(module, nn.Module) else image_from_tensors(module)
    written = write_snapshot(
        image,
        image.manifest(),
        text,
        rank=rank,
        version=version,
        shared=shared,
        check=check,
        progress=progress,
        settings=settings,
    )
    layout = image.layout
    return SaveReport(written.uri, len(layout.tensors), layout.image_bytes, time.monotonic() - began)
