"""Failures to build a model are one line that names the cause."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from rfork.engines.pretrained_config import model_errors
from rfork.errors import ModelError, SettingsError


def test_a_missing_temporary_folder_is_not_blamed_on_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's folder is fine; the error names the setting that helps."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(SettingsError, match="temporary folder") as raised, model_errors(tmp_path):
        tempfile.gettempdir()
    assert "TMPDIR" in raised.value.hint
    assert str(tmp_path) not in str(raised.value)


def test_a_file_missing_from_the_model_is_blamed_on_it(tmp_path: Path) -> None:
    """This holds while a temporary folder exists."""
    with pytest.raises(ModelError, match=str(tmp_path)), model_errors(tmp_path):
        (tmp_path / "config.json").read_text()
