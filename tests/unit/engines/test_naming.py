"""What a model is called where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.engines.naming import meeting_name


@pytest.mark.parametrize(
    ("source", "revision", "expected"),
    [
        ("org/model", None, "org/model"),
        ("org/model", "v2", "org/model@v2"),
        ("/cache/models--org--model/snapshots/0a1b", None, "org/model@0a1b"),
        ("/cache/models--org--model/snapshots/0a1b/", "v2", "org/model@v2"),
        ("{folder}/SmolLM2-135M-Instruct", None, "SmolLM2-135M-Instruct"),
        ("{folder}/tiny/", None, "tiny"),
        ("{folder}/tiny", "v2", "tiny@v2"),
    ],
)
def test_a_model_goes_by_its_hub_s_name_or_its_folder_s(
    source: str, revision: str | None, expected: str, tmp_path: Path
) -> None:
    """The hub's name and commit, or the last part of a folder's path; and the revision that was named."""
    for name in ("SmolLM2-135M-Instruct", "tiny"):
        (tmp_path / name).mkdir()
    assert expected == meeting_name(source.format(folder=tmp_path), revision)


@pytest.mark.parametrize("last", ["checkpoint-100", "model", "latest", "final", "v2", "0a1b2c3d4e", "7"])
def test_a_folder_that_many_models_have_goes_by_its_path(last: str, tmp_path: Path) -> None:
    """Two fine-tunes in folders of one such name are two models."""
    folder = tmp_path / last
    folder.mkdir()
    assert str(folder.resolve()) == meeting_name(folder)
