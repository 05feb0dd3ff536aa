"""Fixtures: Chromium, and a planner that receives the reports of simulated fleets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from planner.server import run_in_thread
from tests.fleet_player import (
    FleetPlayer,
)
from tests.integration.ui.planner_page import TIMEOUT_S, settings
from tests.processes import START_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of a module."""
    if CHROMIUM is None:
        pytest.skip("NO chromium ON PATH: the planner's page is NOT tested")
    expect.set_options(timeout=TIMEOUT_S * 1000)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=START_S * 1000)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A desktop-sized browser context."""
    with browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce") as context:
        yield context


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A tab that fails the test on any script error or violation of the page's content security policy."""
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda message: wrong.append(message.text) if "Content Security Policy" in message.text else None,
    )
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.set_default_timeout(TIMEOUT_S * 1000)
    yield page
    page.close()
    assert [] == wrong


@pytest.fixture
def planner() -> Iterator[str]:
    """The URL of a planner that expires nothing during a test."""
    with run_in_thread(settings()) as url:
        yield url


@pytest.fixture
def fleet(planner: str) -> Iterator[FleetPlayer]:
    """A simulated fleet that reports to the planner."""
    with FleetPlayer(planner) as fleet:
        yield fleet
