"""Default names of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.engines.model_name import canonical_model_name


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/model", "org/model"),
        ("/cache/models--org--model/snapshots/0a1b", "org/model"),
        ("/cache/models--org--model/snapshots/0a1b/", "org/model"),
        ("{folder}/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("{folder}/tiny/", "tiny"),
    ],
)
def test_a_model_is_named_after_its_hub_id_or_folder(source: str, expected: str, tmp_path: Path) -> None:
    """A folder in the hub's cache is named after the hub id."""
    for name in ("SmolLM2-135M-Instruct", "tiny"):
        (tmp_path / name).mkdir()
    assert expected == canonical_model_name(source.format(folder=tmp_path))


@pytest.mark.parametrize("last", ["checkpoint-100", "model", "latest", "final", "v2", "0a1b2c3d4e", "7"])
def test_a_generic_folder_is_named_by_its_path(last: str, tmp_path: Path) -> None:
    """Two fine-tunes in folders with the same generic name are different models."""
    folder = tmp_path / last
    folder.mkdir()
    assert str(folder.resolve()) == canonical_model_name(folder)
