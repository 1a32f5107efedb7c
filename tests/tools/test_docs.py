"""The checks of documents, and the site that ``make docs`` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from banaserve.cli.commands import COMMANDS, OFFERED_BY
from benchmarks import results_page
from docs import check, generate, reference
from docs.repository import documents

pytestmark = pytest.mark.room

ROOT = check.ROOT


def test_dead_links_and_names_are_one_line_each(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "# A page\n[here](#a-page) [nowhere](#no) [gone](gone.md)\n"
        "`base/clock.py:WallClock.now` `base/clock.py:stop` `no/where.py:main`\n"
        "```mermaid\nA->>B: frontdoor/app.py:make_nothing\n```\n"
        f"{'<' * 7} HEAD\n"
    )
    assert [one.words for one in check.findings_in(document)] == [
        "page.md has no heading #no",
        "dead link gone.md",
        "base/clock.py has no stop",
        "there is no file no/where.py",
        "frontdoor/app.py has no make_nothing",
        "a merge has left its mark",
    ]


@pytest.mark.parametrize("built", [False, True])
def test_a_page_that_only_a_build_makes_is_a_dead_link(
    built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference_folder = tmp_path / "docs" / "reference"
    reference_folder.mkdir(parents=True)
    monkeypatch.setattr(check, "REFERENCE", reference_folder)
    monkeypatch.setattr(check, "RESULTS", tmp_path / "benchmarks" / "results")
    targets = ["docs/reference/commands.md", "benchmarks/RESULTS.md"]
    targets.append("benchmarks/results/simulate-paper.md")
    document = tmp_path / "README.md"
    document.write_text("".join(f"[options]({target}#commands)\n" for target in targets))
    for target in targets if built else []:
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / target).write_text("# Commands\n")
    for target, one in zip(targets, check.findings_in(document), strict=True):
        assert target in one.words
        assert "make docs" in one.words


def test_a_link_to_a_result_leads_somewhere_in_a_clone(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    results = ROOT / "benchmarks" / "results"
    document.write_text(f"[all]({results}) [one]({results}/pacing.json)\n")
    assert list(check.findings_in(document)) == []


def test_a_message_that_names_no_document_of_a_clone_is_found(tmp_path: Path) -> None:
    source = tmp_path / "command.py"
    source.write_text(
        'raise UserError("see docs/store.md")\n'
        'raise UserError("see docs/reference/commands.md")\n'
        'raise UserError("see https://example.org/docs/other.md or docs/gone.md")\n'
    )
    found = [f"{one.line}: {one.words}" for one in check.named_documents(source)]
    assert found == [
        "2: there is no document docs/reference/commands.md",
        "3: there is no document docs/gone.md",
    ]
    assert ROOT / "banaserve" / "frontdoor" / "page" / "static" / "index.html" in check.sources()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    generate.generate(folder)
    return folder


def test_the_site_has_what_its_pages_link_to(site: Path) -> None:
    assert (site / "benchmarks" / "results" / "pacing.json").is_file()
    for page in site.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).is_file(), (page, target)


def test_built_pages_name_code_and_headings_that_are_there(site: Path) -> None:
    for page in results_page.built_pages():
        assert list(check.findings_in(site / "benchmarks" / page)) == []
        assert list(documents.names_in(site / "benchmarks" / page)) == []


@pytest.mark.parametrize(
    ("repository", "said"),
    [
        ("", "choices (`docs/adr/`) and [a page](../store.md)"),
        (
            "https://example.org/banaserve",
            "[choices](https://example.org/banaserve/tree/HEAD/docs/adr) and [a page](../store.md)",
        ),
    ],
)
def test_a_link_to_a_folder_leads_to_the_repository_or_is_its_name(
    repository: str, said: str
) -> None:
    text = "[choices](../adr/) and [a page](../store.md)"
    folder = ROOT / "docs" / "guides"
    assert generate.with_links_of_the_site(text, folder, repository) == said


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("../../benchmarks/results/", "../../benchmarks/RESULTS.md"),
        ("../../benchmarks/results/pacing.json", "../../benchmarks/RESULTS.md#pacing"),
        (
            "../../benchmarks/results/break-even.json",
            "../../benchmarks/results/break-even.md",
        ),
        ("../../benchmarks/LOG.md", "../../benchmarks/LOG.md"),
    ],
)
def test_a_link_to_a_result_leads_to_its_page_on_the_site(
    target: str, shown: str, site: Path
) -> None:
    folder = ROOT / "docs" / "guides"
    assert generate.with_links_of_the_site(f"[a]({target})", folder, "") == f"[a]({shown})"
    document = site / "docs" / "guides" / "page-of-this-test.md"
    document.write_text(f"[a]({shown})\n")
    assert list(check.findings_in(document)) == []
    document.unlink()


def test_the_site_has_a_search_a_dark_switch_and_nothing_from_elsewhere() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), documents.SiteLoader)
    assert {"search", "offline"} <= set(settings["plugins"])
    theme = settings["theme"]
    assert {one["scheme"] for one in theme["palette"]} == {"default", "slate"}
    assert all(one["toggle"]["name"] for one in theme["palette"])
    assert theme["font"] is False
    page = (ROOT / theme["custom_dir"] / "main.html").read_text()
    loaded = [*settings["extra"]["polyfills"], *re.findall(r"'(assets/[^']+)'", page)]
    brought = re.findall(r"docs/scripts/([\w.-]+)", (ROOT / "requirements/install.sh").read_text())
    assert sorted(loaded) == sorted(f"assets/{name}" for name in brought)


def test_the_commands_page_has_every_command_with_its_help(site: Path) -> None:
    text = (site / "docs" / "reference" / "commands.md").read_text()
    for name in (*COMMANDS, *OFFERED_BY):
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
