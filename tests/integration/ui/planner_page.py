"""Helpers to drive the planner's page in a browser."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from rfork.settings import PlannerSettings

TIMEOUT_S = 30
"""For updates that the page shows soon; the machine may be busy."""
SERIOUS_IMPACTS = ("serious", "critical")


def settings(**options: str | int | float) -> PlannerSettings:
    """Settings of a planner that expires nothing during a test."""
    return PlannerSettings.model_validate(
        {
            "port": 0,
            "batch_window_s": 0,
            "scaleup_wait_s": 0,
            "heartbeat_interval_s": 600,
            "instance_ttl_s": 6000,
            "lease_ttl_s": 3600,
            **options,
        }
    )


def open_page(page: Page, url: str) -> Page:
    """Open the page of the planner at `url` and wait until it is live."""
    page.goto(f"{url}/ui")
    expect(page.locator("#link-words")).to_have_text("live")
    return page


def drawn_rows(page: Page) -> Locator:
    """Return the rows of the fork tree's table that are rendered."""
    return page.locator("#treegrid .grid-body [role=row]")


def accessibility_violations(page: Page) -> list[str]:
    """Return axe-core's accessibility violations: each rule with the first element that violates it."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found if each["impact"] in SERIOUS_IMPACTS]
