"""The page's chat box over a server with mock engines, in a real browser."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import small_model
from banaserve.base.platform.run_dir import admin_note
from browsing import Browser, browser, check_accessible, keep
from mock_facts import MockOptions
from mock_run import MockRun

pytestmark = pytest.mark.deep

KEY = "of-the-clients"
CHAT = "**/v1/chat/completions"


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as one:
        yield one


@pytest.fixture(autouse=True)
def no_problems(chrome: Browser) -> Iterator[None]:
    chrome.problems.clear()
    yield
    # A browser itself says that an answer is an error.
    assert [one for one in chrome.problems if "Failed to load resource" not in one] == []


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun], chrome: Browser) -> Iterator[MockRun]:
    run = serve("--pd", "2:1", "--api-key", KEY, mocks=MockOptions(step_ms=4.0))
    yield run
    assert run.end() == 0


@contextlib.contextmanager
def opened(chrome: Browser, run: MockRun, **view: Any) -> Iterator[Any]:
    with chrome.page(f"{run.url}/ui", **view) as page:
        page.fill("#key", json.loads(admin_note(run.run_dir).read_text())["key"])
        page.keyboard.press("Enter")
        page.wait_for_selector("#chat")
        yield page


def say(page: Any, words: str) -> None:
    page.fill("#chat-text", words)
    page.press("#chat-text", "Enter")


def give_key(page: Any, key: str = KEY) -> None:
    page.fill("#chat-key", key)
    page.press("#chat-key", "Enter")


def limit(page: Any, num_tokens: int) -> None:
    """End the answers on this page after so many tokens."""

    def shorten(route: Any) -> None:
        body = {**route.request.post_data_json, "max_tokens": num_tokens}
        route.continue_(post_data=json.dumps(body))

    page.route(CHAT, shorten)


def answer_with(page: Any, *events: object) -> None:
    """Answer on this page in place of the server's API, without a key."""
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in events)
    models = json.dumps({"data": [{"id": "made"}]})
    page.route("**/v1/models", lambda route: route.fulfill(body=models))
    page.route(CHAT, lambda route: route.fulfill(body=body))


def piece(text: str, end: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": end}
    return {"id": "chatcmpl-made", "choices": [choice], "usage": {"completion_tokens": 1}}


def asked_by(page: Any) -> list[dict[str, Any]]:
    """Bodies of the chat requests of this page, from now on."""
    bodies: list[dict[str, Any]] = []

    def note(request: Any) -> None:
        assert KEY not in request.url
        if request.url.endswith("/chat/completions"):
            bodies.append(request.post_data_json)

    page.on("request", note)
    return bodies


def test_the_api_key_is_asked_once_a_tab_and_answers_stream(server, chrome):
    with opened(chrome, server) as page:
        bodies = asked_by(page)
        limit(page, 40)
        say(page, "One")
        page.locator("#chat-error", has_text="The server needs an API key.").wait_for()
        assert page.input_value("#chat-text") == "One", "nothing is lost"
        assert page.evaluate("document.activeElement.id") == "chat-key"
        check_accessible(page)
        keep(page, "chat-key", whole=False)
        for wrong, told in (("with space", "no spaces"), ("wrong", "refuses this API key")):
            give_key(page, wrong)
            page.locator("#chat-error", has_text=told).wait_for()
        assert bodies == []
        give_key(page)
        answer = page.locator("#chat-log .turn").nth(1)
        answer.wait_for()
        assert page.locator("#chat-key-form").is_hidden()
        assert answer.locator("h3").inner_text() == "smollm2-135m"
        first = answer.locator("p").text_content()
        assert first
        page.locator("#chat-figures", has_text="served by").wait_for()
        assert re.fullmatch(
            r"First token after [\d.]+ m?s · [\d.]+ tokens/s · 40 tokens · served by \w+( → \w+)?"
            " · cut off at the maximum length",
            page.locator("#chat-figures").inner_text(),
        )
        assert page.locator("#chat-error").inner_text() == ""
        say(page, "Two")
        page.locator("#chat-log .turn").nth(3).wait_for()
        keep(page, "chat", whole=False)
        check_accessible(page)
        assert [(one["temperature"], one["stream"]) for one in bodies] == [(0, True)] * 2
        said = [(one["role"], one["content"]) for one in bodies[1]["messages"]]
        assert said == [("user", "One"), ("assistant", first), ("user", "Two")]

        page.click("#chat-new")
        assert page.locator("#chat-log .turn").count() == 0
        assert page.evaluate("document.activeElement.id") == "chat-text"
        page.reload()
        page.wait_for_selector("#chat")
        assert page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
        assert KEY in page.evaluate("Object.values(sessionStorage)")
        assert KEY not in page.url
        say(page, "Three")
        page.locator("#chat-log .turn").nth(1).wait_for()
        assert [one["content"] for one in bodies[2]["messages"]] == ["Three"]
        page.click("#leave")
        page.wait_for_selector("#login:not([hidden])")
        assert page.evaluate("sessionStorage.length") == 0


def test_stop_ends_the_request_and_keeps_what_came(server, chrome):
    with opened(chrome, server) as page:
        bodies = asked_by(page)
        page.fill("#chat-text", "Tell a long story")
        page.click("#chat-send")
        give_key(page)
        page.locator("#chat-now p", has_text=re.compile(r"\S")).wait_for()
        assert page.locator("#chat-send").is_hidden()
        say(page, "Sent later")
        assert len(bodies) == 1, "one at a time"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.locator("#chat-figures", has_text="stopped").wait_for()
        assert page.evaluate("document.activeElement.id") == "chat-text"
        page.locator("#requests tr", has_text="closed").wait_for()
        came = page.locator("#chat-log .turn p").nth(1).text_content()
        assert came
        limit(page, 4)
        page.press("#chat-text", "Enter")
        page.locator("#chat-log .turn").nth(3).wait_for()
        assert [one["content"] for one in bodies[1]["messages"]] == [
            *("Tell a long story", came, "Sent later")
        ]


def test_a_conversation_that_begins_anew_ends_the_answer(server, chrome):
    with opened(chrome, server) as page:
        say(page, "Tell a long story")
        give_key(page)
        page.locator("#chat-now p", has_text=re.compile(r"\S")).wait_for()
        running = page.locator("#requests tr", has_text="running")
        running.wait_for()
        page.click("#chat-new")
        assert page.locator(".turn").count() == 0
        running.wait_for(state="detached")
        limit(page, 4)
        say(page, "Short")
        page.locator("#chat-log .turn").nth(1).wait_for()
        assert page.locator(".turn").count() == 2


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_text_of_the_model_is_no_markup(server, chrome, width, dark):
    text = "<b>bold</b> <img src=x onerror=alert(1)>\n" + "word " * 300 + "w" * 300
    with opened(chrome, server, width=width, dark=dark) as page:
        answer_with(page, piece(""), piece(text), piece("", "stop"))
        say(page, "<i>so</i>\nand so")
        page.locator("#chat-log .turn").nth(1).wait_for()
        assert page.locator(".turn p").all_text_contents() == ["<i>so</i>\nand so", text]
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        check_accessible(page)
        assert page.locator("#chat-figures").inner_text().endswith(" · 1 token")
        page.locator("#chat").scroll_into_view_if_needed()
        keep(page, f"chat-{width}", whole=False)


ONE_LINE = [
    (lambda route: route.abort(), "The server does not answer."),
    (lambda route: route.fulfill(status=502, body="<html>"), "The server answers 502."),
    (
        lambda route: route.fulfill(status=429, json={"error": {"message": "too\n  many"}}),
        "too many",
    ),
    (lambda route: route.fulfill(body="data: {\n\n"), "The answer broke off."),
]


@pytest.mark.room
@pytest.mark.parametrize(("fault", "told"), ONE_LINE)
def test_an_error_is_one_line_and_the_question_stays(server, chrome, fault, told):
    with opened(chrome, server) as page:
        answer_with(page)
        page.route(CHAT, fault)
        say(page, "Why?")
        page.locator("#chat-error", has_text=told).wait_for()
        assert page.locator("#chat-error").inner_text() == told
        assert page.input_value("#chat-text") == "Why?"
        assert page.locator(".turn").count() == 0


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ([], "The answer broke off."),
        ([{"error": {"message": "no engine"}}], "The answer broke off: no engine"),
    ],
)
def test_what_came_before_an_error_stays(server, chrome, end, told):
    with opened(chrome, server) as page:
        answer_with(page, piece("Because"), *end)
        say(page, "Why?")
        page.locator("#chat-error", has_text=told).wait_for()
        assert page.locator("#chat-error").inner_text() == told
        assert page.locator("#chat-log .turn p").all_text_contents() == ["Why?", "Because"]


@pytest.mark.room
def test_a_model_without_a_chat_template_is_asked_elsewhere(serve, chrome, tmp_path):
    model = small_model.resolve()
    folder = Path(shutil.copytree(model.path_or_id, tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    run = serve("--model", str(folder), "--served-model-name", model.served_name)
    with opened(chrome, run) as page:
        say(page, "Why?")
        page.locator("#chat-error", has_text="chat template").wait_for()
        assert page.locator("#chat-error").inner_text() == (
            "This model has no chat template: ask it through /v1/completions."
        )
        assert page.locator("#chat-key-form").is_hidden(), "no key is needed"
    assert run.end() == 0
