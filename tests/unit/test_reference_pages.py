"""The reference pages are generated from the code, whose docstrings contain all that a caller needs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

import rfork
from docs.site.reference import (
    cli_page,
    errors_page,
    grpc_page,
    metrics_page,
    pages,
    python_page,
    rest_page,
    settings_page,
)
from rfork import errors
from rfork.settings import SETTINGS_CLASSES
from tests.docs.run_by import blocks_run_by

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "reference").glob("*.md"))
SIDES = (
    "Runs on the target",
    "Runs on the source",
    "Runs in the calling process",
    "Runs on both sides",
)
ARTIFACTS = ("fetch", "load", "save", "seed")
FUNCTIONS = [name for name in rfork.__all__ if inspect.isfunction(inspect.unwrap(getattr(rfork, name)))] + [
    f"artifacts.{name}" for name in ARTIFACTS
]
CLASSES = [name for name in rfork.__all__ if inspect.isclass(getattr(rfork, name))]


def named(name: str) -> object:
    """Return the object of a public name."""
    if name.startswith("artifacts."):
        found: object = getattr(rfork.artifacts, name.removeprefix("artifacts."))
        return found
    found = getattr(rfork, name)
    return found


@cache
def generate_page(page: Path) -> str:
    """Return a page with all generated parts."""
    return pages.fill_markers(page.read_text())


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Return the anchors of a page."""
    return frozenset(anchors(generate_page(page)))


def words_of(text: str) -> set[str]:
    """Return all names in backticks."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"`+([^`]+)`+", text))))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_of_functions_are_complete(name: str) -> None:
    """The docstring of a public function states where it runs, its parameters, and the errors that it raises."""
    function = named(name)
    assert callable(function)
    text = " ".join((inspect.getdoc(function) or "").split())
    missing = [parameter for parameter in inspect.signature(function).parameters if parameter not in words_of(text)]
    assert [] == missing
    assert [] != [side for side in SIDES if side in text]
    assert re.search(r"\bRaises\b|Never raises", text) is not None


@pytest.mark.parametrize("name", CLASSES)
def test_fields_of_classes_are_documented(name: str) -> None:
    """A public class has a docstring, and each of its fields a description."""
    documented_class = named(name)
    assert isinstance(documented_class, type)
    text = inspect.getdoc(documented_class) or ""
    assert text
    if issubclass(documented_class, BaseModel):
        undocumented = [field for field, info in documented_class.model_fields.items() if not info.description]
    elif dataclasses.is_dataclass(documented_class):
        undocumented = [
            field.name for field in dataclasses.fields(documented_class) if field.name not in words_of(text)
        ]
    else:
        undocumented = []
    assert [] == undocumented


def test_python_page_is_complete() -> None:
    """Every exported name has a section on the Python page, and each section an existing name."""
    documented_names = set(python_page.group_sections())
    assert set() == set(rfork.__all__) - documented_names - python_page.PLAIN
    for name in documented_names:
        module, _, last = python_page.home_of(name).rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


def test_members_exist() -> None:
    """Each method on the Python page exists in its class, with a docstring."""
    for home, members in python_page.MEMBERS.items():
        module, _, last = home.rpartition(".")
        documented_class = getattr(importlib.import_module(module), last)
        for member in members:
            docstring = (
                inspect.getdoc(inspect.getattr_static(documented_class, member))
                if hasattr(documented_class, member)
                else None
            )
            assert docstring, f"{home}.{member}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_generated(page: Path) -> None:
    """Every part of a page is generated, and no marker is left."""
    assert [] == re.findall(r"<!-- generated.*", generate_page(page))
    for line in generate_page(page).splitlines():
        assert not line.startswith("| --- |") or line.count("---") == line.count("|") - 1


def test_all_parts_are_used() -> None:
    """Every generated part is on a page."""
    wanted = {name for page in DOCS.rglob("*.md") for name in pages.MARKER.findall(page.read_text())}
    assert set(pages.PARTS) == wanted


@pytest.mark.parametrize("page", [*PAGES, DOCS / "operating.md"], ids=lambda page: page.stem)
def test_links_have_anchors(page: Path) -> None:
    """A link to an anchor on a reference page has a target."""
    for path, anchor in set(re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", generate_page(page))):
        there = (page.parent / path).resolve() if path else page
        assert anchor in anchors_of(there), f"{path}#{anchor}"


def anchors(markdown: str) -> set[str]:
    """Return the anchors of a page: explicit ones and those of headings."""
    headings = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    plain = {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}
    return plain | set(re.findall(r"\{#([\w-]+)\}", markdown)) | set(re.findall(r'id="([\w-]+)"', markdown))


def test_every_route_has_a_role_and_a_summary() -> None:
    """Each route of the OpenAPI document is on the page with its role and a summary."""
    routes = rest_page.page_routes()
    for method, path, operation in rest_page.operations():
        assert f"### `{method} {path}`" in routes
        assert operation.get("summary"), path
        assert "error" != rest_page.role_of(path, operation)


def test_every_option_has_a_description() -> None:
    """Each option of each settings class has a variable and a description."""
    for documented_class in SETTINGS_CLASSES:
        options = list(settings_page.options(documented_class))
        assert [] == [option.variable for option in options if not option.text]
        assert len(documented_class.model_fields) == len(options)


def test_every_error_is_in_the_tree() -> None:
    """The tree at the top of `rfork.errors` contains every class with the right exit code."""
    rendered_tree = errors_page.tree()
    for documented_class in errors_page.error_classes():
        assert re.search(rf"\b{documented_class.__name__}\b", rendered_tree), documented_class.__name__
        if errors.RforkError in documented_class.__bases__:
            assert re.search(rf"{documented_class.__name__} .*exit {documented_class.exit_code}\b", rendered_tree), (
                documented_class.__name__
            )


def test_the_example_of_errors_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It exits with the hint of a user error, and prints all reasons if no source worked."""
    (example,) = (block.text for block in blocks_run_by(__file__))

    def run(error: errors.RforkError) -> None:
        def fails(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(rfork, "fork", fails)
        exec(compile(example, "errors.md", "exec"), {"module": None})

    with pytest.raises(SystemExit, match=r"RFORK_BIND: no \(fix it\)"):
        run(errors.SettingsError("RFORK_BIND: no", hint="fix it"))
    with pytest.raises(errors.AllSourcesFailed):
        run(errors.AllSourcesFailed("no source left", [errors.SourceUnavailable("it died")]))
    assert "SourceUnavailable source it died\n" == capsys.readouterr().out


def test_commands_have_help_texts() -> None:
    """Each command has a help text, and each setting that an option names exists."""
    variables = {
        each.variable for documented_class in SETTINGS_CLASSES for each in settings_page.options(documented_class)
    }
    for each in cli_page.commands():
        assert each.command.help, each.name
    named_there = set(re.findall(r"settings\.md#(\w+)", cli_page.page()))
    assert set() == named_there - {variable.lower() for variable in variables}


def test_messages_are_documented() -> None:
    """Each call of both protocols has a comment, and so has each rfork field unless its name is sufficient."""
    plain = {"name", "shape", "image_bytes", "tensor_count", "chunk_count", "begin", "end", "channel_id"}
    rows = re.findall(
        r"^\| \d+ \| <code[^>]*>(\w+)</code> \| .* \| (.*)\|$", grpc_page.page(grpc_page.PEER), re.MULTILINE
    )
    assert len(rows) > 30
    undocumented = [name for name, text in rows if not text.strip()]
    assert set() == set(undocumented) - plain
    for name in (grpc_page.PEER, grpc_page.SCALER):
        for call in re.findall(r"```proto\n.*\n```\n\n(.*)", grpc_page.page(name)):
            assert call.strip()


def test_metrics_have_descriptions() -> None:
    """Every metric of planner and hooks is on the page with a description."""
    for registry in metrics_page.registries().values():
        found = list(metrics_page.metrics(registry))
        assert found
        assert [] == [metric.name for metric in found if not metric.text]
