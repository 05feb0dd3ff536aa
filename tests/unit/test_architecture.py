"""What holds for the repository as a whole: generated code, public names, which room may know which."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rfork

ROOT = Path(__file__).parents[2]
GENERATED = {
    "rfork/peer/v1": "proto/rfork/v1/peer.proto",
    "planner/integrations/keda/v1": "proto/externalscaler/externalscaler.proto",
}
"""Folders of generated code, and what `make proto` makes it of."""

# Which rooms of `rfork` each room may import from. Every arrow points down this list.
FOUNDATION = {
    "errors",
    "settings",
    "fields",
    "wire",
    "logs",
    "signals",
    "niceness",
    "commands",
    "tracing",
    "certificate",
    "tls_files",
    "grpc_credentials",
    "weights_version",
}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "fields": set(),
    "wire": {"fields"},
    "logs": set(),
    "signals": set(),
    "niceness": {"logs"},
    "settings": {"errors", "fields"},
    "tracing": {"errors", "settings", "logs"},
    "commands": {"errors"},
    "weights_version": {"wire"},
    "certificate": set(),
    "tls_files": {"certificate", "errors", "logs", "settings"},
    "grpc_credentials": {"errors", "logs", "settings"},
    "image": FOUNDATION,
    "transport": FOUNDATION | {"image"},
    "storage": FOUNDATION | {"image", "transport"},
    "control": FOUNDATION | {"image"},
    "peer": FOUNDATION | {"image", "transport", "control"},
    "seed": FOUNDATION | {"image", "transport", "storage", "control", "peer"},
    "fork": FOUNDATION | {"image", "transport", "storage", "control", "peer", "seed"},
    "artifacts": FOUNDATION | {"image", "transport", "storage", "control", "peer", "seed", "fork"},
    "engines": FOUNDATION | {"image", "transport", "storage", "control", "peer", "seed", "fork", "artifacts"},
    "cli": FOUNDATION | {"image", "transport", "storage", "control", "peer", "seed", "fork", "artifacts", "engines"},
}
# All that the planner may know of the other side; none of it imports torch.
PLANNER_MAY_IMPORT = {
    "rfork.engine_command",
    "rfork.planner_client.lease",
    "rfork.planner_client.ownership",
    "rfork.errors",
    "rfork.schema.types",
    "rfork.tls_expiry",
    "rfork.grpc_credentials",
    "rfork.image.ranges",
    "rfork.logs",
    "rfork.settings",
    "rfork.tls_files",
    "rfork.tracing",
    "rfork.weights_version",
    "rfork.schema",
}

ENVIRONMENT_WRITERS = {
    "rfork/cli/demo/processes.py": "starts processes without the settings of the demo's own",
    "rfork/cli/launch.py": "the engine that it starts gets what the launcher has",
    "rfork/engines/sglang/flags.py": "flags of SGLang's launcher become settings of its processes",
    "rfork/engines/vllm/engine_manager.py": "the name of a server, for the processes of its engine",
    "rfork/transport/collective/nccl.py": "what NCCL reads",
    "rfork/transport/mooncake/library.py": "what Mooncake reads",
}
"""Who touches the environment beside `rfork.settings`, and why: to hand it on, not to be told by it."""


def modules_of(package: str) -> Iterator[tuple[str, ast.Module]]:
    """Dotted name and syntax tree of every module under a package that is not generated."""
    for path in sorted((ROOT / package).rglob("*.py")):
        if str(path.parent.relative_to(ROOT)) not in GENERATED:
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__"), ast.parse(path.read_text())


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Each module a tree imports, at its top or inside functions; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def package_of(module: str) -> str:
    """The room a module of `rfork` is in: the second part of its name."""
    return module.split(".")[1]


def test_every_room_has_its_arrows() -> None:
    """Each package and module directly under rfork/ is a room whose allowed imports are written down."""
    packages = {path.stem for path in (ROOT / "rfork").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(MAY_IMPORT) == packages - {"__init__", "__main__", "__pycache__"}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_arrows_between_rooms_point_one_way(package: str) -> None:
    """A room imports from the rooms below it and from no other; only the command starts the planner."""
    wrong = [
        f"{module} imports {imported}"
        for module, tree in modules_of("rfork")
        if module.startswith(f"rfork.{package}.") or module == f"rfork.{package}"
        for imported in imports_of(tree)
        if (
            imported.startswith("rfork.") and package_of(imported) not in MAY_IMPORT[package] | {package, "__version__"}
        )
        or (imported.split(".")[0] == "planner" and package != "cli")
    ]
    assert [] == wrong


def test_planner_knows_only_what_both_sides_share() -> None:
    """The planner imports wire models and their like from rfork, and never torch."""
    wrong = [
        f"{module} imports {imported}"
        for module, tree in modules_of("planner")
        for imported in imports_of(tree)
        if imported.split(".")[0] == "torch"
        or (
            imported.startswith("rfork.")
            and not any(imported == known or imported.startswith(f"{known}.") for known in PLANNER_MAY_IMPORT)
            # `from rfork import wire` and `from rfork.image import ranges` name a module, not what is in it.
            and imported not in PLANNER_MAY_IMPORT | {"rfork.__version__"}
        )
    ]
    assert [] == wrong


def cycle_among(packages: tuple[str, ...]) -> list[str]:
    """Modules that import one another in a circle, at their top, in functions or for type checkers alone."""
    trees = {name: tree for package in packages for name, tree in modules_of(package)}

    def imported_by(name: str) -> Iterator[str]:
        for imported in imports_of(trees[name]):
            while imported and imported not in trees:
                imported = imported.rpartition(".")[0]
            # `rfork` itself is imported for its version; its public names it loads when they are asked for.
            if imported not in {"", "rfork", name}:
                yield imported

    try:
        TopologicalSorter({name: set(imported_by(name)) for name in trees}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_one_that_imports_it() -> None:
    """Modules can be read from the bottom up: there is no circle, for type checkers alone neither."""
    assert [] == cycle_among(("rfork", "planner", "benchmarks", "deploy"))


def test_only_settings_are_told_by_the_environment() -> None:
    """`rfork.settings` reads it; who else touches it hands it on to another process or library."""
    accessing = {
        f"{module.replace('.', '/')}.py"
        for package in ("rfork", "planner")
        for module, tree in modules_of(package)
        if not module.startswith("rfork.settings.")
        and any(isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"} for node in ast.walk(tree))
    }
    assert set(ENVIRONMENT_WRITERS) == accessing


def test_public_names() -> None:
    """These are the names that users of the package may rely on, and each of them is there."""
    expected = [
        "ArtifactReport", "ArtifactSettings", "ForkReport", "LoadReport", "Rank", "RforkError", "Settings",
        "StorageSettings", "__version__", "artifacts", "capture", "fork", "fork_pretrained", "load",
        "load_tensors", "no_init", "open", "report_of", "save", "seed", "tensors",
    ]  # fmt: skip
    assert expected == rfork.__all__
    assert [] == [name for name in expected if getattr(rfork, name) is None]


@pytest.mark.parametrize("folder", sorted(GENERATED))
def test_generated_protocol_code_is_fresh(folder: str, tmp_path: Path) -> None:
    """The code in a folder of generated code is what `make proto` makes of its protocol."""
    protocol = Path(GENERATED[folder])
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}={protocol.parent}",
        f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}",
        f"--mypy_out=quiet:{tmp_path}", f"--mypy_grpc_out=quiet:{tmp_path}", str(protocol),
    ]  # fmt: skip
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": tools}, check=True)
    generated = {path.name: path.read_text() for path in (tmp_path / folder).iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / folder).glob("*_pb2*.py*")}
    assert generated == committed


def test_every_test_says_what_holds() -> None:
    """Each test function has a docstring."""
    undocumented = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert [] == undocumented


def test_every_package_has_its_line() -> None:
    """Each package of rfork and planner, and each test folder, is named in docs/structure.md."""
    packages = {
        str(path.parent.relative_to(ROOT)) for top in ("rfork", "planner") for path in (ROOT / top).rglob("__init__.py")
    }
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "rfork").glob("[a-z]*.py")}
    suites = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/test_*.py")}
    page = (ROOT / "docs" / "structure.md").read_text()
    expected = packages - {"rfork"} | modules | suites
    assert set() == {name for name in expected if f"| `{name}` |" not in page}


def test_the_threat_model_names_tests_that_exist() -> None:
    """A promise of the page on security is kept by the test that it names."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text()))
    found = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert set() == named - found
