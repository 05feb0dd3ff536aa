"""The page's files: served without a token, self-contained, and under a strict security policy."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from planner.app import create_app
from planner.ui.files import FOLDER
from rfork.settings import PlannerSettings

PAGE = FOLDER / "page"
MODULES = sorted(path.name for path in PAGE.glob("*.js"))
MAX_MODULE_LINES = 260


@pytest.fixture
def client() -> TestClient:
    """A client without a token, of a planner that requires one."""
    return TestClient(create_app(PlannerSettings.model_validate({"token": "secret"})))


def test_the_page_is_open_and_its_data_is_not(client: TestClient) -> None:
    """Without a token, the files are served, and the feed returns 401."""
    paths = ["/ui/", "/ui/page/main.js", "/ui/page/page.css", "/ui/vendor/d3.js", "/ui/feed", "/v1/instances"]
    assert [200, 200, 200, 200, 401, 401] == [client.get(path).status_code for path in paths]


@pytest.mark.parametrize("path", ["/ui/page/../rows.py", "/ui/page/%2e%2e/feed.py", "/ui/rows.py", "/ui/page/"])
def test_only_page_files_are_served(client: TestClient, path: str) -> None:
    """The planner's code and folders are not served."""
    assert client.get(path).status_code in (401, 404)


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_links_of_the_page_work_below_any_prefix(client: TestClient, path: str) -> None:
    """The redirect is relative: an ingress may serve the planner below a path."""
    response = client.get(path, follow_redirects=False)
    assert 307 == response.status_code
    assert "ui/" == response.headers["location"]


@pytest.mark.parametrize("path", ["/ui/", "/ui/page/main.js", "/ui/vendor/d3.js"])
def test_every_file_has_the_security_policy(client: TestClient, path: str) -> None:
    """It allows only own scripts and styles, no HTML from strings, and no framing."""
    headers = client.get(path).headers
    for rule in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'"):
        assert rule in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "nosniff" == headers["x-content-type-options"]


def test_the_page_uses_no_other_host_and_no_inline_script() -> None:
    """It works offline: no file refers to another host, and the HTML contains no script."""
    texts = {path.name: path.read_text() for path in PAGE.iterdir()}
    hosts = {name: re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s\"']+", text) for name, text in texts.items()}
    assert {name: [] for name in texts} == hosts
    assert [] == re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", texts["index.html"])


@pytest.mark.parametrize("name", MODULES)
def test_modules_insert_text_only_as_text(name: str) -> None:
    """None creates markup or code from strings."""
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    assert [] == re.findall(unsafe, (PAGE / name).read_text())


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_the_page_are_short(name: str) -> None:
    """A module of the page contains one view or one concept."""
    assert len((PAGE / name).read_text().splitlines()) < MAX_MODULE_LINES


def test_every_import_of_the_page_exists() -> None:
    """Each module imports only served files."""
    missing = [
        f"{name}: {target}"
        for name in MODULES
        for target in re.findall(r'from "([^"]+)"', (PAGE / name).read_text())
        if not (PAGE / target).resolve().is_file()
    ]
    assert [] == missing
