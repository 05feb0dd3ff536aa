"""Checks the commands, options, variables, targets and chart values on the pages without running them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.commands import command_problem, simple_commands, unknown_python_names, unknown_variables
from tests.docs.pages import (
    DISPLAYED_LANGUAGES,
    EXECUTED_LANGUAGES,
    PageBlock,
    blocks,
    first_missing_line,
    headings,
    page_links,
    page_name,
    pages,
    steps,
)
from tests.docs.run_by import commands_not_run, script_commands

ROOT = Path(__file__).parents[2]
SPANS = {"make plan"}
"""Span names, which resemble commands (docs/tracing.md)."""
PAGES = pytest.mark.parametrize("page", pages(), ids=page_name)


def shell_text(block: PageBlock) -> str:
    """All commands of a block, shown and hidden."""
    return "\n".join([block.directives.get("before", ""), *(step.command for step in steps(block))])


@pytest.mark.parametrize(
    ("text", "path", "missing"),
    [
        ("rfork pull config --generate x", "docs/quickstart.md", []),
        ("rfork drain x", "docs/quickstart.md", ["drain"]),
        ("make test", ".ci/run", []),
        ("make test-all", ".ci/run", ["make test-all"]),
        ("vllm serve m --load-format rfork", "tests/engines/test_vllm.py", []),
        ("RFORK_PLANNER=u vllm serve m --load-format rfork", "tests/engines/test_vllm.py", []),
        ("RFORK_REPLICA=u vllm serve m", "tests/engines/test_vllm.py", ["RFORK_REPLICA serve"]),
        ("vllm serve m --rfork-planner x", "tests/engines/test_vllm.py", ["--rfork-planner serve"]),
        ("rfork status", "docs/comparison.md", ["status"]),
        ("rfork planner", "tests/integration/test_docs_commands.py", ["planner"]),
        ("rfork seed x", "tests/integration/test_nothing.py", ["seed"]),
        ("curl -H h u | grep -q x", "tests/integration/http_transport/test_http_transport.py", ["-q grep"]),
    ],
)
def test_what_runs_a_block(text: str, path: str, missing: list[str]) -> None:
    """A test, a page or a script runs a block if it has its commands with all their options and variables."""
    assert missing == commands_not_run(PageBlock("page.md", 1, "bash", text, {"run by": path}))


def test_the_parts_of_a_command_that_must_match() -> None:
    """Its subcommands, options and variables; not its values, nor the shell's own commands."""
    script = "export RFORK_LOG_LEVEL=debug\nAB=b rfork snapshot rm s3://x --leftovers # x\ncd x && make demo\n"
    assert [
        {"RFORK_LOG_LEVEL"},
        {"AB", "snapshot", "rm", "--leftovers"},
        {"make", "demo"},
    ] == script_commands(script)
    launch = "rfork launch --planner u -- python -m \\\n  sglang.launch_server --model-path m"
    assert [{"launch", "--planner", "-m", "sglang.launch_server", "--model-path"}] == script_commands(launch)


def test_make_bench_names_benchmarks() -> None:
    """`make bench` runs every benchmark except those that need an API server or engines, as the page lists."""
    named = re.search(r"^BENCHMARKS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named is not None
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*/__main__.py")]
    started = {
        path.parent.name if path.stem == "__main__" else path.stem
        for path in files
        if "harness.options(" in path.read_text()
    }
    page_text = (ROOT / "docs" / "benchmarks.md").read_text()
    *names, last_name = named[1].split()
    assert f"runs the quick form of {', '.join(names)} and {last_name}." in page_text
    assert started - {"admission", "engines", "harness", "ready"} <= set(named[1].split())
    assert set(named[1].split()) <= started


@PAGES
def test_every_block_is_run_or_has_a_reason(page: Path) -> None:
    """A block of commands is run by the page's test or by a test that contains them, or states why it is not."""
    wrong = []
    for block in blocks(page):
        if block.language not in EXECUTED_LANGUAGES | DISPLAYED_LANGUAGES:
            wrong.append(f"{block.location}: the language {block.language!r}")
        elif "run by" in block.directives and (missing := commands_not_run(block)):
            wrong.append(f"{block.location}: {block.directives['run by']} do not run {missing}")
        elif block.directives.get("not run", "a reason") == "":
            wrong.append(f"{block.location}: not run, and no reason")
        elif block.language == "console" and not steps(block):
            wrong.append(f"{block.location}: a console without a command")
    assert [] == wrong


@PAGES
def test_commands_in_blocks_exist(page: Path) -> None:
    """Each rfork subcommand and option, make target, benchmark, chart value and engine flag exists."""
    wrong = [
        f"{block.location}: {fault}"
        for block in blocks(page)
        if block.language in ("bash", "console")
        for words in simple_commands(shell_text(block))
        if (fault := command_problem(words)) is not None
    ]
    assert [] == wrong


@PAGES
def test_commands_in_sentences_exist(page: Path) -> None:
    """Each command between backquotes in a sentence exists."""
    text = re.sub(r"^( *)(```+).*?^\1\2", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    wrong = [
        f"{page_name(page)}: {fault}"
        for code in re.findall(r"(?<!`)`((?:rfork|make|python -m benchmarks\.\w+|helm)(?: [^`]+)?)`", text)
        for words in simple_commands(code.replace("NAME", "pull").partition("…")[0])
        if len(words) > 1 and code not in SPANS and (fault := command_problem(words)) is not None
    ]
    assert [] == wrong


@PAGES
def test_python_in_blocks_uses_existing_names(page: Path) -> None:
    """Each name of the package in a Python block exists and accepts the keywords that it gets."""
    wrong = [
        f"{block.location}: {fault}"
        for block in blocks(page)
        if block.language == "python"
        for fault in unknown_python_names(block.text)
    ]
    assert [] == wrong


@PAGES
def test_variables_exist(page: Path) -> None:
    """A setting reads each RFORK_… variable on a page."""
    assert [] == unknown_variables(page.read_text())


@pytest.mark.parametrize("page", [page for page in pages() if "docs" not in page.parts], ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    """Each link to a file of the repository finds it and its heading (for docs/: test_docs_site)."""
    wrong = []
    for link in page_links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            wrong.append(f"{page_name(page)}: {link}")
    assert [] == wrong


def test_the_content_of_pages_is_parsed(tmp_path: Path) -> None:
    """Comments belong to the block that follows directly; consoles have commands with their output."""
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: a GPU -->\n```bash\nnvidia-smi\n```\n\nText.\n\n<!-- exit: 1 -->\n\nMore text.\n\n"
        "```console\n$ echo 3 \\\n    4\n3 …\n$ true\n```\n"
    )
    found = list(blocks(page))
    assert [{"not run": "a GPU"}, {}] == [block.directives for block in found]
    assert [("echo 3 \\\n    4", ("3 …",)), ("true", ())] == [(step.command, step.output) for step in steps(found[1])]


def test_output_is_compared_loosely() -> None:
    """Numbers may differ, … matches anything, extra lines do not matter; a missing line does."""
    written = "one\nforked 15.20 GB in 3 s from ab12\n\nlast"
    assert None is first_missing_line(("forked 1 GB in 0.5 s from …", "last"), written)
    assert "last thing" == first_missing_line(("one", "last thing"), written)


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("rfork pull ./model --generate 'What is it?' > out", False),
        ("RFORK_SNAPSHOT=s3://a/b rfork snapshot write s3://a/b --name llama --shared", False),
        ("rfork snapshot ls s3://a", False),
        ("rfork launch --planner http://p:1 -- vllm serve org/model", False),
        ("rfork fork ./model", True),
        ("rfork seed --gnerate x", True),
        ("make teste", True),
        ("python -m benchmarks.nothing", True),
        ("helm install rfork deploy/helm/rfork --set planner.replica=2", True),
        ("helm install rfork deploy/helm/rfork --set 'instances.namespaces={a,b}',planner.replicas=2", False),
        ("python -m sglang.launch_server --model-path m --rfork-plan http://p", True),
        ("echo $(rfork statu)", True),
    ],
)
def test_nonexistent_commands_are_found(command: str, wrong: bool) -> None:
    """Wrong commands are found, right ones are not."""
    faults = [fault for words in simple_commands(command) if (fault := command_problem(words))]
    assert wrong == bool(faults), faults


def test_nonexistent_python_is_found() -> None:
    """A missing name of the package and an unknown keyword of a function are found."""
    text = "import rfork\nrfork.spoon()\nrfork.seed(m, modell='x')\nrfork.seed(m, model='x')\n"
    assert ["rfork.seed(modell=)", "rfork.spoon"] == sorted(unknown_python_names(text))
    assert ["RFORK_PLANER"] == unknown_variables("RFORK_PLANNER, RFORK_PLANER, RFORK_STORAGE_*, RFORK_K8S_…")
