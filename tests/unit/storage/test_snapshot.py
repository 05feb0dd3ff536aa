"""Snapshots: written from an image, read back chunk by chunk, and refused when they are not right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rfork.errors import CheckpointError, RforkError, StorageError
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.storage.base import offer_of
from rfork.storage.snapshot import Snapshot, manifest_path, write_snapshot
from rfork.wire import StorageOffer


def made(seed: int) -> Image:
    """Two chunks and a bit, in three tensors."""
    generator = torch.Generator().manual_seed(seed)
    return image_of(
        {
            "a": torch.randn(MIB // 4 + 3, generator=generator),
            "b": torch.randn(2, MIB // 8, generator=generator),
            "c": torch.randint(0, 256, (77,), dtype=torch.uint8, generator=generator),
        }
    )


HELD = made(1)
MANIFEST = HELD.manifest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A snapshot of HELD."""
    written = tmp_path / "model.safetensors"
    write_snapshot(HELD, MANIFEST, written)
    return written


def open_(path: Path, image: Image = HELD) -> Snapshot:
    return Snapshot.open(path.as_uri(), image.layout)


def test_every_chunk_comes_back(path: Path) -> None:
    """An image filled from the snapshot has the manifest of the one it was written from."""
    target, snapshot = made(2), open_(path)
    for begin, end in target.layout.chunks:
        with target.writable(begin, end) as views:
            snapshot.read(begin, end, views)
    snapshot.close()
    assert (MANIFEST.weights_id, MANIFEST.digests) == (
        snapshot.manifest.weights_id,
        target.manifest().digests,
    )


def test_an_offer_names_the_weights(path: Path) -> None:
    """The planner hears what the snapshot holds before anything is read."""
    snapshot = open_(path)
    snapshot.close()
    weights_id = MANIFEST.weights_id
    expected = StorageOffer(kind="snapshot", uri=path.as_uri(), origin=weights_id, weights_id=weights_id)
    assert expected == offer_of(snapshot)


def test_a_snapshot_is_a_safetensors_file(path: Path) -> None:
    """Any safetensors tool reads the tensors."""
    read = load_file(path)
    expected = {name: list(tensor.shape) for name, tensor in read.items()}
    assert {"a": [MIB // 4 + 3], "b": [2, MIB // 8], "c": [77]} == expected


def test_nothing_else_is_left_behind(path: Path) -> None:
    """The file and its manifest are all that is written, whatever was there before."""
    write_snapshot(made(2), made(2).manifest(), path)
    assert ({path, manifest_path(path)}, made(2).manifest().weights_id) == (
        set(path.parent.iterdir()),
        open_(path).manifest.weights_id,
    )


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def without_manifest(path: Path) -> None:
    manifest_path(path).unlink()


def broken_manifest(path: Path) -> None:
    manifest_path(path).write_text("{}")


def forged_manifest(path: Path) -> None:
    text = manifest_path(path).read_text()
    manifest_path(path).write_text(text.replace(MANIFEST.digests[0].hex(), "0" * 32))


def short_manifest(path: Path) -> None:
    text = manifest_path(path).read_text()
    manifest_path(path).write_text(text.replace(f'"{MANIFEST.digests[0].hex()}",', ""))


def manifest_of_another(path: Path) -> None:
    aside = path.with_name("other.safetensors")
    write_snapshot(made(2), made(2).manifest(), aside)
    manifest_path(aside).replace(manifest_path(path))


def no_safetensors(path: Path) -> None:
    path.write_bytes(b"hello")


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (cut_short, StorageError, "promises"),
        (without_manifest, CheckpointError, "missing beside"),
        (broken_manifest, CheckpointError, "not a manifest"),
        (forged_manifest, CheckpointError, "do not hash"),
        (short_manifest, CheckpointError, "does not fit"),
        (manifest_of_another, CheckpointError, "different weights"),
        (no_safetensors, StorageError, "not a safetensors file"),
        (missing, StorageError, "model.safetensors"),
    ],
)
def test_a_snapshot_that_is_not_right(
    path: Path, spoil: Callable[[Path], None], error: type[RforkError], said: str
) -> None:
    """Each is refused when it is opened, and the error says what is wrong."""
    spoil(path)
    with pytest.raises(error, match=said):
        open_(path)


def test_a_snapshot_of_another_layout(path: Path) -> None:
    """The first difference is named."""
    other = image_of({"a": torch.zeros(3), "b": torch.zeros(2, MIB // 8), "c": torch.zeros(77)})
    with pytest.raises(CheckpointError, match="first difference: a: here"):
        open_(path, other)


def test_a_snapshot_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder that does not exist is an error of storage."""
    with pytest.raises(StorageError, match="nowhere"):
        write_snapshot(HELD, MANIFEST, tmp_path / "nowhere" / "model.safetensors")


def test_two_that_write_one_snapshot_do_not_mix(tmp_path: Path) -> None:
    """Whoever is last has written a whole one, and nothing is left lying about."""
    path = tmp_path / "model.safetensors"
    other, begun = made(2), False

    def write_too(nbytes: int) -> None:
        nonlocal begun
        if not begun:
            begun = True
            write_snapshot(other, other.manifest(), path)

    write_snapshot(HELD, MANIFEST, path, write_too)
    snapshot = open_(path)
    snapshot.close()
    assert (MANIFEST.weights_id, {path, manifest_path(path)}) == (
        snapshot.manifest.weights_id,
        set(tmp_path.iterdir()),
    )
