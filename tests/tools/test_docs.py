"""The checks of documents, and the site that ``make docs`` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from banaserve.cli.main import COMMANDS
from docs import check, generate, reference

pytestmark = pytest.mark.room

ROOT = check.ROOT


def test_dead_links_and_names_are_one_line_each(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "# A page\n[here](#a-page) [nowhere](#no) [gone](gone.md)\n"
        "`clock.py:WallClock.now` `clock.py:stop` `no/where.py:main`\n"
        "```mermaid\nA->>B: api/app.py:make_nothing\n```\n"
        f"{'<' * 7} HEAD\n"
    )
    assert [line.partition(": ")[2] for line in check.findings_in(document)] == [
        "page.md has no heading #no",
        "dead link gone.md",
        "clock.py has no stop",
        "there is no file no/where.py",
        "api/app.py has no make_nothing",
        "a merge has left its mark",
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    generate.generate(folder)
    return folder


def test_the_site_has_what_its_pages_link_to(site: Path) -> None:
    assert (site / "benchmarks" / "results" / "stall.json").is_file()
    for page in site.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            path = (ROOT / page.relative_to(site)).parent / target
            if "://" not in target and not path.is_dir():
                assert (page.parent / target).is_file(), (page, target)


def test_the_commands_page_has_every_command_with_its_help(site: Path) -> None:
    text = (site / "docs" / "reference" / "commands.md").read_text()
    for name in COMMANDS:
        assert f"\n## banaserve {name}\n" in text
    for words in ("kvstore status", "migrate layers", "orchestrator pause", "bench serving"):
        assert f"\n### banaserve {words}\n" in text
    assert "--kv-store-ssd-size" in text


def test_the_configuration_page_has_every_key(site: Path) -> None:
    text = (site / "docs" / "reference" / "configuration.md").read_text()
    for key in ("peer_key", "hold_safe", "max_outstanding", "breaker_pause_s", "opt-13b-a100"):
        assert f"`{key}`" in text


def test_attributes_of_a_docstring_are_read() -> None:
    words = reference.attribute_words(
        "One.\n\n    Attributes:\n        first: Of two\n            lines.\n        last: Short.\n"
    )
    assert words == {"first": "Of two lines.", "last": "Short."}
