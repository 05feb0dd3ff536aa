"""How tests look at the planner's page."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from rfork.settings import PlannerSettings

TIMEOUT_S = 30
"""For what the page is to show soon: the machine may be busy."""
SERIOUS_IMPACTS = ("serious", "critical")


def settings(**options: str | int | float) -> PlannerSettings:
    """Of a planner that forgets nobody while a test looks."""
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
    """The page of the planner at `url`, once it is live."""
    page.goto(f"{url}/ui")
    expect(page.locator("#link-words")).to_have_text("live")
    return page


def drawn_rows(page: Page) -> Locator:
    """Those of the fork tree's table that are drawn."""
    return page.locator("#treegrid .grid-body [role=row]")


def accessibility_violations(page: Page) -> list[str]:
    """What axe-core finds that keeps somebody out: the rule, and the first element that breaks it."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found if each["impact"] in SERIOUS_IMPACTS]
