"""The examples on the snapshot format page run, and its numbers equal those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rfork.image import chunks, digest, layout, safetensors_header
from rfork.storage.snapshots import entry
from tests.docs.run_by import blocks_run_by

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "snapshot-format.md"


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in order, the examples find in a snapshot what the page describes."""
    blocks = [block.text for block in blocks_run_by(__file__)]
    assert 5 == len(blocks)
    names: dict[str, object] = {"__name__": "example"}
    monkeypatch.chdir(tmp_path)
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, example {number}", "exec"), names)


def test_a_larger_image_has_the_documented_chunks() -> None:
    """Up to 32 GiB there are at most 128 chunks of 1 to 256 MiB."""
    mib = 1 << 20
    sizes = {1: 1, 128: 1, 129: 2, 1024: 8, 16 << 10: 128, 32 << 10: 256, 64 << 10: 256}
    assert sizes == {image: chunks.chunk_size_for(image * mib) // mib for image in sizes}
    assert 256 == len(chunks.Chunks.of(64 << 30))


@pytest.mark.parametrize(
    "text",
    [
        str(safetensors_header.ALIGNMENT),
        f"{safetensors_header.MAX_HEADER_BYTES:,}",
        f"{digest.LEAF_BYTES >> 10} KiB",
        f"digest_size={digest.DIGEST_BYTES}",
        digest.HASH_DOMAIN.decode(),
        layout.LAYOUT_DOMAIN.decode().strip(),
        layout.WEIGHTS_DOMAIN.decode().strip(),
        safetensors_header.LAYOUT_KEY,
        safetensors_header.WEIGHTS_KEY,
        entry.MANIFEST_SUFFIX,
        entry.SHARED_CHUNKS_PATH,
        f"{entry.MAX_MANIFEST_BYTES >> 20} MiB",
    ],
)
def test_numbers_equal_those_of_the_code(text: str) -> None:
    """Sizes, names and domains on the page equal those of the code."""
    assert text in PAGE.read_text()


def test_manifest_fields_are_documented() -> None:
    """The table of the manifest has exactly its fields."""
    table = PAGE.read_text().partition("## The manifest")[2].partition("## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    assert set(entry.ManifestFile.model_fields) == set(re.findall(r"`(\w+)`", " ".join(rows)))
