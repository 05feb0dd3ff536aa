"""Rules of the repository as a whole: layers, generated code, public names, documentation of packages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rfork
from rfork.gc_pause import gc_paused

ROOT = Path(__file__).parents[2]
GENERATED = ("rfork/peer/v1", "rfork/net/health/v1", "planner/integrations/keda/v1")
"""Folders of generated code."""

BASE = {
    "errors",
    "addresses",
    "asyncio_timeout",
    "settings",
    "schema",
    "logs",
    "shutdown",
    "gc_pause",
    "thread_priority",
    "engine_command",
    "prefetch_process",
    "tracing",
    "net",
    "weights_version",
}
MIDDLE = BASE | {"cuda", "image", "transport", "storage", "planner_client", "peer"}
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "errors": set(),
    "addresses": set(),
    "asyncio_timeout": set(),
    "schema": set(),
    "logs": set(),
    "shutdown": set(),
    "gc_pause": set(),
    "thread_priority": {"logs"},
    "settings": {"errors", "addresses", "schema", "weights_version"},
    "tracing": {"errors", "settings", "logs"},
    "engine_command": {"errors"},
    "prefetch_process": {"logs", "settings"},
    "weights_version": {"schema"},
    "net": {"errors", "logs", "settings"},
    "cuda": {"errors"},
    "image": BASE | {"cuda"},
    "placement": {"errors", "gc_pause"},
    "transport": BASE | {"cuda", "image"},
    "storage": BASE | {"cuda", "image"},
    "planner_client": BASE | {"image"},
    "peer": BASE | {"image", "transport", "planner_client"},
    "testing": MIDDLE,
    "diagnostics": MIDDLE,
    "source": MIDDLE | {"placement"},
    "receiver": MIDDLE | {"placement", "source"},
    "artifacts": MIDDLE | {"source", "receiver"},
    "holder": MIDDLE | {"source", "receiver"},
    "engines": MIDDLE | {"placement", "source", "receiver", "artifacts", "_api"},
    "_api": MIDDLE | {"source", "receiver", "engines"},
    "cli": MIDDLE | {"_api", "source", "receiver", "artifacts", "holder", "engines", "diagnostics", "placement"},
}
"""The packages of `rfork` that each package may import. Every import points up this list.

`_api` and `engines` are one layer: the public functions use the engines' argument checks, and `fork_pretrained` builds
on the public functions. That no two modules import each other is a test of its own.
"""

PLANNER_ALLOWED_IMPORTS = {
    "rfork.addresses",
    "rfork.engine_command",
    "rfork.errors",
    "rfork.net.grpc_credentials",
    "rfork.net.health.v1",
    "rfork.asyncio_timeout",
    "rfork.image.ranges",
    "rfork.logs",
    "rfork.planner_client.client",
    "rfork.planner_client.lease",
    "rfork.planner_client.ownership",
    "rfork.schema",
    "rfork.settings",
    "rfork.net.tls",
    "rfork.tracing",
    "rfork.weights_version",
}
"""Modules of `rfork` that the planner may import. None of them imports torch."""

ENVIRONMENT_WRITERS = {
    "rfork/engines/vllm/methods.py": "command that sets vLLM's variables in its own process",
    "rfork/engines/sglang/methods.py": "command that sets SGLang's variables in its own process",
    "rfork/cli/demo.py": "starts processes without the demo's own settings",
    "rfork/cli/launch.py": "passes the launcher's environment to the engine",
    "rfork/cli/hold.py": "passes the holder's environment to `rfork cache pull`",
    "rfork/engines/sglang/compat.py": "reads variables of SGLang that change how it builds models",
    "rfork/engines/sglang/launcher.py": "turns flags of SGLang's launcher into settings of its processes",
    "rfork/engines/vllm/engine_manager.py": "passes the replica's name to the engine's processes",
    "rfork/transport/mooncake/library.py": "sets variables that Mooncake reads",
    "rfork/transport/nixl/library.py": "sets variables that UCX and NIXL read",
}
"""Modules outside `rfork.settings` that access the environment, with the reason: none of them is configured by it."""


@cache
def modules_of(package: str) -> list[tuple[str, list[ast.AST]]]:
    """Return the dotted name and syntax nodes of every module under a package that is not generated."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if str(path.parent.relative_to(ROOT)) not in GENERATED:
            parts = path.relative_to(ROOT).with_suffix("").parts
            nodes = list(ast.walk(ast.parse(path.read_text())))
            found.append((".".join(parts).removesuffix(".__init__"), nodes))
    return found


@pytest.fixture(scope="module", autouse=True)
def _trees_freed() -> Iterator[None]:
    """Keep a million nodes only for these tests, without collections of garbage that would traverse them."""
    with gc_paused():
        yield
        modules_of.cache_clear()


def imports_of(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield each module that is imported, at the top or inside functions; ``from a import b`` yields ``a.b``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def package_of(module: str) -> str:
    """Return the package of `rfork` that contains a module: the second part of its name."""
    return module.split(".")[1]


def test_every_package_has_a_layer() -> None:
    """Each package and module directly under rfork/ has a list of allowed imports."""
    packages = {path.stem for path in (ROOT / "rfork").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(ALLOWED_IMPORTS) == packages - {"__init__", "__main__", "__pycache__"}


@pytest.mark.parametrize("package", sorted(ALLOWED_IMPORTS))
def test_imports_point_one_way(package: str) -> None:
    """A package imports only from the layers below it; only the command line imports the planner."""
    wrong = [
        f"{module} imports {imported}"
        for module, nodes in modules_of("rfork")
        if module.startswith(f"rfork.{package}.") or module == f"rfork.{package}"
        for imported in imports_of(nodes)
        if (
            imported.startswith("rfork.")
            and package_of(imported) not in ALLOWED_IMPORTS[package] | {package, "__version__"}
        )
        or (imported.split(".")[0] == "planner" and package != "cli")
    ]
    assert [] == wrong


def test_the_planner_imports_only_shared_modules() -> None:
    """The planner imports schemas and other shared modules from rfork, and never torch."""
    wrong = [
        f"{module} imports {imported}"
        for module, nodes in modules_of("planner")
        for imported in imports_of(nodes)
        if imported.split(".")[0] == "torch"
        or (
            imported.startswith("rfork.")
            and not any(imported == known or imported.startswith(f"{known}.") for known in PLANNER_ALLOWED_IMPORTS)
            # `from rfork import schema` and `from rfork.image import ranges` import a module, not a name in it.
            and imported not in PLANNER_ALLOWED_IMPORTS | {"rfork.__version__"}
        )
    ]
    assert [] == wrong


def test_the_core_of_the_planner_is_pure() -> None:
    """The planner's core and policy import no clock, thread, socket, event loop, web framework or store."""
    impure = {"asyncio", "fastapi", "random", "redis", "secrets", "socket", "starlette", "threading", "time"}
    wrong = [
        f"{module} imports {imported}"
        for module, tree in modules_of("planner")
        if module.startswith(("planner.core", "planner.policy"))
        for imported in imports_of(tree)
        if imported.split(".")[0] in impure
        or (imported.startswith("planner.") and not imported.startswith(("planner.core", "planner.policy")))
    ]
    assert [] == wrong


def cycle_among(packages: tuple[str, ...]) -> list[str]:
    """Return modules that import one another in a cycle, including imports in functions and for type checkers."""
    modules = {name: nodes for package in packages for name, nodes in modules_of(package)}

    def imported_by(name: str) -> Iterator[str]:
        for imported in imports_of(modules[name]):
            while imported and imported not in modules:
                imported = imported.rpartition(".")[0]
            # `rfork` itself is imported for its version; it loads its public names lazily.
            if imported not in {"", "rfork", name}:
                yield imported

    try:
        TopologicalSorter({name: set(imported_by(name)) for name in modules}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_are_no_import_cycles() -> None:
    """No modules import each other in a cycle, not even for type checkers."""
    assert [] == cycle_among(("rfork", "planner", "benchmarks", "deploy"))


def test_only_settings_read_the_environment() -> None:
    """Only `rfork.settings` is configured by environment variables; the listed modules pass them on."""
    accessing = {
        f"{module.replace('.', '/')}.py"
        for package in ("rfork", "planner")
        for module, nodes in modules_of(package)
        if module != "rfork.settings"
        and any(isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"} for node in nodes)
    }
    assert set(ENVIRONMENT_WRITERS) == accessing


def test_public_names() -> None:
    """The package exports exactly these names, and each of them exists."""
    expected = [
        "ArtifactReport", "ArtifactSettings", "ForkReport", "InstanceSettings", "LoadReport", "Rank", "RforkError",
        "StorageSettings", "__version__", "artifacts", "capture", "fork", "fork_pretrained", "fork_report",
        "iter_tensors", "load", "load_tensors", "no_init", "open_tensors", "save", "seed",
    ]  # fmt: skip
    assert expected == rfork.__all__
    assert [] == [name for name in expected if getattr(rfork, name) is None]


def test_generated_protocol_code_is_up_to_date(tmp_path: Path) -> None:
    """Committed generated code equals the output of `make proto`."""
    subprocess.run([sys.executable, ROOT / "proto" / "generate.py", "--out", tmp_path], check=True)
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*.py*")}
    committed = {
        path.relative_to(ROOT): path.read_text() for each in GENERATED for path in (ROOT / each).glob("*_pb2*.py*")
    }
    assert generated == committed


def test_every_test_has_a_docstring() -> None:
    """Each test function has a docstring."""
    undocumented = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert [] == undocumented


def test_tests_that_prove_a_promise_exist() -> None:
    """The table of promises and the comments at slow tests name existing tests."""
    table = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("|")]
    comments = [
        line
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"mark\.slow,?  # ", line)
    ]
    named = {name for line in (*table, *comments) for name in re.findall(r"tests/[\w/]+(?:\.py)?", line)}
    assert set() == {name for name in named if not (ROOT / name).exists()}


def test_the_structure_page_lists_every_package() -> None:
    """docs/structure.md has one line for each package of rfork and planner, and for each test folder."""
    packages = {
        str(path.parent.relative_to(ROOT)) for top in ("rfork", "planner") for path in (ROOT / top).rglob("__init__.py")
    }
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "rfork").glob("[a-z]*.py")}
    suites = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/test_*.py")}
    page = (ROOT / "docs" / "structure.md").read_text()
    expected = packages - {"rfork"} | modules | suites
    assert set() == {name for name in expected if f"| `{name}` |" not in page}


def test_the_security_page_names_existing_tests() -> None:
    """Every test that docs/security.md names as proof of a promise exists."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text()))
    found = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert set() == named - found
