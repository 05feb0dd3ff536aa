"""rfork injected as files into an engine's container: real Python environments whose packages differ from
rfork's.

The engines are short stand-ins; the tests check what they import and which settings they receive.
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
    "google/protobuf/__init__.py": "__version__ = '4.25.8'",
    "protobuf-4.25.8.dist-info/METADATA": "Metadata-Version: 2.1\nName: protobuf\nVersion: 4.25.8",
}
DISABLED_MESSAGE = "rfork is disabled, falling back to the engine's loader: "
OUTDATED_PROTOBUF_MESSAGE = "this image's protobuf is 4.25.8, and rfork needs <8,>=5.29"


@dataclass(frozen=True)
class EngineImage:
    """An engine's container image: its Python, its packages, and rfork's files, injected as the webhook does."""

    python: Path
    packages: Path
    files: Path

    def add(self, texts: dict[str, str]) -> None:
        """Install a package: file names and their contents."""
        for name, text in texts.items():
            file = self.packages / name
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = text.strip("\n").split("\n")
            indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
            file.write_text("\n".join(line[indent:] for line in lines) + "\n", "utf-8")

    def run(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the image's Python with PYTHONPATH and these environment variables."""
        environment = {"PYTHONPATH": str(self.files / "path"), "PATH": os.defpath, **variables}
        command = [str(self.python), "-B", *map(str, arguments)]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)

    def run_lines(self, code: str, **variables: str) -> list[str]:
        """Return the lines that a program prints; the program must succeed."""
        done = self.run("-c", code, **variables)
        assert "" == done.stderr
        assert 0 == done.returncode
        return done.stdout.splitlines()

    def rfork(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the `rfork` command as a preStop hook's shell does, from files that are not executable."""
        environment = {
            "PYTHONPATH": str(self.files / "path"),
            "PATH": f"{self.python.parent}{os.pathsep}{os.defpath}",
        }
        command = ["/bin/sh", str(self.files / "bin" / "rfork"), *arguments]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The injected files for this Python, made of packages that are installed here."""
    folder = tmp_path_factory.mktemp("rfork")

    def install(wanted: object, python: str, target: Path) -> None:
        assert isinstance(wanted, tuple)
        assert PYTHON_VERSION == python
        copy_packages(wanted, target)

    files.build(folder / "files", build_wheel(folder), [PYTHON_VERSION], install)
    return folder / "files"


@pytest.fixture
def image(layer: Path, tmp_path: Path) -> EngineImage:
    """An image without any packages."""
    return EngineImage(*bare_python(tmp_path / "image"), layer)


def test_engines_find_both_plugins(image: EngineImage) -> None:
    """Each engine's entry-point group has one entry of the distribution rfork, which refers to the injected
    plugin.
    """
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
    """The directory on PYTHONPATH hides no module of the image: it contains neither the planner nor
    dependencies.
    """
    assert ["rfork", "rfork-0.1.0.dist-info"] == sorted(each.name for each in (layer / "path").iterdir())


def test_the_images_packages_come_before_dependencies(image: EngineImage) -> None:
    """The image's own packages are imported; missing ones come from the end of the path."""
    image.add({"safetensors/__init__.py": "", "safetensors-99.dist-info/METADATA": "Name: safetensors\nVersion: 99"})
    deps = f"{image.files}/deps/cp{PYTHON_VERSION.replace('.', '')}"
    assert [
        f"{image.packages}/safetensors/__init__.py",
        f"{deps}/xxhash/__init__.py",
        "True",
        "''",
    ] == image.run_lines(
        "import rfork, sys, safetensors, xxhash, rfork._files as files\n"
        "print(safetensors.__file__, xxhash.__file__, sep='\\n')\n"
        f"print(sys.path[-1] == {deps!r} and sys.path.count(sys.path[-1]) == 1)\n"
        "print(repr(files.unusable_reason()))"
    )


def test_an_object_can_be_unpickled_before_the_plugins_load(image: EngineImage, tmp_path: Path) -> None:
    """A process that only unpickles an object of rfork finds the modules that it needs."""
    (tmp_path / "settings").write_bytes(pickle.dumps(InstanceSettings(max_inflight_chunks=3)))
    code = f"import pickle; print(pickle.load(open({str(tmp_path / 'settings')!r}, 'rb')).max_inflight_chunks)"
    assert ["3"] == image.run_lines(code)


def test_files_are_found_through_a_link(image: EngineImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rfork launch` links to the package from its own directory: the injected dependencies are found."""
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
def test_an_image_with_outdated_packages_disables_rfork(image: EngineImage, engine: dict[str, str], loads: str) -> None:
    """The engine uses its own loader, and one line names the package: no traceback, no unknown load format."""
    image.add({**engine, **OLD_PROTOBUF})
    done = image.run(image.packages / "serve.py")
    assert 0 == done.returncode
    assert loads == done.stdout
    assert f"{DISABLED_MESSAGE}{OUTDATED_PROTOBUF_MESSAGE}\n" == done.stderr


def test_launch_in_an_image_with_outdated_packages_disables_rfork(
    image: EngineImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that `rfork launch` puts first on the path have the same result: the engine uses its own
    loader.
    """
    image.add({**VLLM, **OLD_PROTOBUF})
    monkeypatch.setattr("rfork.__file__", str(image.files / "path" / "rfork" / "__init__.py"))
    with with_plugin_path({"PYTHONPATH": str(image.files / "path")}) as environment:
        done = image.run(image.packages / "serve.py", **environment)
    assert 0 == done.returncode
    assert f"{DISABLED_MESSAGE}{OUTDATED_PROTOBUF_MESSAGE}\n" == done.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_incompatible_image_is_not_modified(image: EngineImage, engine: str) -> None:
    """No directory of rfork is on its path, where the engine would import packages from it."""
    image.add({**VLLM, **SGLANG, **OLD_PROTOBUF})
    code = f"import sys, rfork._files as files; files.{engine}(); print([p for p in sys.path if 'deps' in p])"
    assert ["[]"] == image.run_lines(code)


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_a_server_that_must_fork_does_not_start(image: EngineImage, engine: dict[str, str]) -> None:
    """With RFORK_FAIL_IF_NOT_FORKED it exits with the same reason."""
    image.add({**engine, **OLD_PROTOBUF})
    done = image.run(image.packages / "serve.py", RFORK_FAIL_IF_NOT_FORKED="1")
    expected = (
        f"RuntimeError: this server cannot be forked: {OUTDATED_PROTOBUF_MESSAGE} (unset RFORK_FAIL_IF_NOT_FORKED)"
    )
    assert 1 == done.returncode
    assert expected == done.stderr.splitlines()[-1]


def test_an_unsupported_python_is_named(image: EngineImage, tmp_path: Path) -> None:
    """The reason lists the supported Python versions."""
    for name in ("path", "bin"):
        shutil.copytree(image.files / name, tmp_path / name)
    (tmp_path / "deps" / "cp399").mkdir(parents=True)
    moved = EngineImage(image.python, image.packages, tmp_path)
    this = f"cp{PYTHON_VERSION.replace('.', '')}"
    reason = f"rfork's files in {tmp_path} are for cp399, and this Python is {this}"
    assert [reason] == moved.run_lines("import rfork._files as files; print(files.unusable_reason())")
    done = moved.rfork("drain", "--help")
    expected = f"rfork: its files in {tmp_path} are for cp399, and this Python is {this}\n"
    assert 1 == done.returncode
    assert expected == done.stderr


def test_an_unmet_requirement_that_works_is_ignored(image: EngineImage) -> None:
    """A package that is older than another one requires, but works, does not disable rfork."""
    image.add({"sniffio/__init__.py": "", "certifi-1.dist-info/METADATA": "Name: certifi\nVersion: 1"})
    image.add({"idna-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: idna\nVersion: 1"})
    assert ["''"] == image.run_lines("import rfork._files as files; print(repr(files.unusable_reason()))")


def test_a_package_that_fails_to_import_is_named(image: EngineImage) -> None:
    """An unmet requirement that fails on import disables rfork."""
    image.add(
        {
            "typing_inspection/__init__.py": "raise ImportError('broken')",
            "typing_inspection-0.1.dist-info/METADATA": "Name: typing-inspection\nVersion: 0.1",
        }
    )
    (reason,) = image.run_lines("import rfork._files as files; print(files.unusable_reason())")
    assert "this image's typing-inspection is 0.1, and pydantic needs " in reason
    assert reason.endswith(" (ImportError: broken)")


def test_the_command_runs_with_any_packages(image: EngineImage) -> None:
    """`rfork drain` runs in its own process, where rfork's dependencies come first."""
    image.add({**OLD_PROTOBUF, "httpx/__init__.py": "raise ImportError", "rich/__init__.py": "raise ImportError"})
    help_result = image.rfork("drain", "--help")
    assert 0 == help_result.returncode
    assert "Usage: rfork drain [OPTIONS] [INSTANCE]" == help_result.stdout.split("\n")[0]
    done = image.rfork("drain", "--replica", "server-1", "--planner", "http://127.0.0.1:9", "--wait", "0")
    assert "error: planner http://127.0.0.1:9 is unreachable" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_image_without_python_is_reported(layer: Path, tmp_path: Path) -> None:
    """The command exits like a shell that does not find a program."""
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    done = subprocess.run(
        ["/bin/sh", layer / "bin" / "rfork"], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert 127 == done.returncode
    assert "rfork: this image has no python3 on its PATH\n" == done.stderr


def test_an_invalid_python_version_fails_the_build() -> None:
    """A build for an invalid Python version fails before it starts."""
    with pytest.raises(ValueError, match=r"invalid Python version, expected e\.g\. 3\.10: cp312"):
        files.build(Path("/nonexistent"), Path("/nonexistent"), ["3.11", "cp312"], lambda *_: None)
