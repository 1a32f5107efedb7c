"""The page in a real browser: over the admin API without engines, and over decision logs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

import made_log
from admin_server import AdminServer
from banaserve.base.types import InstanceReport
from banaserve.contracts.trace_events import FirstToken, LegBegan
from banaserve.frontdoor.page.page import PageMiddleware
from banaserve.frontdoor.page.records import PageInfo, page_link
from banaserve.frontdoor.page.replay import Replay, read_decisions, replay_app
from banaserve.serving.tracing.request_log import HttpCall, TracedLeg
from browsing import Browser, browser, check_accessible, keep
from served_admin import KEY, Served
from waiting import eventually

pytestmark = pytest.mark.deep

AUTH = {"Authorization": f"Bearer {KEY}"}
MODELLED = "MODELLED, not measured: tiny"


def in_room(*cases):
    """Cases that ``make test`` leaves to the tests of their room."""
    found = (one if isinstance(one, tuple) else (one,) for one in cases)
    return [pytest.param(*one, marks=pytest.mark.room) for one in found]


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as one:
        yield one


@pytest.fixture(autouse=True)
def no_problems(chrome: Browser) -> Iterator[None]:
    chrome.problems.clear()
    yield
    assert chrome.problems == []


class Live:
    """The front door without engines on a real port, looked at often."""

    def __init__(self, folder: Path) -> None:
        self.served = Served()
        self._folder = folder
        self.server = AdminServer(self._opened)
        self.url = f"{self.server.url}/ui"

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        app = await self.served.open(self._folder)
        self._loop = asyncio.get_running_loop()
        self.served.page.viewers._interval_s = 0.1
        yield PageMiddleware(app, PageInfo("live", "tiny", MODELLED))
        await self.served.close()

    def stop(self) -> None:
        """As `serve` does at its end: streams first."""
        self._loop.call_soon_threadsafe(self.served.page.viewers.close)
        self.server.stop()

    def post(self, path: str, body: object) -> None:
        asked = httpx.post(f"{self.server.url}/admin/{path}", json=body, headers=AUTH, timeout=60)
        assert asked.is_success, asked.text


@pytest.fixture
def live(tmp_path: Path, chrome: Browser) -> Iterator[Live]:
    one = Live(tmp_path)
    yield one
    one.stop()


@contextlib.contextmanager
def signed_in(chrome: Browser, live: Live, **view: Any) -> Iterator[Any]:
    with chrome.page(live.url, **view) as page:
        sign_in(page)
        yield page


def sign_in(page: Any) -> None:
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#map [role=option]")


def row(page: Any, name: str) -> Any:
    return page.locator(f'#map [data-instance="{name}"]')


# ---- the key


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("wrong", "The server refuses this key."),
        ("with space", "A key has no spaces"),
        ("schlüssel", "A key has no spaces"),
    ],
)
def test_a_wrong_key_opens_nothing(chrome, live, key, said):
    with chrome.page(live.url) as page:
        page.fill("#key", key)
        page.click("#login-form button")
        page.wait_for_function("said => document.body.innerText.includes(said)", arg=said)
        assert page.locator("#board").is_hidden()
        assert page.locator("#login").is_visible()
        check_accessible(page)


def test_without_a_key_nothing_is_asked(chrome, live):
    asked: list[str] = []
    with chrome.page(live.url) as page:
        page.wait_for_load_state("networkidle")
        page.on("request", lambda one: asked.append(one.url))
        page.click("#login-form button")
        page.wait_for_timeout(100)
        assert page.locator("#board").is_hidden()
    assert asked == []


def tokens_of(page: Any) -> list[str]:
    """What the tab has stored, which is in no other place."""
    assert page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
    found: list[str] = page.evaluate("Object.values(sessionStorage)")
    return found


def opens(live: Live, credential: str) -> bool:
    headers = {"Authorization": f"Bearer {credential}"}
    return httpx.get(f"{live.server.url}/admin/status", headers=headers, timeout=60).is_success


def test_the_key_is_asked_once_a_tab_and_not_stored(chrome, live):
    urls: list[str] = []
    with signed_in(chrome, live) as page:
        page.on("request", lambda one: urls.append(one.url))
        page.wait_for_function("() => sessionStorage.length")
        (token,) = tokens_of(page)
        assert token != KEY
        assert opens(live, token)
        assert page.input_value("#key") == ""
        page.reload()
        page.wait_for_selector("#map [role=option]")
        assert page.locator("#login").is_hidden()
        assert tokens_of(page) == [token]
        assert KEY not in page.url
        with chrome.page(live.url) as other:
            other.wait_for_selector("#login:not([hidden])")
        page.click("#leave")
        page.wait_for_selector("#login:not([hidden])")
        assert page.locator("#board").is_hidden()
        assert tokens_of(page) == []
    assert not opens(live, token)
    assert not any(secret in one for one in urls for secret in (KEY, token))


def test_a_link_opens_the_page_once(chrome, live):
    urls: list[str] = []
    code = live.served.page.access.new_code()
    link = page_link(live.server.url, code)
    with chrome.page(link) as page:
        page.on("request", lambda one: urls.append(one.url))
        page.wait_for_selector("#map [role=option]")
        assert page.url == f"{live.url}/"
        (token,) = tokens_of(page)
        page.reload()
        page.wait_for_selector("#map [role=option]")
        # As one that has it from the history of the terminal.
        with chrome.page(link) as other:
            other.wait_for_function("() => document.body.innerText.includes('has been used')")
            assert tokens_of(other) == []
            check_accessible(other)
            # Another one in the same tab changes its fragment alone.
            other.goto(page_link(live.server.url, live.served.page.access.new_code()))
            other.wait_for_selector("#map [role=option]")
        live.served.page.access.forget(token)
        page.reload()
        page.wait_for_function("() => document.body.innerText.includes('has ended')")
        assert tokens_of(page) == []
        sign_in(page)
    assert not any(code in one for one in urls)


def test_a_tab_whose_key_was_typed_goes_on_at_the_next_server(chrome, live):
    with signed_in(chrome, live) as page:
        page.wait_for_function("() => sessionStorage.length")
        for token in tokens_of(page):
            live.served.page.access.forget(token)
        # The next one knows the same key, and no token of the last one.
        page.click("#pause")
        page.click("#ask-yes")
        page.locator("#pause", has_text="Resume").wait_for()
        page.reload()
        page.wait_for_selector("#login:not([hidden])")


# ---- what is seen


def test_the_map_changes_when_modules_move(chrome, live):
    with signed_in(chrome, live) as page:
        assert page.locator("#modelled").inner_text() == f"Time is {MODELLED}"
        assert row(page, "d0").locator(".hole").count() == 0
        live.post("migrations", {"kind": "layers", "from": "d0", "to": "p0", "layers": [10, 20]})
        row(page, "d0").locator(".hole").wait_for()
        assert "layers 10:20 at p0" in row(page, "d0").text_content()
        row(page, "p0").locator(".guest").wait_for()
        page.wait_for_function("() => document.getElementById('moves').innerText.includes('done')")
        live.post("migrations", {"kind": "heads", "from": "d0", "to": "p1", "heads": {"3": [1]}})
        row(page, "p1").locator(".guest.heads").wait_for()
        keep(page, "live-moved")
        live.post("migrations", {"kind": "return", "from": "d0"})
        row(page, "d0").locator(".hole").first.wait_for(state="detached")


def loaded(live: Live, name: str, report: InstanceReport) -> None:
    """An instance says that of itself."""
    one = live.served.world.instances[name]  # type: ignore[index]
    idle = one.view
    one.view = lambda: dataclasses.replace(idle(), report=report)


def test_a_move_is_seen_while_it_is_under_way(chrome, live):
    engine = live.served.world.engine
    engine.held.add("copying")
    for name, of_kv, busy, running, waiting in (
        ("d0", 0.86, 0.93, 21, 4),
        ("p0", 0.22, 0.31, 2, 0),
        ("p1", 0.35, 0.52, 3, 1),
        ("x0", 0.48, 0.64, 9, 0),
    ):
        loaded(live, name, InstanceReport(running, waiting, of_kv, busy, 0.0))
    with signed_in(chrome, live) as page:
        live.post("migrations", {"kind": "heads", "from": "d0", "to": "p1", "heads": {"3": [1]}})
        page.locator("#map .tagged", has_text="copying").wait_for()
        assert re.search(r"0 B of at most [\d.]+ \wiB", page.locator("#moves").inner_text())
        told = {"weight_bytes": 1 << 20, "planned_bytes": 3 << 20, "precopy_bytes": 1 << 20}
        engine.moves["m1.0"]["facts"] |= told
        page.locator("#map .tagged", has_text="copying 2.0 MiB of 4.0 MiB").wait_for()
        assert "2.0 MiB of 4.0 MiB" in page.locator("#moves").inner_text()
        assert page.locator("#moves progress").evaluate("one => one.value / one.max") == 0.5
        engine.held.clear()
        row(page, "p1").locator(".guest.heads").wait_for()
        engine.held.add("copying")
        live.post("migrations", {"kind": "layers", "from": "d0", "to": "p0", "layers": [10, 20]})
        page.locator("#map .tagged", has_text="copying").wait_for()
        told = {"planned_bytes": 77 << 20, "precopy_bytes": 31 << 20}
        engine.moves["m2.0"]["facts"] |= told
        page.locator("#map .tagged", has_text="copying 31.0 MiB of 77.0 MiB").wait_for()
        assert page.locator("#map .move").count() == 2
        assert row(page, "d0").locator(".hole").count() == 1
        for made in made_log.decisions(2, 3):
            live.served.controller.log.add(made)
        page.locator("#feed summary").nth(2).wait_for()
        page.evaluate("scrollTo(0, 0)")
        keep(page, "live-moving", whole=False)
        engine.held.clear()
        row(page, "p0").locator(".guest").wait_for()


def test_the_feed_shows_a_decision(chrome, live):
    with signed_in(chrome, live) as page:
        (made, *_) = made_log.decisions(2, 1)
        made.back_pressure = "prefill waits: the store holds 3 of 4 blocks for hand-overs"
        live.served.controller.log.add(made)
        summary = page.locator(f'[data-decision="{made.number}"] summary').first
        summary.wait_for()
        assert "move layers 0:4 from d0 to p0" in summary.inner_text()
        assert made.back_pressure in summary.inner_text()
        summary.click()
        detail = page.locator("#feed .detail").first
        for words in (
            "predicted: 1.10 s",
            "took 1.30 s",
            "Refused: 2",
            "no room",
            "-30.0% → -28.0%",
        ):
            assert words in detail.inner_text(), words
        keep(page, "live-decision")
        check_accessible(page)
        page.locator("#feed .detail details summary").first.click()
        live.served.controller.log._kept[-1].turns = 7
        page.locator(f'[data-decision="{made.number}"] .when', has_text="7 times").wait_for()
        assert page.locator("#feed .detail details[open]").count() == 1


def test_a_request_opens_as_a_waterfall(chrome, live):
    requests = live.served.requests
    now_s = requests._clock.now()
    with requests.following("chatcmpl-first", 12, HttpCall(now_s - 2.0, 1.7e9)) as notes:
        notes.legs.append(TracedLeg("c9", 1, "e1"))
        notes._events.append((now_s - 1.5, LegBegan("whole", "c9", "e1"), "e1"))
        notes.note(FirstToken("decode"))
    with signed_in(chrome, live) as page:
        page.click('[data-request="chatcmpl-first"]')
        page.locator(".waterfall svg").wait_for()
        told = page.locator(".waterfall").inner_text()
        assert "c9 has been removed, and its notes with it" in told
        assert "prefill on c9: " in page.locator(".waterfall svg").get_attribute("aria-label")
        assert page.locator(".waterfall svg rect.prefill").count() == 1
        assert page.locator(".waterfall svg line").count() == 6
        page.click(".events summary")
        assert "leg began" in page.locator(".events").inner_text()
        keep(page, "live-waterfall")
        check_accessible(page)
        page.click('[data-request="chatcmpl-first"]')
        page.locator(".waterfall").wait_for(state="hidden")


def noted(live: Live, num_requests: int, ttft_s: float) -> None:
    """So many requests have ended, the last just now."""
    requests = live.served.requests
    for number in range(num_requests):
        now_s = requests._clock.now()
        arrived_s = now_s - ttft_s - (number == 0) * 100 * ttft_s
        with requests.following(
            f"chatcmpl-{number:03}", 12, HttpCall(arrived_s, 1.7e9 + number)
        ) as notes:
            notes.note(FirstToken("decode"))


@pytest.mark.parametrize("width", [360, 1400, *in_room(390, 768, 1024, 1280, 1920)])
def test_every_figure_is_whole_with_a_legend_and_a_scale(chrome, live, width):
    noted(live, 3, 0.25)
    with chrome.page(live.url, width=width) as page:
        page.evaluate(
            """() => {
                const {prototype} = CanvasRenderingContext2D, {fillText} = prototype;
                window.drawn = [];
                prototype.fillText = function (text, ...place) {
                    window.drawn.push(text);
                    fillText.call(this, text, ...place);
                };
            }"""
        )
        sign_in(page)
        page.locator("#figures li", has_text="p99 25.25 s").wait_for()
        told = page.locator("#figures .figure").all_inner_texts()
        assert [one.split("\n")[0] for one in told] == [
            *("Time to first token", "Time per output token", "Requests"),
            *("KV blocks in use", "Output", "Compute"),
        ]
        cut_off = page.evaluate(
            """() => [...document.querySelectorAll("#figures strong")].filter((one) => {
                const inner = one.getBoundingClientRect();
                const outer = one.closest(".figure").getBoundingClientRect();
                return inner.right > outer.right || inner.bottom > outer.bottom;
            }).map((one) => one.parentElement.textContent)"""
        )
        assert cut_off == []
        assert page.locator("#figures .value").evaluate_all(
            "all => all.every((one) => one.scrollWidth <= one.clientWidth)"
        )
        marks = page.locator("#figures li .swatch")
        assert marks.count() == page.locator("#figures li").count() == 11
        drawn = set(page.evaluate("window.drawn"))
        assert {"20 s", "50%", "100%", "1"} <= drawn, "values of the scales, with units"
        page.locator(".times span").nth(11).wait_for()
        for one in page.locator(".times").all_inner_texts():
            assert re.fullmatch(r"(\d\d:\d\d:\d\d\s*){2}", one), "from when to when"
        keep(page, f"live-figures-{width}", whole=False)


def test_as_many_requests_are_seen_as_the_page_says(chrome, live):
    noted(live, 40, 0.25)
    with signed_in(chrome, live) as page:
        page.locator("[data-request]").nth(29).wait_for()
        names = page.locator("[data-request]").all_inner_texts()
        assert names == [f"chatcmpl-{number:03}" for number in range(39, 9, -1)]
        assert page.locator("#requests-title").inner_text() == "Last 30 requests"
        assert page.evaluate(
            "() => document.querySelector('#requests .scroll').scrollHeight"
            " <= document.querySelector('#requests .scroll').clientHeight"
        ), "none lies below the edge of a box"


# ---- what is done


def test_a_drain_asks_first_and_works(chrome, live):
    held = live.served.world.instances["p1"]  # type: ignore[index]
    with signed_in(chrome, live) as page:
        row(page, "p1").click()
        page.click('[data-action="drain"]')
        assert page.locator("#ask-command").inner_text() == "banaserve drain p1"
        check_accessible(page)
        page.keyboard.press("Escape")
        page.locator("#ask").wait_for(state="hidden")
        assert not held.service.is_drained
        page.click('[data-action="drain"]')
        keep(page, "live-drain", whole=False)
        page.click("#ask-yes")
        page.locator('[data-action="undo"]').wait_for()
        assert page.locator("#instance .chip").inner_text() == "drained"
        assert held.service.is_drained
        page.click('[data-action="undo"]')
        assert page.locator("#ask-command").inner_text() == "banaserve drain p1 --undo"
        page.click("#ask-yes")
        page.locator('[data-action="drain"]').wait_for()
        assert not held.service.is_drained


def test_what_the_server_refuses_is_said_in_the_dialog(chrome, live):
    with signed_in(chrome, live) as page:
        held = httpx.post(f"{live.server.url}/admin/drains/p1", headers=AUTH, timeout=60)
        assert held.is_success
        row(page, "p0").click()
        page.click('[data-action="drain"]')
        page.click("#ask-yes")
        page.wait_for_function("() => document.getElementById('ask-error').innerText.length > 0")
        assert "only one that serves prefill" in page.locator("#ask-error").inner_text()
    chrome.problems[:] = [one for one in chrome.problems if "409" not in one]


def test_a_move_is_given_as_a_command(chrome, live):
    with signed_in(chrome, live) as page:
        row(page, "d0").click()
        page.click('[data-action="move"]')
        page.fill('[name="start"]', "4")
        page.fill('[name="end"]', "7")
        command = page.locator("#ask-command")
        assert command.inner_text() == "banaserve migrate layers --from d0 --to p0 --layers 4:8"
        page.select_option('[name="kind"]', "heads")
        page.fill('[name="heads"]', "0,2")
        told = "banaserve migrate heads --from d0 --to p0 --layer 4:8 --heads 0,2"
        assert command.inner_text() == told
        page.fill('[name="end"]', "99")
        page.click("#ask-yes")
        page.wait_for_function(
            "() => document.getElementById('ask-error').innerText.includes('29')"
        )
        page.select_option('[name="kind"]', "layers")
        page.fill('[name="end"]', "7")
        page.click("#ask-yes")
        row(page, "d0").locator(".hole").wait_for()
        page.click('[data-action="return"]')
        assert command.inner_text() == "banaserve migrate return --from d0"
        page.click("#ask-yes")
        row(page, "d0").locator(".hole").wait_for(state="detached")


def test_a_role_and_a_pause(chrome, live):
    with signed_in(chrome, live) as page:
        row(page, "p1").click()
        page.click('[data-action="role"]')
        page.select_option('[name="role"]', "decode")
        assert page.locator("#ask-command").inner_text() == "banaserve role p1 decode"
        page.click("#ask-yes")
        page.wait_for_selector('#map [data-instance="p1"].decode')
        page.click('[data-action="role"]')
        page.click("#ask-yes")
        page.wait_for_selector('#map [data-instance="p1"].prefill')
        for word, state in (("pause", "paused"), ("resume", "running")):
            page.click("#pause")
            assert page.locator("#ask-command").inner_text() == f"banaserve orchestrator {word}"
            page.click("#ask-yes")
            page.wait_for_function(
                "state => document.getElementById('orchestrator').innerText.includes(state)",
                arg=state,
            )


PICTURES = """() => new Promise((done) => {
    let changes = 0;
    const count = () => { changes += 1; if (changes === 3) done(); };
    const map = document.getElementById("map");
    new MutationObserver(count).observe(map, { childList: true, subtree: true });
})"""
"""Waits until the page has been drawn three times."""


def pressed_long(page: Any, place: str) -> None:
    """Press here, let three pictures come, and release."""
    page.hover(place)
    page.mouse.down()
    page.evaluate(PICTURES)
    page.mouse.up()


@pytest.mark.parametrize("button", ['[data-action="role"]', '[data-request="chatcmpl-pressed"]'])
def test_a_click_outlasts_a_picture(chrome, live, button):
    requests = live.served.requests
    with requests.following("chatcmpl-pressed", 12, HttpCall(requests._clock.now(), 1.7e9)):
        pass
    with signed_in(chrome, live) as page:
        pressed_long(page, '#map [data-instance="p1"]')
        pressed_long(page, button)
        page.wait_for_selector('#ask[open], #requests [aria-expanded="true"]')


def test_the_keyboard_is_enough(chrome, live):
    with signed_in(chrome, live) as page:
        page.evaluate("document.getElementById('map').querySelector('[tabindex=\"0\"]').focus()")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_selector("#instance:not([hidden])")
        assert page.locator("#instance h3").inner_text() == "p1, prefill"
        assert row(page, "p1").get_attribute("aria-selected") == "true"
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.dataset.action") == "drain"
        page.wait_for_timeout(300)  # several pictures have come: the focus stays
        assert page.evaluate("document.activeElement.dataset.action") == "drain"
        page.keyboard.press("Enter")
        page.wait_for_selector("#ask[open]")


@pytest.mark.parametrize(("width", "dark"), [(1400, True), (390, False)])
def test_dark_and_narrow(chrome, live, width, dark):
    with signed_in(chrome, live, width=width, dark=dark) as page:
        row(page, "d0").click()
        page.wait_for_selector("#instance:not([hidden])")
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        keep(page, f"live-{'dark' if dark else 'light'}-{width}")
        check_accessible(page)


# ---- ends


def test_a_browser_that_is_gone_is_forgotten(chrome, live):
    viewers = live.served.page.viewers
    with signed_in(chrome, live):
        assert viewers.num_viewers == 1
    eventually(lambda: viewers.num_viewers == 0)


def test_a_server_that_goes_away_is_said(chrome, tmp_path):
    gone = Live(tmp_path)
    with signed_in(chrome, gone) as page:
        gone.stop()
        page.wait_for_function(
            "() => document.getElementById('notice').innerText.includes('again in')"
        )
        assert page.locator("#map [role=option]").count() == 4
    # The browser's own words for a connection that is refused, and nothing else.
    chrome.problems[:] = [one for one in chrome.problems if "ERR_" not in one]


# ---- replay


@contextlib.contextmanager
def replayed(num_instances: int) -> Iterator[str]:
    made = made_log.decisions(num_instances, 12)
    app = replay_app(Replay(read_decisions(made_log.lines(made), "log")), "decisions.jsonl")

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        yield app

    server = AdminServer(opened)
    yield f"{server.url}/ui"
    server.stop()


def test_a_log_is_played(chrome):
    with replayed(2) as url, chrome.page(url) as page:
        page.wait_for_selector("#map [role=option]")
        assert page.locator("#login").is_hidden()
        page.keyboard.press("Tab")
        page.click("text=Move ›")
        page.wait_for_function("() => document.getElementById('moves').innerText.includes('done')")
        page.focus("#time")
        page.keyboard.press("End")
        row(page, "d0").locator(".hole").nth(3).wait_for()
        assert re.search(r"\+22\.0 s", page.locator("#player output").inner_text())
        assert page.locator("#feed > li").count() == 12
        assert page.locator("#requests-section").is_hidden()
        row(page, "d0").click()
        assert page.locator("#instance .buttons").count() == 0
        page.keyboard.press("Home")
        page.focus("#time")
        page.keyboard.press("Home")
        row(page, "d0").locator(".hole").first.wait_for(state="detached")
        page.select_option("[aria-label=Speed]", "100")
        page.click("#play")
        row(page, "d0").locator(".hole").nth(3).wait_for()


@pytest.mark.parametrize("num_instances", [64, *in_room(1)])
@pytest.mark.parametrize(("width", "dark"), [(1400, False), *in_room((390, True))])
def test_few_and_many_instances(chrome, num_instances, width, dark):
    with replayed(num_instances) as url, chrome.page(url, width=width, dark=dark) as page:
        page.wait_for_selector("#map [role=option]")
        page.focus("#time")
        page.keyboard.press("End")
        page.locator("#feed summary").first.click()
        assert page.locator("#map [role=option]").count() == num_instances
        assert page.locator("#nodes").is_hidden()
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        keep(page, f"replay-{num_instances}-{width}")
        check_accessible(page)
