"""rfork as files, as an engine's container gets them: real Pythons whose packages are not rfork's.

The engines are stand-ins of a few lines: what is looked at is what they find, and what they are told.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.docker import files
from rfork.engine_command import ENTRY_POINTS
from rfork.engines.launch import with_plugin_path
from rfork.settings import InstanceSettings
from tests.packages import bare_python, build_wheel, copy_packages

PYTHON_VERSION = "{}.{}".format(*sys.version_info)
VLLM = {
    "vllm/__init__.py": "",
    "vllm/config.py": "from dataclasses import replace",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": """
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        LOADERS = {}
        def register_model_loader(name):
            return lambda kind: LOADERS.setdefault(name, kind)
    """,
    "vllm/model_executor/model_loader/default_loader.py": """
        class DefaultModelLoader:
            def __init__(self, config):
                print("vLLM loads", config)
    """,
    "serve.py": """
        from dataclasses import dataclass, field
        from importlib.metadata import entry_points
        for point in entry_points(group="vllm.general_plugins"):
            point.load()()
        from vllm.model_executor.model_loader import LOADERS
        @dataclass
        class LoadConfig:
            load_format: str = "rfork"
            model_loader_extra_config: dict = field(default_factory=lambda: {"max_inflight_chunks": 2})
        for _ in range(2):
            LOADERS["rfork"](LoadConfig())
    """,
}
SGLANG = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/arg_groups/__init__.py": "",
    "sglang/srt/arg_groups/choices.py": """
        LOAD_FORMAT_CHOICES = ["auto"]
        add_load_format_choices = LOAD_FORMAT_CHOICES.extend
    """,
    "sglang/srt/plugins/__init__.py": "",
    "sglang/srt/plugins/hook_registry.py": """
        class HookType:
            BEFORE, AFTER = "before", "after"
        class HookRegistry:
            hooks = {}
            @classmethod
            def register(cls, target, hook, kind):
                cls.hooks[target.rpartition(".")[2], kind] = hook
    """,
    "serve.py": """
        import argparse
        from importlib.metadata import entry_points
        from types import SimpleNamespace
        for point in entry_points(group="sglang.srt.plugins"):
            point.load()()
        from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
        from sglang.srt.plugins.hook_registry import HookRegistry
        parser = argparse.ArgumentParser()
        HookRegistry.hooks["add_cli_args", "after"](None, parser)
        config = SimpleNamespace(load_format="rfork")
        HookRegistry.hooks["_verify_load_format", "before"](config)
        print("SGLang loads", LOAD_FORMAT_CHOICES, config.load_format)
    """,
}
OLD_PROTOBUF = {
    "google/protobuf/__init__.py": "__version__ = '5.29.6'",
    "protobuf-5.29.6.dist-info/METADATA": "Metadata-Version: 2.1\nName: protobuf\nVersion: 5.29.6",
}
DISABLED_MESSAGE = "rfork is off, falling back to the engine's loader: "
OUTDATED_PROTOBUF_MESSAGE = "this image's protobuf is 5.29.6, and rfork needs <8,>=7.35.1"


@dataclass(frozen=True)
class EngineImage:
    """An engine's image: its Python, its packages, and rfork's files, put in as the webhook does."""

    python: Path
    packages: Path
    files: Path

    def add(self, texts: dict[str, str]) -> None:
        """Install something: a text for each file."""
        for name, text in texts.items():
            file = self.packages / name
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = text.strip("\n").split("\n")
            indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
            file.write_text("\n".join(line[indent:] for line in lines) + "\n", "utf-8")

    def run(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """The image's Python, in an environment that has PYTHONPATH and these variables."""
        environment = {"PYTHONPATH": str(self.files / "path"), "PATH": os.defpath, **variables}
        command = [str(self.python), "-B", *map(str, arguments)]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)

    def run_lines(self, code: str, **variables: str) -> list[str]:
        """The lines that a program prints, which has to end well."""
        done = self.run("-c", code, **variables)
        assert (0, "") == (done.returncode, done.stderr)
        return done.stdout.splitlines()

    def rfork(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command, as a preStop hook has the shell run it, from files where nothing can be executed."""
        environment = {
            "PYTHONPATH": str(self.files / "path"),
            "PATH": f"{self.python.parent}{os.pathsep}{os.defpath}",
        }
        command = ["/bin/sh", str(self.files / "bin" / "rfork"), *arguments]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, for this Python, of packages that are installed here."""
    folder = tmp_path_factory.mktemp("rfork")

    def install(wanted: object, python: str, target: Path) -> None:
        assert isinstance(wanted, tuple)
        assert PYTHON_VERSION == python
        copy_packages(wanted, target)

    files.build(folder / "files", build_wheel(folder), [PYTHON_VERSION], install)
    return folder / "files"


@pytest.fixture
def image(layer: Path, tmp_path: Path) -> EngineImage:
    """An image that has nothing."""
    return EngineImage(*bare_python(tmp_path / "image"), layer)


def test_engines_find_both_plugins(image: EngineImage) -> None:
    """Each engine's group has one entry point of the distribution rfork, which leads to the files' hook."""
    code = (
        "from importlib.metadata import entry_points\n"
        f"for group in {list(ENTRY_POINTS)}:\n"
        "    print(*((each.name, each.value, each.dist.name) for each in entry_points(group=group)))"
    )
    assert [
        "('rfork', 'rfork._files:vllm', 'rfork')",
        "('rfork', 'rfork._files:sglang', 'rfork')",
    ] == image.run_lines(code)


def test_nothing_but_rfork_goes_before_the_images_packages(layer: Path) -> None:
    """What is on PYTHONPATH hides no module of the image: there is no planner, and no dependency."""
    assert ["rfork", "rfork-0.1.0.dist-info"] == sorted(each.name for each in (layer / "path").iterdir())


def test_dependencies_are_found_behind_the_images_own(image: EngineImage) -> None:
    """The image's own packages are imported; what it lacks is found at the end of the path."""
    image.add({"structlog/__init__.py": "", "structlog-99.dist-info/METADATA": "Name: structlog\nVersion: 99"})
    deps = f"{image.files}/deps/cp{PYTHON_VERSION.replace('.', '')}"
    assert [
        f"{image.packages}/structlog/__init__.py",
        f"{deps}/xxhash/__init__.py",
        "True",
        "''",
    ] == image.run_lines(
        "import rfork, sys, structlog, xxhash, rfork._files as files\n"
        "print(structlog.__file__, xxhash.__file__, sep='\\n')\n"
        f"print(sys.path[-1] == {deps!r} and sys.path.count(sys.path[-1]) == 1)\n"
        "print(repr(files.unusable_reason()))"
    )


def test_a_pickle_may_come_before_the_plugins(image: EngineImage, tmp_path: Path) -> None:
    """A process that only unpickles what is rfork's finds what that needs."""
    (tmp_path / "settings").write_bytes(pickle.dumps(InstanceSettings(max_inflight_chunks=3)))
    code = f"import pickle; print(pickle.load(open({str(tmp_path / 'settings')!r}, 'rb')).max_inflight_chunks)"
    assert ["3"] == image.run_lines(code)


def test_files_are_found_through_a_link(image: EngineImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rfork launch` links to the package from a folder of its own: the files' dependencies are found."""
    monkeypatch.setattr("rfork.__file__", str(image.files / "path" / "rfork" / "__init__.py"))
    with with_plugin_path({}) as environment:
        assert ["True"] == image.run_lines(
            "import rfork.settings; print('rfork-launch' in rfork.__file__)", **environment
        )


@pytest.mark.parametrize(
    ("engine", "loads"),
    [
        (VLLM, "vLLM loads LoadConfig(load_format='auto', model_loader_extra_config={})\n" * 2),
        (SGLANG, "SGLang loads ['auto', 'rfork'] auto\n"),
    ],
    ids=["vllm", "sglang"],
)
def test_an_image_whose_packages_are_too_old(image: EngineImage, engine: dict[str, str], loads: str) -> None:
    """The engine loads by itself, and one line names the package: no traceback, no unknown load format."""
    image.add({**engine, **OLD_PROTOBUF})
    done = image.run(image.packages / "serve.py")
    assert (0, loads, f"{DISABLED_MESSAGE}{OUTDATED_PROTOBUF_MESSAGE}\n") == (
        done.returncode,
        done.stdout,
        done.stderr,
    )


def test_an_image_whose_packages_are_too_old_is_launched(image: EngineImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `rfork launch` puts in front of the files leads to the same: the engine loads by itself."""
    image.add({**VLLM, **OLD_PROTOBUF})
    monkeypatch.setattr("rfork.__file__", str(image.files / "path" / "rfork" / "__init__.py"))
    with with_plugin_path({"PYTHONPATH": str(image.files / "path")}) as environment:
        done = image.run(image.packages / "serve.py", **environment)
    assert (0, f"{DISABLED_MESSAGE}{OUTDATED_PROTOBUF_MESSAGE}\n") == (done.returncode, done.stderr)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_image_that_does_not_fit_is_left_alone(image: EngineImage, engine: str) -> None:
    """Nothing of rfork's is on its path, where the engine would take it for a package of its own."""
    image.add({**VLLM, **SGLANG, **OLD_PROTOBUF})
    code = f"import sys, rfork._files as files; files.{engine}(); print([p for p in sys.path if 'deps' in p])"
    assert ["[]"] == image.run_lines(code)


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_a_server_that_must_be_forked(image: EngineImage, engine: dict[str, str]) -> None:
    """With RFORK_FAIL_IF_NOT_FORKED it does not start, for the same reason."""
    image.add({**engine, **OLD_PROTOBUF})
    done = image.run(image.packages / "serve.py", RFORK_FAIL_IF_NOT_FORKED="1")
    expected = (
        f"RuntimeError: this server cannot be forked: {OUTDATED_PROTOBUF_MESSAGE} (unset RFORK_FAIL_IF_NOT_FORKED)"
    )
    assert (1, expected) == (done.returncode, done.stderr.splitlines()[-1])


def test_a_python_that_the_files_are_not_for(image: EngineImage, tmp_path: Path) -> None:
    """The reason names the Pythons there are."""
    for name in ("path", "bin"):
        shutil.copytree(image.files / name, tmp_path / name)
    (tmp_path / "deps" / "cp399").mkdir(parents=True)
    moved = EngineImage(image.python, image.packages, tmp_path)
    this = f"cp{PYTHON_VERSION.replace('.', '')}"
    why = f"rfork's files in {tmp_path} are for cp399, and this Python is {this}"
    assert [why] == moved.run_lines("import rfork._files as files; print(files.unusable_reason())")
    done = moved.rfork("drain", "--help")
    expected = f"rfork: its files in {tmp_path} are for cp399, and this Python is {this}\n"
    assert (1, expected) == (done.returncode, done.stderr)


def test_what_packages_ask_of_one_another_is_tried(image: EngineImage) -> None:
    """A package of the image that is older than another asks for, but does, is no reason to be off."""
    image.add({"sniffio/__init__.py": "", "certifi-1.dist-info/METADATA": "Name: certifi\nVersion: 1"})
    image.add({"idna-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: idna\nVersion: 1"})
    assert ["''"] == image.run_lines("import rfork._files as files; print(repr(files.unusable_reason()))")


def test_what_does_not_import_is_told(image: EngineImage) -> None:
    """One that does not even import is."""
    image.add(
        {
            "typing_inspection/__init__.py": "raise ImportError('broken')",
            "typing_inspection-0.1.dist-info/METADATA": "Name: typing-inspection\nVersion: 0.1",
        }
    )
    (why,) = image.run_lines("import rfork._files as files; print(files.unusable_reason())")
    assert "this image's typing-inspection is 0.1, and pydantic needs " in why
    assert why.endswith(" (ImportError: broken)")


def test_the_command_runs_whatever_the_image_has(image: EngineImage) -> None:
    """`rfork drain` is a process of its own: there rfork's dependencies go first."""
    image.add({**OLD_PROTOBUF, "httpx/__init__.py": "raise ImportError", "rich/__init__.py": "raise ImportError"})
    helped = image.rfork("drain", "--help")
    assert (0, "Usage: rfork drain [OPTIONS] [INSTANCE]") == (helped.returncode, helped.stdout.split("\n")[0])
    done = image.rfork("drain", "--replica", "server-1", "--planner", "http://127.0.0.1:9", "--wait", "0")
    assert "error: planner http://127.0.0.1:9 is unreachable" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_image_without_python(layer: Path, tmp_path: Path) -> None:
    """The command says so, as shells do of what is not there."""
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    done = subprocess.run(
        ["/bin/sh", layer / "bin" / "rfork"], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (127, "rfork: this image has no python3 on its PATH\n") == (done.returncode, done.stderr)


def test_a_python_that_is_no_version() -> None:
    """A build for no Python there is ends before it begins."""
    with pytest.raises(ValueError, match=r"invalid Python version, expected e\.g\. 3\.11: cp312"):
        files.build(Path("/nonexistent"), Path("/nonexistent"), ["3.11", "cp312"], lambda *_: None)
