"""The page over a server with mock engines in a real browser: keys, a drain, the log replayed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from banaserve.base.platform.run_dir import admin_note
from banaserve.cli.main import main
from browsing import Browser, browser, check_accessible
from docs.repository.dashboard import asked_series
from mock_facts import MockOptions
from mock_run import MockRun
from server_run import DEADLINE_S

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as one:
        yield one
        assert one.problems == []


@pytest.fixture(scope="module")
def decision_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decisions") / "decisions.jsonl"


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun], decision_log: Path, chrome: Browser) -> Iterator[MockRun]:
    run = serve(
        *("--pd", "2:1", "--decision-log", str(decision_log), "--api-key", "users"),
        mocks=MockOptions(step_ms=4.0),
    )
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def page(server: MockRun, chrome: Browser) -> Iterator[Any]:
    key = json.loads(admin_note(server.run_dir).read_text())["key"]
    with chrome.page(f"{server.url}/ui") as one:
        one.fill("#key", key)
        one.keyboard.press("Enter")
        one.wait_for_selector("#map [role=option]")
        yield one


@pytest.fixture(scope="module")
def answered(server: MockRun, page: Any) -> None:
    """A few requests that the page has seen."""
    client = server.client("users")
    for number in range(4):
        answer = client.completions.create(
            model="smollm2-135m",
            prompt=f"Story {number}. " + "One morning the bridge over " * 15,
            max_tokens=100,
            extra_body={"ignore_eos": True},
        )
        assert answer.choices[0].text
    page.wait_for_selector("[data-request]")


def row(page: Any, name: str) -> Any:
    return page.locator(f'#map [data-instance="{name}"]')


def test_the_banner_names_the_page_and_where_its_key_is(server):
    told = re.search(r"page +(\S+) \(its key: (\S+)\)", server.printed())
    assert told is not None
    assert told[1] == f"{server.url}/ui"
    assert Path(told[2]).stat().st_mode & 0o077 == 0


def test_a_link_of_the_command_opens_the_page_once(server, chrome, capsys):
    assert main(["ui", "--run-dir", str(server.run_dir)]) == 0
    link, valid, key = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{server.url}/ui/#code=[\w-]{{43}}", link)
    assert valid == "opens once, within 15 minutes"
    assert key == f"its key: in {admin_note(server.run_dir)}"
    with chrome.page(link) as one:
        one.wait_for_selector("#map [role=option]")
        (token,) = one.evaluate("Object.values(sessionStorage)")
        one.reload()
        one.wait_for_selector("#map [role=option]")
    with chrome.page(link) as other:
        other.wait_for_function("() => document.body.innerText.includes('has been used')")
    for log in server.run_dir.glob("*.log"):
        text = log.read_text(errors="replace")
        assert not any(secret in text for secret in (token, link.split("=")[1])), log.name


def test_the_users_key_opens_no_page(server):
    for headers in ({}, {"Authorization": "Bearer users"}):
        with httpx.stream(
            "GET", f"{server.url}/admin/live", headers=headers, timeout=DEADLINE_S
        ) as answer:
            assert answer.status_code == 401
    assert server.get("/ui/").status_code == 200


def test_a_request_opens_as_a_waterfall_of_its_legs(answered, page):
    page.locator("[data-request]").last.click()
    page.locator(".waterfall svg").wait_for()
    told = page.locator(".waterfall svg").get_attribute("aria-label")
    assert re.search(r"prefill on p\d: ", told)
    assert "hand-over on d0: " in told
    check_accessible(page)
    page.locator("[data-request]").last.click()


def test_decisions_and_the_store_are_shown(answered, page):
    page.locator("#feed summary").first.wait_for()
    page.locator("#feed summary").first.click()
    assert "d0" in page.locator("#feed .detail").first.inner_text()
    assert "memory" in page.locator("#store").inner_text()


def test_the_drain_button_asks_and_works(server, page):
    row(page, "p1").click()
    page.click('[data-action="drain"]')
    assert page.locator("#ask-command").inner_text() == "banaserve drain p1"
    page.click("#ask-yes")
    page.locator('[data-action="undo"]').wait_for()
    ready = server.get("/admin/status")
    assert ready.status_code == 401
    page.click('[data-action="undo"]')
    page.click("#ask-yes")
    page.locator('[data-action="drain"]').wait_for()


def test_every_query_of_the_dashboard_finds_its_metric(answered, server):
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


def test_the_key_is_in_no_log(answered, server):
    key = json.loads(admin_note(server.run_dir).read_text())["key"]
    for log in server.run_dir.glob("*.log"):
        assert key not in log.read_text(errors="replace"), log.name
    assert key not in server.printed()


def test_what_the_server_decided_is_replayed(answered, decision_log, page):
    from banaserve.frontdoor.page.replay import read_replay

    assert page.locator("#feed > li").count() >= 1
    replay = read_replay(decision_log)
    moment = replay.moment(replay.num_frames - 1)
    assert [one.status.id for one in moment.snapshot.instances] == ["p0", "p1", "d0"]
    assert moment.snapshot.num_layers == 30
