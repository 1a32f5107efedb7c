"""What documents name: links, code, files, options, commands, targets, pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from banaserve.cli.commands import COMMANDS, OFFERED_BY
from banaserve_bench import command as bench
from benchmarks import results_page
from benchmarks.registry import BENCHMARKS
from docs import check, commands
from docs.repository.findings import ROOT, Finding, at, too_few

ARCHITECTURE = ROOT / "ARCHITECTURE.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
FOLDERS = (
    *("banaserve", "bench", "benchmarks", "csrc", "docs", "examples", "plugins", "route"),
    "tests",
)
_OF_OTHERS = """
    --extra-index-url --no-deps --no-build-isolation --require-hashes
    --dtype --kv-transfer-config --kv-events-config --scheduler-cls --ssl-ciphers --quantization
    --scheduling-policy --compilation-config --no-enable-prefix-caching --max-num-queued-reqs
    --max-num-queued-tokens --gpu-memory-utilization --kv-cache-memory-bytes --attention-backend
    --enable-prompt-tokens-details --enforce-eager --no-enforce-eager --otlp-traces-endpoint
    --cache --enable-feature
"""
OTHERS = set(_OF_OTHERS.split())
"""Options that documents name and no command of banaserve takes: of pip, of vLLM, which banaserve
passes on, of the checker of another vLLM, and of Prometheus."""


def findings() -> Iterator[Finding]:
    """Yield names in documents that nothing has, and pages that the site lacks."""
    yield from _named_files()
    yield from _glossary()
    yield from _options()
    for document in check.documents():
        yield from check.findings_in(document)
        yield from names_in(document)
    for source in check.sources():
        yield from check.named_documents(source)
    yield from _site()


def _named_files() -> Iterator[Finding]:
    paths = {f"/{name}" for name in FOLDERS}
    for name in FOLDERS:
        paths |= {f"/{path.relative_to(ROOT)}" for path in (ROOT / name).rglob("*")}
    every = "\n".join(sorted(paths))
    form = re.compile(r"`((?:[\w.*-]+/)*[\w.*-]+\.(?:py|json|h|cpp|\*)|(?:[\w-]+/)+[\w-]*)`")
    suffixes = (".py", ".json", ".h", ".cpp")
    names = ("ARCHITECTURE.md", "docs/store.md", "docs/migration.md", "docs/balancer.md")
    about_code = {ROOT / name for name in names}
    seen = []
    for document in check.documents():
        if document.parent.name == "log":  # says how it was
            continue
        for number, line in enumerate(document.read_text().splitlines(), start=1):
            for named in form.findall(line):
                if document in about_code:
                    seen.append(named)
                elif "/" not in named or named.startswith("acme") or not named.endswith(suffixes):
                    continue  # a folder of the reader's, or a model
                pattern = re.escape(named.rstrip("/")).replace(r"\*", "[^/\n]*")
                if not re.search(f"/{pattern}$", every, re.MULTILINE):
                    yield Finding(document, number, f"there is no {named}")
    yield from too_few(ARCHITECTURE, seen, 50, "names of files")


def _glossary() -> Iterator[Finding]:
    seen = []
    for number, row in enumerate(GLOSSARY.read_text().splitlines(), start=1):
        if not re.fullmatch(r"\| .* \|", row) or row.startswith(("| ---", "| Word")):
            continue
        seen.append(row)
        if not re.search(r"`[\w/]+\.py(?::[\w.]+)?`", row.split(" | ")[-1]):
            yield Finding(GLOSSARY, number, "the word has no place in the code")
    yield from too_few(GLOSSARY, seen, 30, "words")


def _options() -> Iterator[Finding]:
    helps = map(commands.help_of, commands.command_paths())
    taken = set(re.findall(r"--[a-z][a-z-]+", "\n".join(helps)))
    folders = (ROOT / "docs", ROOT / "docs" / "guides")
    documents = [one for one in check.documents() if one.parent in folders]
    named: dict[str, tuple[Path, int]] = {}
    for document in [ROOT / "README.md", *documents]:
        for number, line in enumerate(document.read_text().splitlines(), start=1):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line):
                named.setdefault(option, (document, number))
    yield from too_few(ROOT / "README.md", named, 40, "options")
    for option, place in named.items():
        if option not in taken | OTHERS:
            yield Finding(*place, f"no command takes {option}")
    for option in sorted(OTHERS - (named.keys() - taken)):
        words = f"no document names {option}, or a command takes it"
        yield at(Path(__file__), option, words)


def names_in(document: Path) -> Iterator[Finding]:
    """Yield targets of make, commands and benchmarks that are not there."""
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    looked_up = [
        (r"(?:^    |`|; )make ([a-z][a-z-]*)", targets, "make"),
        (r"`banaserve ([a-z]+)", {*COMMANDS, *OFFERED_BY}, "banaserve"),
        (r"make bench NAME=([a-z-]+)", BENCHMARKS, "make bench NAME="),
        (r"python -m benchmarks ([a-z-]+)", BENCHMARKS, "python -m benchmarks"),
    ]
    # History: the first lines of LOG.md say how commands are called now.
    if document.name != "LOG.md" and document.parent != ROOT / "benchmarks" / "log":
        looked_up.append((r"banaserve bench ([a-z][a-z-]+)", bench.SUBCOMMANDS, "banaserve bench"))
    for number, line in enumerate(document.read_text().splitlines(), start=1):
        for pattern, known, command in looked_up:
            for name in re.findall(pattern, line):
                if name not in known:
                    yield Finding(document, number, f"there is no `{command} {name}`")


class SiteLoader(yaml.SafeLoader):
    """Reads names of Python's objects, which mkdocs.yml has, as nothing."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: "")


def _site() -> Iterator[Finding]:
    file = ROOT / "mkdocs.yml"
    settings = yaml.load(file.read_text(), SiteLoader)
    named = set(re.findall(r"[\w./-]+\.md", json.dumps(settings["nav"])))
    pages = {str(path.relative_to(ROOT)) for path in check.documents()}
    pages |= {f"docs/reference/{name}" for name in check.REFERENCE_PAGES}
    pages |= {f"benchmarks/{page}" for page in results_page.built_pages()}
    for page in sorted(named - pages):
        yield at(file, page, f"there is no {page}")
    for page in sorted(pages - named):
        if not page.startswith("examples/"):
            yield at(file, "nav:", f"{page} is missing")
