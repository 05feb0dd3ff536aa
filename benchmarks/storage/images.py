"""Images of `benchmarks.storage`: two images, written once in every format that a loader reads.

"dense" has a Llama's shapes, 4.03 GB in four shards as Hugging Face writes them; "small" is 20,000 tensors of
48 to 56 KiB, 1.06 GB in one file. With --quick 0.77 GB, and 6,000 of the small ones, 0.32 GB. All are
bfloat16 and random bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file

from benchmarks import shapes
from rfork.errors import RforkError

FileFormat = Literal["safetensors", "tensorizer", "pickled", "snapshot"]

DENSE, SMALL = "dense", "small"
SHARDS: Mapping[str, int] = {DENSE: 4, SMALL: 1}
SMALL_TENSORS, QUICK_SMALL_TENSORS = 20_000, 6_000
SMALL_ROWS = (24, 26, 28)
SMALL_ELEMENTS = 1024
MAX_TENSORIZER_TENSORS = 2000
"""Maximum tensors in one .tensors file: its index fits about 2,500 of these names."""
FILE_FORMATS: frozenset[FileFormat] = frozenset(get_args(FileFormat))
SPARE_BYTES = 2 << 30

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StoredImage:
    """One image on disk: the path of each format, and the expected tensors."""

    name: str
    folder: Path
    bytes: int
    safetensors: tuple[Path, ...]
    tensorizer: tuple[Path, ...]
    pickled: tuple[Path, ...]
    fingerprint: str
    """Fingerprint of the tensors by name."""
    file_fingerprint: str
    """Fingerprint of the safetensors files, each as one uint8 tensor under its file name."""

    @property
    def checkpoint(self) -> Path:
        """Folder of the safetensors files, in Hugging Face's layout."""
        return self.safetensors[0].parent

    @property
    def files(self) -> Mapping[FileFormat, tuple[Path, ...]]:
        """Tensor files of each format; none for a format that was not requested."""
        return {
            "safetensors": self.safetensors,
            "tensorizer": self.tensorizer,
            "pickled": self.pickled,
            "snapshot": (self.snapshot,) if self.snapshot.exists() else (),
        }

    @property
    def snapshot(self) -> Path:
        """rfork's own snapshot."""
        return self.folder / "snapshot" / "model.safetensors"


def shapes_of(name: str, quick: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an image's tensors, by name, in the order of its files."""
    if name == DENSE and quick:
        return shapes.llama(layers=21, hidden=1024, intermediate=4096, key_value=256)
    if name == DENSE:
        return shapes.llama(layers=31, hidden=2048, intermediate=8192, key_value=512)
    return {
        f"experts.{index}.weight": (SMALL_ROWS[index % len(SMALL_ROWS)], SMALL_ELEMENTS)
        for index in range(QUICK_SMALL_TENSORS if quick else SMALL_TENSORS)
    }


def bytes_of(named: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of tensors of these shapes, in bfloat16."""
    return sum(int(np.prod(shape)) for shape in named.values()) * torch.bfloat16.itemsize


def split_shards(named: Mapping[str, tuple[int, ...]], parts: int) -> list[dict[str, tuple[int, ...]]]:
    """Split the shapes into shards of about equal bytes."""
    total_bytes, done = bytes_of(named), 0
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(parts)]
    for name, shape in named.items():
        shards[min(parts - 1, done * parts // total_bytes)][name] = shape
        done += bytes_of({name: shape})
    return shards


def check_free_space(folder: Path, needed: int) -> None:
    """Raise RforkError, in one line, unless the disk has room for `needed` bytes and a margin."""
    needed += SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RforkError(
            f"{folder} has {free / 1e9:.1f} GB free and the benchmark writes {needed / 1e9:.1f} GB: "
            "free some space, choose another disk with TMPDIR, or use --quick"
        )


def write_image(
    name: str, quick: bool, folder: Path, file_formats: frozenset[FileFormat] = FILE_FORMATS
) -> StoredImage:
    """Make an image and write it below `folder`: as safetensors, and as `tensorizer` and `pickled` if
    requested.
    """
    generator = torch.Generator().manual_seed(len(name))
    shards = split_shards(shapes_of(name, quick), SHARDS[name])
    written: dict[str, list[Path]] = {"safetensors": [], "tensorizer": [], "pickled": []}
    digests: list[str] = []
    weight_map: dict[str, str] = {}
    for file_format in written:
        (folder / file_format).mkdir(parents=True)
    for number, shard in enumerate(shards, start=1):
        tensors = {each: _random(shape, generator) for each, shape in shard.items()}
        digests += digests_of(tensors.items())
        stem = f"model-{number:05d}-of-{len(shards):05d}"
        path = folder / "safetensors" / f"{stem}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        written["safetensors"].append(path)
        if "pickled" in file_formats:
            torch.save(tensors, folder / "pickled" / f"{stem}.pt")
            written["pickled"].append(folder / "pickled" / f"{stem}.pt")
        if "tensorizer" in file_formats:
            written["tensorizer"] += _serialized(tensors, folder / "tensorizer" / stem)
    index = {"metadata": {"total_size": bytes_of(shapes_of(name, quick))}, "weight_map": weight_map}
    (folder / "safetensors" / "model.safetensors.index.json").write_text(json.dumps(index))
    return StoredImage(
        name=name,
        folder=folder,
        bytes=bytes_of(shapes_of(name, quick)),
        safetensors=tuple(written["safetensors"]),
        tensorizer=tuple(written["tensorizer"]),
        pickled=tuple(written["pickled"]),
        fingerprint=fingerprint(digests),
        file_fingerprint=fingerprint(digests_of(_as_tensors(written["safetensors"]))),
    )


def digests_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Return a digest per tensor: of its name, dtype, shape, and every byte."""
    for name, tensor in tensors:
        digest = xxhash.xxh3_128(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        yield digest.hexdigest()


def fingerprint(digests: Iterable[str]) -> str:
    """Combine digests into one, independent of their order."""
    return xxhash.xxh3_128("\n".join(sorted(digests)).encode()).hexdigest()


def _serialized(tensors: Tensors, stem: Path) -> Iterator[Path]:
    # Imported here, because the loader processes fork from one that has imported this module and no loader.
    from tensorizer import TensorSerializer

    for part, names in enumerate(_batches(list(tensors), MAX_TENSORIZER_TENSORS)):
        path = stem.with_name(f"{stem.name}-{part:03d}.tensors")
        serializer = TensorSerializer(str(path))
        serializer.write_state_dict({each: tensors[each] for each in names})
        serializer.close()
        yield path


def _as_tensors(paths: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        yield path.name, torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    tensor.view(torch.int64).random_(generator=generator)
    return tensor


def _batches(names: list[str], size: int) -> Iterator[list[str]]:
    for begin in range(0, len(names), size):
        yield names[begin : begin + size]
