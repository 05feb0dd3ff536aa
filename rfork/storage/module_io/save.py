"""Saves a module's weights, or named tensors, to any storage. Runs wherever the weights are."""

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
from rfork.storage.snapshots.writer import validate_destination, write_snapshot
from rfork.storage.tensorizer.file_set import SUFFIX, resolve_template
from rfork.storage.tensorizer.writer import write_tensors
from rfork.storage.tensors import SaveReport


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
    """Write the current weights from any device; they must not change meanwhile.

    Runs in the calling process, without a planner. `module` is a module, or tensors by name; `uri` is a path,
    ``file:`` or ``s3:``, or a scheme that `rfork[cloud]` supports; `settings` default to those of the
    environment. A URI that ends with ``.tensors`` becomes a tensorizer file of parameters and persistent
    buffers, encrypted if `key` (32 bytes) or `password` is given. Any other URI becomes a snapshot of the
    module's complete state, as a ``….safetensors`` file or as the rank's file in a folder. With `shared`, its
    chunks are stored once for all snapshots around it; with `check`, existing chunks are read, and replaced
    if they are damaged. `version` is recorded as the version of the weights. In a template such as
    ``model-rank-%03d.tensors`` or ``….safetensors`` the number is that of `rank`.

    `progress` receives byte counts. An existing file of the same name is replaced once everything is written.
    Raises UnsupportedTensor, SettingsError, MissingExtra and StorageError subclasses.
    """
    text = resolve_template(str(uri), rank or Rank())
    if text.endswith(SUFFIX):
        if shared:
            raise SettingsError(f"a {SUFFIX} file cannot share chunks: save a snapshot to a folder")
        return write_tensors(
            module,
            text,
            key=key,
            password=password,
            settings=settings,
            progress=progress,
        )
    if key is not None or password is not None:
        raise SettingsError(f"only {SUFFIX} files can be encrypted, but {text!r} is a snapshot's name")
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
