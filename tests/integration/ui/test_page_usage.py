"""Use of the planner's page: on a phone, by keyboard, with a token, and while the planner restarts."""

from __future__ import annotations

import signal

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from planner.server import run_in_thread
from tests.conftest import StartRfork
from tests.fleet_player import (
    FleetPlayer,
    identity,
    play_busy_fleet,
    play_unhealthy_fleet,
)
from tests.integration.ui.planner_page import accessibility_violations, open_page, settings

PLANNER = r"planner.*(http://127\.0\.0\.1:\d+)"
HOSTILE = "<img src=x onerror=alert(1)>"


def enter_token(page: Page) -> None:
    """Enter an invalid token, which the page rejects, and then ``secret``."""
    token, wrong = page.locator("#token"), page.locator("#token-error")
    expect(token).to_be_focused()
    assert [] == accessibility_violations(page)
    token.fill("guess")
    page.keyboard.press("Enter")
    expect(wrong).to_have_text("The token is not valid.")
    token.fill("secret")
    page.keyboard.press("Enter")


@pytest.mark.slow
def test_a_phone_shows_everything_without_horizontal_scrolling(
    browser: Browser, fleet: FleetPlayer, planner: str
) -> None:
    """At 360 px nothing is wider than the screen, and the contrast is sufficient, also in dark mode."""
    play_unhealthy_fleet(fleet)
    options = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "is_mobile": True}
    with browser.new_context(**options) as context:  # type: ignore[arg-type]  # a mapping of its options
        page = open_page(context.new_page(), planner)
        expect(page.locator("#problem-list")).to_contain_text("ChunkMismatch")
        assert 360 == page.evaluate("document.documentElement.scrollWidth")
        assert "rgb(14, 20, 27)" == page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert [] == accessibility_violations(page)


def test_the_colours_are_chosen_and_kept(page: Page, planner: str) -> None:
    """The switch overrides the system's colour scheme and persists after a reload."""
    open_page(page, planner)
    background = "getComputedStyle(document.body).backgroundColor"
    assert "rgb(243, 245, 247)" == page.evaluate(background)
    page.locator("#theme").select_option("dark")
    assert "rgb(14, 20, 27)" == page.evaluate(background)
    page.reload()
    assert "rgb(14, 20, 27)" == page.evaluate(background)
    page.locator("#theme").select_option("auto")


def test_the_keyboard_alone_is_enough(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """Skip link, filter with /, and arrow keys in the tree: in, out, open, to the details and back."""
    play_busy_fleet(fleet)
    open_page(page, planner)
    page.keyboard.press("Tab")
    assert "Skip to the fleet" == page.evaluate("document.activeElement.textContent")
    page.keyboard.press("/")
    page.keyboard.type("llama-7c9f-04")
    expect(page.locator("#subline")).to_contain_text("1 instance of")
    page.keyboard.press("Escape")
    expect(page.locator("#subline")).to_contain_text("running")
    page.locator("#treegrid").focus()
    active = page.locator("#treegrid [data-here]")
    expect(active).to_have_attribute("aria-level", "1")
    page.keyboard.press("ArrowRight")
    expect(active).to_have_attribute("aria-level", "2")
    page.keyboard.press("ArrowLeft")
    expect(active).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("ArrowLeft")
    expect(active).to_have_attribute("aria-level", "1")
    assert page.locator("#treegrid").get_attribute("aria-activedescendant") == active.get_attribute("id")
    page.keyboard.press("Enter")
    expect(page.locator("#details")).to_contain_text("has every chunk")
    page.keyboard.press("Escape")
    expect(page.locator("#treegrid")).to_be_focused()


def test_names_of_callers_are_text(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """Markup in model names, host names and reasons is displayed as text."""
    fleet.seed("s", HOSTILE, model=HOSTILE)
    plan = fleet.request_fork("t", f"{HOSTILE}2", model=HOSTILE)
    fleet.end("t", plan, 2.0, outcome="failed", reasons=(f"{HOSTILE}: so it was",))
    open_page(page, planner)
    for part in ("#model-rows", "#racks", "#problem-list", "#reasons", "#tree-title"):
        expect(page.locator(part)).to_contain_text(HOSTILE)
    assert 0 == page.locator("main img").count()


def test_a_planner_that_dies_is_shown_and_reconnected(page: Page, rfork_process: StartRfork, free_port: int) -> None:
    """The last state stays visible with its age; the page connects automatically to a new planner on the same
    port.
    """
    options = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "600", "RFORK_PLANNER_INSTANCE_TTL_S": "6000"}
    first = rfork_process("planner", "--port", str(free_port), until=PLANNER, environment=options)
    url = f"http://127.0.0.1:{free_port}"
    with FleetPlayer(url) as fleet:
        fleet.seed(identity("first"), "a1-n1")
        open_page(page, url)
        expect(page.locator("#racks")).to_contain_text("a1-n1")
        first.signal(signal.SIGKILL)
        expect(page.locator("#disconnected")).to_contain_text("No connection to the planner")
        expect(page.locator("#link-words")).to_have_text("disconnected")
        expect(page.locator("#racks")).to_contain_text("a1-n1")
        assert [] == accessibility_violations(page)
    rfork_process("planner", "--port", str(free_port), until=PLANNER, environment=options)
    with FleetPlayer(url) as fleet:
        fleet.seed(identity("second"), "a2-n2")
        expect(page.locator("#link-words")).to_have_text("live")
        expect(page.locator("#disconnected")).to_be_hidden()
        expect(page.locator("#racks")).to_contain_text("a2-n2")
        expect(page.locator("#racks")).not_to_contain_text("a1-n1")


@pytest.mark.slow  # logic: tests/unit/planner/test_auth.py
def test_a_token_is_requested_once(page: Page) -> None:
    """The page itself is public; an invalid token is rejected, and a valid one is kept for the tab."""
    with run_in_thread(settings(token="secret")) as url, FleetPlayer(url, token="secret") as fleet:
        fleet.seed(identity("s"), "a1-n1")
        page.goto(f"{url}/ui")
        enter_token(page)
        expect(page.locator("#link-words")).to_have_text("live")
        expect(page.locator("#token-dialog")).to_be_hidden()
        expect(page.locator("#racks")).to_contain_text("a1-n1")
        page.reload()
        expect(page.locator("#link-words")).to_have_text("live")
        assert f"{url}/ui/" == page.url
        assert "secret" == page.evaluate("sessionStorage.getItem('rfork-token')")
        assert 0 == page.evaluate("localStorage.length")
        page.get_by_role("link", name="metrics").click()
        metrics = page.locator(".opblock.is-open").filter(has=page.locator("[data-path='/metrics']"))
        metrics.get_by_role("button", name="Try it out").click()
        metrics.get_by_role("button", name="Execute").click()
        expect(metrics.locator(".live-responses-table")).to_contain_text("rfork_")


@pytest.mark.slow  # logic: tests/unit/planner/api/test_openapi.py
def test_the_api_page_can_send_requests(page: Page) -> None:
    """Nothing is loaded from other hosts; the token is requested once and shown with each request that is
    tried.
    """
    request_text = list[str]()
    page.on("request", lambda request: request_text.append(request.url))
    with run_in_thread(settings(token="secret")) as url:
        page.goto(f"{url}/docs")
        enter_token(page)
        models = page.locator(".opblock").filter(has=page.locator("[data-path='/v1/models']"))
        models.locator(".opblock-summary").click()
        models.get_by_role("button", name="Try it out").click()
        models.get_by_role("button", name="Execute").click()
        expect(models.locator(".live-responses-table .response-col_status").last).to_have_text("200")
        page.reload()
        expect(models).to_be_visible()
        assert [] == [each for each in request_text if not each.startswith((url, "data:", "blob:"))]


@pytest.mark.parametrize(
    ("path", "prompts", "displayed_text"),
    [
        ("ui", "ui/feed", "#empty-title"),
        pytest.param("docs", "openapi.json", ".opblock >> nth=0", marks=pytest.mark.slow),
    ],
)
def test_a_token_entered_while_another_is_checked_wins(
    page: Page, path: str, prompts: str, displayed_text: str
) -> None:
    """The last token counts, however late the first one is rejected."""
    late = list[Route]()
    with run_in_thread(settings(token="secret")) as url:
        page.goto(f"{url}/{path}")
        token = page.locator("#token")
        expect(token).to_be_focused()
        page.route(f"**/{prompts}", lambda route: late.append(route), times=1)
        token.fill("guess")
        with page.expect_request(f"**/{prompts}"):
            page.keyboard.press("Enter")
        token.fill("secret")
        page.keyboard.press("Enter")
        if path == "docs":
            expect(page.locator(displayed_text)).to_be_visible()
        with page.expect_response(f"**/{prompts}") as refused:
            late[0].continue_()
        assert 401 == refused.value.status
        expect(page.locator(displayed_text)).to_be_visible()
        expect(token).to_be_hidden()
        page.reload()
        expect(page.locator(displayed_text)).to_be_visible()
        expect(token).to_be_hidden()
