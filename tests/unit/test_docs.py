"""What the documents name exists: links, files, commands, options, make targets."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest

from banaserve.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    ROOT / "docker" / "README.md",
    ROOT / "banaserve" / "kernels" / "README.md",
]
FOLDERS = ("banaserve", "benchmarks", "csrc", "tests")
# Of pip and of vLLM, which banaserve passes on.
OTHERS = {"--extra-index-url", "--no-build-isolation", "--no-deps", "--dtype"}
SUBCOMMANDS = [
    *(("migrate", name) for name in ("layers", "heads", "context", "overlap", "share")),
    ("bench", "router"),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
        assert "://" in target or (document.parent / target).exists(), target


def test_every_file_that_the_architecture_names_is_there() -> None:
    paths = {f"/{name}" for name in FOLDERS}
    for name in FOLDERS:
        paths |= {f"/{path.relative_to(ROOT)}" for path in (ROOT / name).rglob("*")}
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`((?:[\w.*-]+/)*[\w.*-]+\.(?:py|json|h|cpp|\*)|(?:[\w-]+/)+[\w-]*)`", text)
    assert len(named) > 50
    for name in named:
        pattern = re.compile(f".*/{re.escape(name.rstrip('/')).replace(chr(92) + '*', '[^/]*')}")
        assert any(pattern.fullmatch(path) for path in paths), name


def test_options_that_the_readme_names_are_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for words in (*((name,) for name in COMMANDS), *SUBCOMMANDS):
        with suppress(SystemExit):
            main([*words, "--help"])
    taken = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / "README.md").read_text()))
    assert len(named) > 20
    assert named - taken == OTHERS


def test_make_targets_that_documents_name_are_there() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = re.findall(r"(?:^    |`|; )make ([a-z][a-z-]*)", document.read_text(), re.MULTILINE)
        assert set(named) <= targets, document


def test_commands_that_documents_name_are_there() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"`banaserve ([a-z]+)", document.read_text()):
            assert name in COMMANDS, (document, name)
