"""rfork's own loaders for `benchmarks.storage`: public functions at the default settings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import closing

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.storage.cases import SIDE_ROUNDS, Load, LoadTarget, StorageContender
from benchmarks.storage.images import StoredImage, Tensors
from rfork.errors import RforkError
from rfork.storage.formats.detect import open_checkpoint
from rfork.storage.module_io.load import load
from rfork.storage.module_io.save import save

NAME = "rfork"


def contenders() -> list[StorageContender]:
    """Return rfork at its defaults, forced past the page cache or through it, and with every chunk verified."""
    return [
        StorageContender(NAME, checkpoint, "ours", media=("cold", "warm", "s3"), always=True),
        *(
            StorageContender(
                f"rfork, direct={direct}",
                checkpoint,
                "ours otherwise",
                media=("cold",),
                destinations=("existing",),
                max_rounds=SIDE_ROUNDS,
                environment={"RFORK_STORAGE_DIRECT_IO": direct},
            )
            for direct in ("always", "never")
        ),
        StorageContender(
            "rfork snapshot, verified",
            snapshot,
            "ours otherwise",
            media=("cold", "warm", "s3"),
            destinations=("existing",),
            reads="snapshot",
            verified=True,
        ),
    ]


def checkpoint(target: LoadTarget) -> Load:
    """Load a Hugging Face folder into an existing module, or into new tensors."""
    _import_store(target)
    folder = target.bucket.uri("safetensors") if target.bucket else str(target.stored.checkpoint)
    if target.destination_tensors is not None:
        return _into_module(target.destination_tensors, folder)

    def run() -> Tensors:
        with closing(open_checkpoint(folder)) as source:
            return source.load()

    return run


def snapshot(target: LoadTarget) -> Load:
    """Restore a snapshot of the module."""
    if target.destination_tensors is None:
        raise RforkError("a snapshot is restored into a module")
    _import_store(target)
    return _into_module(target.destination_tensors, target.uris("snapshot")[0], verified=True)


def write_snapshot(stored: StoredImage) -> None:
    """Write the image as rfork's own snapshot, from its safetensors files."""
    tensors: Tensors = {}
    for path in stored.safetensors:
        tensors |= load_file(path)
    save(tensors, stored.snapshot)


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module with these tensors as parameters."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def _import_store(target: LoadTarget) -> None:
    """Import what the first URI of a store imports (for S3: botocore), like the other loaders' `Prepare`."""
    importlib.import_module("rfork.storage.s3.store" if target.bucket else "rfork.storage.local")


def _into_module(tensors: Tensors, uri: str, *, verified: bool = False) -> Load:
    module = module_of(tensors)

    def run() -> Tensors:
        report = load(module, uri)
        if report.verified != verified:
            raise RforkError("the snapshot was not verified")
        return tensors

    return run
