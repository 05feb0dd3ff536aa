"""Hook targets against the sources of a wheel, and what the matrix of versions concludes from them."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from rfork.engines.hook_targets import HookTarget, Tier
from tests.engines.matrix import Level, Row, judge, merge, read, write
from tests.engines.wheel_sources import WheelSources, check_sources

SOURCES = {
    "engine/__init__.py": "from engine.loader import load_model as load\nfrom . import config\n",
    "engine/config.py": """
class Options:
    level: int = 0
    if True:
        device: str
LIMIT: int = 3
try:
    import torch
    FAST = True
except ImportError:
    SLOW = True
class Sealed:
    def parse(self, text): ...
Sealed = seal(Sealed)
""",
    "engine/loader.py": "def load_model(config, *, prefix=''): ...\n",
    "engine/worker/__init__.py": "",
    "engine/worker/base.py": "class Base:\n    def sleep(self, level=1): ...\n    def _wait(self): ...\n",
    "engine/worker/gpu.py": """
from other.package import Mixin
from .base import Base
from ..config import Options

class Worker(Base, Mixin):
    async def wake_up(self, tags=None): ...
    @functools.cached_property
    def backend(self): ...
    def __init__(self, options): ...
""",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of a small engine."""
    path = tmp_path_factory.mktemp("wheel") / "engine-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in SOURCES.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize(
    ("hook_target", "mismatch"),
    [
        (HookTarget("engine.load", ("config", "prefix")), None),
        (HookTarget("engine.loader.load_model", ("model",)), "has no parameter model"),
        (HookTarget("engine.config.Options.level"), None),
        (HookTarget("engine.config.Options.device"), None),
        (HookTarget("engine.config.LIMIT"), None),
        (HookTarget("engine.config.FAST"), None),
        (HookTarget("engine.config.SLOW"), None),
        (HookTarget("engine.config.LIMIT", ("value",)), "cannot be inspected (LIMIT of engine.config is no function)"),
        (HookTarget("engine.config.Sealed.parse", ("text",)), None),
        (HookTarget("engine.worker.gpu.Worker", ("options",)), None),
        (HookTarget("engine.worker.gpu.Worker.wake_up", ("tags",)), None),
        (HookTarget("engine.worker.gpu.Worker.sleep", ("level",)), None),
        (HookTarget("engine.worker.gpu.Options.level"), None),
        (HookTarget("engine.worker.gpu.Mixin"), None),
        (HookTarget("engine.worker.gpu.Worker.discard"), "does not exist (class Worker has no attribute discard)"),
        (HookTarget("engine.worker.gpu.Worker.discard", optional=True), None),
        (HookTarget("engine.worker.cpu.Worker", optional=True), "does not exist (module engine.worker has no"),
        (HookTarget("motor.Worker"), "does not exist (no module motor)"),
    ],
    ids=lambda value: value.path if isinstance(value, HookTarget) else "",
)
def test_targets_are_found_as_in_an_installed_engine(
    wheel: Path, hook_target: HookTarget, mismatch: str | None
) -> None:
    """Also through imports, base classes, and statements under conditions."""
    found = [reason for _, reason in check_sources(wheel, [hook_target])]
    assert len(found) == (mismatch is not None)
    assert all(reason.startswith(mismatch or "") for reason in found)


def test_public_methods_of_a_class_include_inherited_ones(wheel: Path) -> None:
    """Properties do not count, and base classes of other packages are unknown."""
    assert ["sleep", "wake_up"] == WheelSources(wheel).public_methods("engine.worker.gpu.Worker")


@pytest.mark.parametrize(
    ("tiers", "unknown", "level", "notes"),
    [
        ((), (), "checked", ()),
        (("comfort",), (), "checked", ("engine.comfort is gone",)),
        (("lifecycle",), (), "unsupported", ("engine.lifecycle is gone",)),
        (("core",), (), "unsupported", ("engine.core is gone",)),
        ((), ("swap",), "unsupported", ("unknown methods that may change weights: swap",)),
    ],
)
def test_a_checked_version_has_all_targets_that_matter(
    tiers: Sequence[Tier], unknown: Sequence[str], level: Level, notes: Sequence[str]
) -> None:
    """A missing comfort target is a note."""
    incompatible = [(HookTarget(f"engine.{tier}", tier=tier), "is gone") for tier in tiers]
    assert (level, list(notes)) == judge(incompatible, unknown)


def test_rows_are_replaced_by_version(tmp_path: Path) -> None:
    """The file is ordered by engine and version; other rows are kept."""
    file = tmp_path / "matrix.json"
    assert [] == read(file)
    old = [Row("vllm", "0.9.1", "checked", "aaa"), Row("sglang", "0.5.10", "forked", "aaa", "note")]
    new = [Row("vllm", "0.10.0", "forked", "bbb"), Row("vllm", "0.9.1", "forked", "bbb")]
    write(file, merge(old, new))
    assert [old[1], new[1], new[0]] == read(file)
