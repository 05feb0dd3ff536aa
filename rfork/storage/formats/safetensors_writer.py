"""Streaming writer of plain safetensors files, readable by every Hugging Face tool."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence

import torch

from rfork.errors import CheckpointError
from rfork.image.host_memory import host_view
from rfork.image.safetensors_header import DTYPES, MAX_HEADER_BYTES
from rfork.storage.blob import BlobStore
from rfork.storage.tensorizer.writer import TensorOutline

ALIGNMENT = 8
"""Alignment of the data section, as in safetensors' own writer."""


def in_file_order(outlines: Sequence[TensorOutline]) -> list[TensorOutline]:
    """Sort by decreasing item size, then by name, like safetensors' own writer; this aligns all tensors."""
    return sorted(outlines, key=lambda outline: (-outline.spec.dtype.itemsize, outline.name))


def write_safetensors(
    store: BlobStore,
    name: str,
    outlines: Sequence[TensorOutline],
    tensors: Iterator[torch.Tensor],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write one file; `tensors` must be contiguous, in host memory and in the order of `outlines`.

    Raises CheckpointError, before anything is written, if safetensors cannot represent a tensor; StorageError
    subclasses.
    """
    head = header_of(outlines)
    with store.write(name) as writer:
        writer.write([memoryview(head)])
        for outline, tensor in zip(outlines, tensors, strict=False):
            if tensor.nbytes != outline.spec.nbytes or not tensor.is_contiguous():
                raise ValueError(f"{outline.name} does not match its outline")
            if tensor.nbytes:
                writer.write([host_view(tensor.data_ptr(), tensor.nbytes)])
            if progress is not None:
                progress(tensor.nbytes)


def header_of(outlines: Sequence[TensorOutline]) -> bytes:
    """Return the header of a file; raises CheckpointError if safetensors cannot represent a tensor."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for outline in outlines:
        dtype = DTYPES.get(str(outline.spec.dtype).removeprefix("torch."))
        if dtype is None or outline.name == "__metadata__":
            raise CheckpointError(
                f"{outline.name} ({outline.spec.dtype}) cannot be stored in a safetensors file",
                hint="a .tensors file or a snapshot can store tensors of every dtype",
            )
        end = at + outline.spec.nbytes
        entries[outline.name] = {"dtype": dtype, "shape": outline.spec.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-len(text) // ALIGNMENT) * ALIGNMENT
    if padded > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the safetensors header would have {padded} bytes; readers accept at most {MAX_HEADER_BYTES}",
            hint="write several files: pass a folder and a shard size",
        )
    return struct.pack("<Q", padded) + text.ljust(padded)
