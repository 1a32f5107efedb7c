"""Documents name what exists: links, files, functions, commands, options, make targets."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from banaserve.cli.main import COMMANDS, main
from docs import check, generate, reference

ROOT = Path(__file__).parents[2]
DOCUMENTS = check.documents()
FOLDERS = ("banaserve", "benchmarks", "csrc", "docs", "tests")
# Of pip and of vLLM, which banaserve passes on.
OTHERS = {
    *("--extra-index-url", "--no-deps", "--no-build-isolation", "--require-hashes", "--dtype"),
    *("--kv-transfer-config", "--scheduler-cls", "--ssl-ciphers", "--quantization"),
    *("--scheduling-policy", "--compilation-config", "--no-enable-prefix-caching"),
    *("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--max-num-seqs"),
    *("--enable-prompt-tokens-details", "--enforce-eager", "--no-enforce-eager"),
    # Of the checker of another vLLM, which is no command.
    *("--only-breaks", "--cache"),
    "--page",  # of a benchmark, whose options are its own
    *("--otlp-traces-endpoint", "--enable-feature"),  # of vLLM, and of Prometheus
}
WITH_OPTIONS = [
    ROOT / "README.md",
    *(path for path in DOCUMENTS if path.parent in (ROOT / "docs", ROOT / "docs" / "guides")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_names_of_code_lead_somewhere(document: Path) -> None:
    assert list(check.findings_in(document)) == []


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


def test_every_file_that_the_architecture_names_is_there() -> None:
    paths = {f"/{name}" for name in FOLDERS}
    for name in FOLDERS:
        paths |= {f"/{path.relative_to(ROOT)}" for path in (ROOT / name).rglob("*")}
    text = "\n".join(
        (ROOT / name).read_text()
        for name in ("ARCHITECTURE.md", "docs/store.md", "docs/migration.md", "docs/balancer.md")
    )
    named = re.findall(r"`((?:[\w.*-]+/)*[\w.*-]+\.(?:py|json|h|cpp|\*)|(?:[\w-]+/)+[\w-]*)`", text)
    assert len(named) > 50
    for name in named:
        pattern = re.compile(f".*/{re.escape(name.rstrip('/')).replace(chr(92) + '*', '[^/]*')}")
        assert any(pattern.fullmatch(path) for path in paths), name


def test_every_arrow_of_the_sequences_is_a_function() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    arrows = re.findall(r"^ +\w+->>\w+: (.*)$", text, re.MULTILINE)
    assert len(arrows) > 20
    for label in arrows:
        [(path, name)] = check.code_names(label)
        assert label == f"{path}:{name}"
        assert check.code_problem(path, name) == ""


def test_every_word_of_the_glossary_but_those_of_vllm_has_its_place() -> None:
    rows = re.findall(r"^\| .* \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [row for row in rows if not row.startswith(("| ---", "| Word"))]
    assert len(words) > 30
    for row in words:
        places = re.findall(r"`([\w/]+\.py)(?::[\w.]+)?`", row.split(" | ")[-1])
        assert places or "As in vLLM" in row, row
        assert all((ROOT / "banaserve" / place).is_file() for place in places), row


def test_options_that_documents_name_are_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for words in reference.command_paths():
        with suppress(SystemExit):
            main([*words, "--help"])
    taken = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    text = "\n".join(document.read_text() for document in WITH_OPTIONS)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert len(named) > 40
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


def test_benchmarks_that_documents_name_are_there() -> None:
    from banaserve.cli import bench
    from benchmarks.registry import BENCHMARKS

    for document in DOCUMENTS:
        text = document.read_text()
        for name in re.findall(r"make bench NAME=([a-z-]+)", text):
            assert name in BENCHMARKS, (document, name)
        for name in re.findall(r"python -m benchmarks ([a-z-]+)", text):
            assert name in BENCHMARKS, (document, name)
        if document.name != "LOG.md":  # history: its first lines say how commands are called now
            for name in re.findall(r"banaserve bench ([a-z][a-z-]+)", text):
                assert name in bench.BENCHMARKS, (document, name)


# ---- the site


def test_the_site_has_every_page() -> None:
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: "")
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), loader)  # a subclass of SafeLoader
    named = set(re.findall(r"[\w./-]+\.md", json.dumps(settings["nav"])))
    pages = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    pages |= {f"docs/reference/{name}" for name in check.REFERENCE_PAGES}
    assert named <= pages
    assert pages - named == {page for page in pages if page.startswith("examples/")} - named


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


def test_the_admin_page_has_every_route_and_its_types(site: Path) -> None:
    assert reference.admin_routes() == set(reference.OPERATIONS)
    document = json.loads((site / "docs" / "reference" / "openapi.json").read_text())
    told = {(m.upper(), path) for path, ops in document["paths"].items() for m in ops}
    assert told == {(m, path.replace(":path", "")) for m, path in reference.OPERATIONS}
    named = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document))
    assert "Migration" in named
    assert set(named) <= set(document["components"]["schemas"])


def test_the_metrics_page_has_every_metric(site: Path) -> None:
    text = (site / "docs" / "reference" / "metrics.md").read_text()
    dashboard = ROOT / "docker" / "grafana" / "dashboards" / "banaserve.json"
    shown = set(re.findall(r"\bbanaserve_\w+", dashboard.read_text()))
    exported = set()
    for path in (ROOT / "banaserve").rglob("*.py"):
        made = r"(?:Counter|Gauge|Histogram|MetricFamily)\(\s*\"(banaserve_\w+)"
        exported |= set(re.findall(made, path.read_text()))
    assert len(exported) > 30
    for name in shown | exported:
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in text, name


def test_the_configuration_page_has_every_key(site: Path) -> None:
    text = (site / "docs" / "reference" / "configuration.md").read_text()
    for key in ("peer_key", "hold_safe", "max_outstanding", "breaker_pause_s", "opt-13b-a100"):
        assert f"`{key}`" in text


def test_attributes_of_a_docstring_are_read() -> None:
    words = reference.attribute_words(
        "One.\n\n    Attributes:\n        first: Of two\n            lines.\n        last: Short.\n"
    )
    assert words == {"first": "Of two lines.", "last": "Short."}
