"""Write the sources of the site: ``python -m docs.generate [FOLDER]``; ``make docs`` builds it.

The folder has the documents in the places that they have in the repository, so that their links
lead somewhere here and there, with the files that they link to, the reference pages and the pages
of results. A link to a result leads to the page that shows it. A link to another folder, which is
no page, leads to the repository's web address where ``mkdocs.yml`` has one as ``repo_url``, and is
the folder's name elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

from benchmarks import results_page
from docs import reference
from docs.check import REFERENCE, REFERENCE_PAGES, documents
from docs.repository.findings import ROOT

SOURCES = ROOT / "build" / "docs"
SCRIPTS = ROOT / ".venv" / "docs" / "scripts"
"""Scripts that pages load; ``make docs`` brings them before it generates the sources."""
_LINK = re.compile(r"\[([^\]\n]*)\]\(([^)#\s]+)\)")


def main(argv: list[str]) -> int:
    """Write the folder anew; return the exit code."""
    generate(Path(argv[0]) if argv else SOURCES)
    return 0


def generate(folder: Path) -> None:
    """Write all sources of the site into ``folder``, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    waiting = documents()
    repository = _repository_url((ROOT / "mkdocs.yml").read_text())
    copied: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in copied:
            copied.add(path)
            _copy(path, folder, repository)
            waiting += _linked(path)
    if SCRIPTS.is_dir():
        shutil.copytree(SCRIPTS, folder / "assets")
    out = folder / REFERENCE.relative_to(ROOT)
    out.mkdir(parents=True, exist_ok=True)
    pages = reference.pages()
    assert set(pages) == set(REFERENCE_PAGES), "docs/check.py has the list of pages"
    for name, text in pages.items():
        (out / name).write_text(text)
    results_page.build(folder / results_page.RESULTS.parent.relative_to(ROOT))
    (out / "openapi.json").write_text(json.dumps(reference.openapi(), indent=2) + "\n")


def _linked(path: Path) -> list[Path]:
    """The files of the repository that a document links to; none of another file."""
    if path.suffix != ".md":
        return []
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    found = [(path.parent / target).resolve() for target in targets]
    return [one for one in found if one.is_file() and ROOT in one.parents]


def _copy(path: Path, folder: Path, repository: str) -> None:
    place = folder / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".md":
        place.write_text(with_links_of_the_site(path.read_text(), path.parent, repository))
    else:
        shutil.copyfile(path, place)


def with_links_of_the_site(text: str, folder: Path, repository: str) -> str:
    """Return a document's text with links to the pages of results, and with none to a folder.

    Args:
        folder: Of the document.
        repository: Web address of the repository; empty where there is none.
    """

    def told(link: re.Match[str]) -> str:
        words, target = link.groups()
        place = (folder / target).resolve()
        if shown := results_page.site_link(place):
            return f"[{words}]({os.path.relpath(results_page.RESULTS.parent / shown, folder)})"
        if not (place.is_dir() and place.is_relative_to(ROOT)):
            return link[0]
        name = place.relative_to(ROOT).as_posix()
        if repository:
            return f"[{words}]({repository}/tree/HEAD/{name})"
        return f"`{name}/`" if words.strip("`/") in name else f"{words} (`{name}/`)"

    return _LINK.sub(told, text)


def _repository_url(settings: str) -> str:
    found = re.search(r"^repo_url: *(\S+?)/?$", settings, re.MULTILINE)
    return found[1] if found else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
