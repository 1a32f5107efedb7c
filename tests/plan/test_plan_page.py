"""The page of `banaserve plan` in a real browser: complete, readable, and without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from banaserve.cli.main import main
from browsing import browser, check_accessible, keep

pytestmark = pytest.mark.deep

LOAD = ("--prompt-tokens", "4000", "--output-tokens", "200", "--rps", "5", "--duration", "30")
ON_TWO = ("--profile", "llama-3.1-8b-h100", "--instances", "2", "--seeds", "3")
LIMITS = ("--slo-ttft", "1", "--slo-tpot", "0.012", "--step-error", "0.02", "--price", "2")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    assert main(["plan", *LOAD, *ON_TWO, *LIMITS, "--html", str(path)]) == 0
    return path, path.read_text()


def test_it_begins_with_the_answer_and_has_what_was_asked(written: tuple[Path, str]) -> None:
    _, text = written
    order = ("<h1>Yes</h1>", "banaserve serve MODEL --pd 1:1", "Systems that were judged")
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    for words in ("Pareto front", "Time to first token, p99", "hand-over, ms", "flip points"):
        assert words in text
    assert "http-equiv" in text
    for loads_something in ("<script", "<link", "<img", " src=", "@import", "url(http"):
        assert loads_something not in text


@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it(written: tuple[Path, str], dark: bool) -> None:
    path, _ = written
    with browser() as chrome, chrome.page(path.as_uri(), dark=dark) as page:
        assert page.locator("h1").inner_text() == "Yes"
        pictures = page.locator("svg.plot")
        assert pictures.count() == 2
        assert all(pictures.nth(n).get_attribute("aria-label") for n in range(2))
        # A reader without pictures gets all figures as tables, by the keyboard alone.
        summary = page.locator("summary").first
        summary.focus()
        page.keyboard.press("Enter")
        assert page.locator("details[open] td").first.is_visible()
        keep(page, f"plan-{'dark' if dark else 'light'}")
        check_accessible(page)
        assert not chrome.problems


def test_a_narrow_screen_does_not_scroll_sideways(written: tuple[Path, str]) -> None:
    path, _ = written
    with browser() as chrome, chrome.page(path.as_uri(), width=400) as page:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_page_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none" / "plan.html"
    assert main(["plan", *LOAD, *ON_TWO, "--html", str(missing)]) == 2
    assert f"cannot write {missing}" in capsys.readouterr().err
