"""The image of an engine, on which `make images` tries engine.Dockerfile, fits the set-up of the engines' venvs."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import call, create_autospec

import pytest

from tests.engines.setup import install

DOCKERFILE = Path(install.__file__).parent / "Dockerfile"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_code_of_the_image_installs_an_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls what exists, with the arguments that are declared, for the default version."""
    venv_class = create_autospec(install.Venv)
    installer = create_autospec(install.ENGINES[engine][0])
    monkeypatch.setattr(install, "Venv", venv_class)
    monkeypatch.setitem(install.ENGINES, engine, (installer, ""))
    (code,) = re.findall(r'python3 -c "(.*?)"$', DOCKERFILE.read_text().replace("\\\n", "\n"), re.MULTILINE | re.DOTALL)
    exec(code.replace("${ENGINE}", engine).replace("; \n", "\n"), {})
    assert [call(Path("/opt/venv"), engine, install.VERSIONS[engine])] == venv_class.call_args_list
    assert [call(None)] == venv_class.return_value.create.call_args_list
    assert [call(venv_class.return_value, install.VERSIONS[engine])] == installer.call_args_list
