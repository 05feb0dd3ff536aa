"""Weights to a file and back, without a planner: on disk, in S3 or anywhere else that rfork writes to.

    python snapshot.py /tmp/models/mlp/
    python snapshot.py s3://bucket/models/mlp/        # pip install 'rfork[s3]'

Saves a module as a snapshot, reads it back in four ways, and compares. Needs: pip install rfork.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import rfork


def build() -> nn.Module:
    """Any module; both sides build the same."""
    return nn.Sequential(nn.Embedding(1000, 256), nn.LayerNorm(256), nn.Linear(256, 1000))


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules hold the same values."""
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def main() -> None:
    """Write, read, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("uri", help="folder to write to: a path, file:///…, s3://…")
    uri = parser.parse_args().uri
    try:
        roundtrip(uri)
    except rfork.RforkError as error:
        sys.exit(f"{error.kind}: {error} {error.hint}".rstrip())


def roundtrip(uri: str) -> None:
    """All four ways; each must give what was saved."""
    module = build()
    saved = rfork.save(module, uri)
    print(f"saved {saved.nbytes} bytes to {saved.uri}")

    # 1. Into a module that exists: straight into its tensors, every chunk checked against its digest.
    into = build()
    report = rfork.load(into, uri)
    print(f"loaded {report.tensors} tensors, verified: {report.verified}, same: {same(module, into)}")

    # 2. Into one that was built without memory or initial values: nothing is held twice.
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
