"""Write plain safetensors files, as a stream: what every Hugging Face tool reads."""

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
"""Of the data section, as safetensors' own writer has it."""


def in_file_order(outlines: Sequence[TensorOutline]) -> list[TensorOutline]:
    """Widest types first, then by name, as safetensors' own writer has it: so that all are aligned."""
    return sorted(outlines, key=lambda outline: (-outline.spec.dtype.itemsize, outline.name))


def write_safetensors(
    store: BlobStore,
    name: str,
    outlines: Sequence[TensorOutline],
    tensors: Iterator[torch.Tensor],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write one file; `tensors` come in the order of `outlines`, in host memory, contiguous.

    Raises CheckpointError, before anything is written, for what safetensors cannot say; StorageError kinds.
    """
    head = header_of(outlines)
    with store.write(name) as writer:
        writer.write([memoryview(head)])
        for outline, tensor in zip(outlines, tensors, strict=False):
            if tensor.nbytes != outline.spec.nbytes or not tensor.is_contiguous():
                raise ValueError(f"what came for {outline.name} is not what was promised")
            if tensor.nbytes:
                writer.write([host_view(tensor.data_ptr(), tensor.nbytes)])
            if progress is not None:
                progress(tensor.nbytes)


def header_of(outlines: Sequence[TensorOutline]) -> bytes:
    """What the file begins with; raises CheckpointError for what safetensors cannot say."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for outline in outlines:
        dtype = DTYPES.get(str(outline.spec.dtype).removeprefix("torch."))
        if dtype is None or outline.name == "__metadata__":
            raise CheckpointError(
                f"{outline.name} ({outline.spec.dtype}) cannot be in a safetensors file",
                hint="a .tensors file or a snapshot holds tensors of every type",
            )
        end = at + outline.spec.nbytes
        entries[outline.name] = {"dtype": dtype, "shape": outline.spec.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-len(text) // ALIGNMENT) * ALIGNMENT
    if padded > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"a safetensors header of {padded} bytes; readers take {MAX_HEADER_BYTES} at most",
            hint="write several files: give a folder and a shard size",
        )
    return struct.pack("<Q", padded) + text.ljust(padded)
