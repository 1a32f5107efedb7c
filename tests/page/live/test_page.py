"""The page over a real server in a real browser: a move under load, the legs of a request."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from banaserve.base.platform.run_dir import admin_note, find_admin
from banaserve.contracts.migration_api import MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient
from browsing import Browser, browser, check_accessible, keep, keep_for_readme
from docs.repository.dashboard import asked_series
from server_run import DEADLINE_S, Run

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as one:
        yield one
        assert one.problems == []


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run], chrome: Browser) -> Iterator[Run]:
    run = serve(
        *("--pd", "2:1", "--dtype", "float32", "--max-model-len", "2048"),
        *("--kv-cache-memory-bytes", str(256 << 20)),
        *("--api-key", "users"),
    )
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def page(server: Run, chrome: Browser) -> Iterator[Any]:
    key = json.loads(admin_note(server.run_dir).read_text())["key"]
    with chrome.page(f"{server.url}/ui") as one:
        one.fill("#key", key)
        one.keyboard.press("Enter")
        one.wait_for_selector("#map [role=option]")
        yield one


class Load:
    """Streams one after the other until the block is left, of prompts that no cache knows."""

    def __init__(self, server: Run, num_streams: int = 2) -> None:
        self._client = server.client("users")
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_streams)]
        self.num_answers = 0
        self.errors: list[str] = []

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                answer = self._client.completions.create(
                    model="smollm2-135m",
                    prompt=f"Story {next(self._numbers)}. " + "One morning the bridge over " * 15,
                    max_tokens=100,
                    extra_body={"ignore_eos": True},
                )
                assert answer.choices[0].text
                self.num_answers += 1
            except Exception as failure:
                self.errors.append(repr(failure))
                return

    def __enter__(self) -> Load:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for one in self._threads:
            one.join(DEADLINE_S)


def seen_moving(page: Any, server: Run) -> bool:
    """Whether one of some moves was seen under way: they take about as long as two pictures."""
    admin = AdminClient(*find_admin(server.run_dir))
    page.evaluate(
        """() => new MutationObserver(() => {
            window.phases ||= [];
            const tag = document.querySelector("#map .tagged");
            if (tag) window.phases.push(tag.textContent);
        }).observe(document.getElementById("map"), {childList: true, subtree: true})"""
    )
    for _ in range(5):
        for ask in (Return("d0"), MoveLayers("d0", "p0", (10, 20))):
            asked = threading.Thread(target=admin.run, args=(ask,))
            asked.start()
            while asked.is_alive():
                page.wait_for_timeout(50)
        row(page, "d0").locator(".hole").wait_for()
        if page.evaluate("window.phases"):
            return True
    return False


def row(page: Any, name: str) -> Any:
    return page.locator(f'#map [data-instance="{name}"]')


def test_a_move_under_load_is_seen(server, page):
    with Load(server) as load:
        page.wait_for_selector("[data-request]")
        row(page, "d0").click()
        page.click('[data-action="move"]')
        page.fill('[name="start"]', "10")
        page.fill('[name="end"]', "19")
        assert page.locator("#ask-command").inner_text() == (
            "banaserve migrate layers --from d0 --to p0 --layers 10:20"
        )
        page.click("#ask-yes")
        row(page, "d0").locator(".hole").wait_for()
        row(page, "p0").locator(".guest").wait_for()
        keep(page, "served-moved", whole=False)
        assert seen_moving(page, server), "no move was seen while it was under way"
        page.locator("#figures .value", has_text="tokens/s").first.wait_for()
        page.evaluate("scrollTo(0, 0)")
        keep_for_readme(page, "page-under-load")
    assert load.errors == []
    assert load.num_answers > 0


def test_a_request_opens_as_a_waterfall_of_its_legs(page):
    page.locator("[data-request]").last.click()
    page.locator(".waterfall svg").wait_for()
    told = page.locator(".waterfall svg").get_attribute("aria-label")
    assert re.search(r"prefill on p\d: ", told)
    assert re.search(r"hand-over on d0: .*fetch on d0: blocks \d", told)
    assert re.search(r"decode on d0: .*steps \d", told)
    assert page.locator(".waterfall rect.decode").count() >= 1
    keep(page, "served-waterfall")
    check_accessible(page)
    page.locator("[data-request]").last.click()


def test_every_query_of_the_dashboard_finds_its_metric(server):
    text = server.get("/metrics").text
    families = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.M))
    samples: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([\w:]+)(\{.*\})? ", text, re.M):
        samples.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    for one in asked_series():
        if one.metric.startswith("banaserve_kvstore_tier_"):
            continue  # this server has nothing below memory
        if one.metric in samples:
            assert one.labels <= samples[one.metric], one
        else:
            # What has not happened yet has a family without samples.
            assert re.sub(r"_bucket$", "", one.metric) in families, one
