"""Write the sources of the site: ``python -m docs.generate [FOLDER]``; ``make docs`` builds it.

The folder has the documents in the places that they have in the repository, so that their links
lead somewhere here and there, with the files that they link to and the reference pages.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from docs import reference
from docs.check import REFERENCE, REFERENCE_PAGES, ROOT, documents

SOURCES = ROOT / "build" / "docs"
SCRIPTS = ROOT / ".venv" / "docs" / "scripts"
"""Scripts that pages load; ``make docs`` brings them before it generates the sources."""


def main(argv: list[str]) -> int:
    """Write the folder anew; return the exit code."""
    generate(Path(argv[0]) if argv else SOURCES)
    return 0


def generate(folder: Path) -> None:
    """Write all sources of the site into ``folder``, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    waiting = documents()
    copied: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in copied:
            copied.add(path)
            _copy(path, folder)
            waiting += _linked(path)
    if SCRIPTS.is_dir():
        shutil.copytree(SCRIPTS, folder / "assets")
    out = folder / REFERENCE.relative_to(ROOT)
    out.mkdir(parents=True, exist_ok=True)
    pages = reference.pages()
    assert set(pages) == set(REFERENCE_PAGES), "docs/check.py has the list of pages"
    for name, text in pages.items():
        (out / name).write_text(text)
    (out / "openapi.json").write_text(json.dumps(reference.openapi(), indent=2) + "\n")


def _linked(path: Path) -> list[Path]:
    """The files of the repository that a document links to; none of another file."""
    if path.suffix != ".md":
        return []
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    found = [(path.parent / target).resolve() for target in targets]
    return [one for one in found if one.is_file() and ROOT in one.parents]


def _copy(path: Path, folder: Path) -> None:
    place = folder / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
