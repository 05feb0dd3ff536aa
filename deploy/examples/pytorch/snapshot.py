"""Saves weights to a file and loads them again, without a planner: on disk, in S3 or any supported storage.

    python snapshot.py /tmp/models/mlp/
    python snapshot.py s3://bucket/models/mlp/        # pip install 'rfork[s3]'

Saves a module as a snapshot, reads it in four ways, and compares. Needs: pip install rfork.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import rfork


def build() -> nn.Module:
    """Build any module; both sides build the same."""
    return nn.Sequential(nn.Embedding(1000, 256), nn.LayerNorm(256), nn.Linear(256, 1000))


def same(one: nn.Module, other: nn.Module) -> bool:
    """Return True if two modules have equal values."""
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def main() -> None:
    """Write, read, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("uri", help="destination: a path, file:///…, s3://…")
    uri = parser.parse_args().uri
    try:
        roundtrip(uri)
    except rfork.RforkError as error:
        sys.exit(f"{error.kind}: {error} {error.hint}".rstrip())


def roundtrip(uri: str) -> None:
    """Save, then load in all four ways; each must return the saved values."""
    module = build()
    saved = rfork.save(module, uri)
    print(f"saved {saved.nbytes} bytes to {saved.uri}")

    # 1. Into an existing module: directly into its tensors, with every chunk verified.
    into = build()
    report = rfork.load(into, uri)
    print(f"loaded {report.tensors} tensors, verified: {report.verified}, same: {same(module, into)}")

    # 2. Into a module that was built without memory or initial values: no second copy.
    with rfork.no_init():
        empty = build()
    rfork.load(empty, uri)
    print(f"loaded into an empty module, same: {same(module, empty)}")

    # 3. All tensors by name, as a dict.
    tensors = rfork.load_tensors(uri)
    print(f"tensors by name: {', '.join(sorted(tensors))}")

    # 4. One tensor, and nothing else read but the header.
    with rfork.open_tensors(uri) as stored:
        print(f"one tensor: {tuple(stored['2.weight'].shape)}")


if __name__ == "__main__":
    main()
