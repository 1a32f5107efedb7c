"""The lint of the repository: what it finds in files with one fault each, and how it tells it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from docs.repository import __main__ as command
from docs.repository import (
    containers,
    dashboard,
    documents,
    kubernetes,
    results,
    vllm_names,
    waits,
    words,
)
from docs.repository.dashboard import DASHBOARD, AskedSeries, panels
from docs.repository.findings import ROOT, Finding, at, too_few, tree_of

pytestmark = pytest.mark.room


def told(found: Iterable[Finding]) -> list[str]:
    return [one.words for one in found]


def test_findings_are_lines_with_their_place_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(words, "OPENINGS", {"Contract"})
    assert command.main(["words"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        path, number, _ = line.split(":", 2)
        assert (ROOT / path).is_file()
        assert number.isdigit()
    assert command.main(["packages"]) == 0
    assert capsys.readouterr().out == ""


def test_a_subject_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["wrods"]) == 2
    assert capsys.readouterr().err.startswith("there is no subject wrods: layout, words, ")


def test_a_finding_stands_at_the_first_line_with_its_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\ntwo\n")
    assert str(at(path, "two", "is wrong")) == f"{path}:2: is wrong"
    assert at(path, "three", "is missing").line == 1
    assert str(at(ROOT / "README.md", "# banaserve", "x")).startswith("README.md:")


def test_a_check_that_sees_too_little_says_so() -> None:
    (line,) = told(too_few(ROOT / "README.md", ["a"], 2, "options"))
    assert line == "only 1 options are recognised here: has the form changed?"
    assert told(too_few(ROOT / "README.md", "ab", 2, "options")) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"""Index of blocks."""', []),
        ("x = 1", ["the module has no docstring"]),
        ('"""How it is done."""', ["the docstring opens with How: give it a noun or a verb"]),
    ],
)
def test_docstrings_of_modules(text: str, said: list[str], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert told(words.docstring_findings(path, tree_of(path))) == said


DOCUMENTED = '''
def f():
    """Return it.

    Args:
        limit_s: {entry}
            For a second line, which is no entry: it may open as it likes.

    For a paragraph that follows.
    """
'''


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("Maximum time, in seconds.", []),
        ("``x`` of the request.", []),
        ("Of the request.", ["the entry opens with Of: give it a noun"]),
        ("``That`` it takes.", ["the entry opens with That: give it a noun"]),
        ("Time that nobody waits.", ["say it plainly: nobody"]),
    ],
)
def test_entries_of_docstrings(entry: str, said: list[str], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(DOCUMENTED.format(entry=entry))
    findings = list(words.wording_findings(path, tree_of(path)))
    assert [one.words for one in findings] == said
    assert {one.line for one in findings} <= {6}


# Uses of vLLM -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "text", "said"),
    [
        (vllm_names.use_findings, "self._x = 1\nself._x", []),
        (vllm_names.use_findings, "core.never = 1", ["core.never is set"]),
        (vllm_names.use_findings, "_wrap(Core, 'never', f)", ["_wrap(Core, 'never', f), and"]),
        (vllm_names.outside_findings, "import vllm_other\nx = 'vllm'", []),
        (vllm_names.outside_findings, "x = 'vllm.v1.core'", ["names vllm.v1.core, outside"]),
        (vllm_names.near_findings, "self._handle_shutdown", ["self._handle_shutdown is a private"]),
    ],
)
def test_uses_of_vllm(
    check: Callable[[Path], Iterable[Finding]], text: str, said: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "engine.py"
    path.write_text(text)
    found = told(check(path))
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True)), found


def test_replacing_a_part_of_vllm_outside_of_compat(tmp_path: Path) -> None:
    name = min(vllm_names.HOOKED)
    path = tmp_path / "engine.py"
    path.write_text(f"core.{name} = f\nself.{name} = f\n")
    assert [one.line for one in vllm_names.near_findings(path)] == [1]


# Documents ----------------------------------------------------------------------------------------


def test_names_of_commands_in_a_document(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`make tset` `make test`\n`banaserve serv`\n`make bench NAME=stal`\n"
        "`python -m benchmarks pacing`\n`banaserve bench servin`\n"
    )
    assert [(one.line, one.words) for one in documents.names_in(page)] == [
        (1, "there is no `make tset`"),
        (2, "there is no `banaserve serv`"),
        (3, "there is no `make bench NAME= stal`"),
        (5, "there is no `banaserve bench servin`"),
    ]


# Containers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"ports": ["0.0.0.0:8000:8000"]}, "a port that is not on loopback"),
        ({"read_only": False}, "is not read_only"),
        ({"cap_drop": []}, "keeps capabilities"),
        ({"environment": {"A_KEY": "secret"}}, "A_KEY must come from outside"),
        ({"volumes": ["./nowhere:/x"]}, "there is no ./nowhere"),
    ],
)
def test_services(changes: dict[str, Any], said: str) -> None:
    found = told(containers.service_findings("serve", containers.SERVICES["serve"] | changes))
    assert [said in line for line in found] == [True] * bool(said), found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", ""),
        ("USER 10001:10001", "USER root", "does not run as 10001:10001"),
        ("127.0.0.1:8000/", "127.0.0.1:8000/v1", "probes no path that is open"),
    ],
)
@pytest.mark.parametrize("image", containers.IMAGES, ids=lambda path: path.name)
def test_images(old: str, new: str, said: str, image: Path) -> None:
    text = image.read_text().replace(old, new) if old else image.read_text()
    found = told(containers.image_findings(image, text))
    assert [said in line for line in found] == [True] * bool(said), found


def test_pods() -> None:
    path, pod = next(kubernetes.pods())
    assert told(kubernetes.pod_findings(path, pod)) == []
    pod = copy.deepcopy(pod)
    pod["containers"][0]["volumeMounts"].append({"name": "nothing"})
    pod["containers"][0]["resources"]["limits"] = {}
    pod["containers"][0].setdefault("env", []).append({"name": "HF_TOKEN", "value": "x"})
    assert told(kubernetes.pod_findings(path, pod)) == [
        "mounts are not the volumes of the pod",
        "has no limit of memory",
        "a secret is no word of the manifest",
    ]


# The dashboard ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (AskedSeries("p", "banaserve_a_total", frozenset({"role"})), []),
        (AskedSeries("p", "banaserve_b", frozenset()), ["p: nothing exports banaserve_b"]),
        (AskedSeries("p", "banaserve_a_total", frozenset({"x"})), ["p: banaserve_a_total has no"]),
        (AskedSeries("p", "vllm:c", frozenset({"instance_id"})), []),
        (AskedSeries("p", "vllm:c", frozenset({"x"})), ["p: vllm:c has no label x"]),
        (AskedSeries("p", "vllm:d", frozenset()), ["p: nothing exports vllm:d"]),
    ],
)
def test_series(asked: AskedSeries, said: list[str]) -> None:
    found = told(dashboard.series_findings(asked, {"banaserve_a_total": {"role"}}, {"vllm:c"}))
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True)), found


@pytest.mark.parametrize(
    ("query", "said"),
    [("sum by (le (rate(x[5m]))", "unclosed"), ("sum(x_total)", "without rate or increase")],
)
def test_queries(query: str, said: str) -> None:
    panel = copy.deepcopy(panels()[0])
    assert told(dashboard.panel_findings(panel)) == []
    panel["targets"][0]["expr"] = query
    (line,) = told(dashboard.panel_findings(panel))
    assert said in line


def test_what_grafana_does_not_know_is_lost() -> None:
    broken = json.loads(json.dumps(DASHBOARD))
    broken["panels"][1]["gridPosition"] = broken["panels"][1].pop("gridPos")
    assert dashboard.lost(broken, dashboard.through_grafana(broken)) == ["panels.1.gridPosition"]


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("time.sleep(0.1)", True),
        ("await asyncio.sleep(delay_s)", True),
        ("await asyncio.sleep(0)", False),
        ("clock.sleep(3)", False),
    ],
)
def test_a_sleep_in_a_test_is_found(line: str, is_found: bool, tmp_path: Path) -> None:
    path = tmp_path / "test_a.py"
    path.write_text(f"async def test() -> None:\n    {line}\n")
    assert [one.line for one in waits.sleep_findings(path)] == [2] * is_found


@pytest.mark.parametrize(
    ("cells", "is_found"),
    [
        ("`tests/serving/live/test_survival.py:test_no_answer_notices_a_kill` | |", False),
        ("`tests/frontdoor/live/test_keys.py:test_keys_are_in_no_log` | |", False),
        ("`tests/serving/live/test_survival.py:test_of_no_such_name` | |", True),
        ("`tests/serving/live/test_survival.py:test_streams_with_an_adapter_go_on` | |", True),
        (
            "`tests/engine/test_budgets.py:test_of_no_such_name` | |",
            True,
        ),
        ("`tests/serving/live/test_survival.py` | |", True),
        ("`tests/route/test_balancer_tenants.py`, `tests/frontdoor/live/test_keys.py` |", False),
        ("`tests/migration/in_process/test_compiled.py` |", True),
    ],
)
def test_an_invariant_that_make_test_does_not_check_is_found(
    cells: str, is_found: bool, tmp_path: Path
) -> None:
    kept = "| a | b | `tests/route/test_balancer_tenants.py` |\n"
    path = tmp_path / "ARCHITECTURE.md"
    path.write_text(f"{kept * 20}| a | b | {cells}\n")
    assert [one.line for one in waits.invariant_findings(path)] == [21] * is_found


def test_a_readme_that_does_not_say_how_much_of_vllm_is_changed_is_found(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("1 of its functions, classes and values are wrapped or replaced")
    assert [one.path for one in vllm_names.count_findings(readme)] == [readme]
    readme.write_text((ROOT / "README.md").read_text())
    assert list(vllm_names.count_findings(readme)) == []


@pytest.mark.parametrize(
    ("old", "new", "stale", "words"),
    [
        ("0.76 s", "0.70 s", None, ["ttft_90_memory of prefix-ttft is 0.76 s"]),
        ("0.76 s", "10.76 s", None, ["ttft_90_memory of prefix-ttft is 0.76 s"]),
        ("| 55% |", "| 56% |", None, ["goodput of elastic-code is 55%"]),
        ("", "", ["front.json"], ["no code has changed"]),
        (results.STALE_WORDS, "", ["ui.json"], []),
        ("", "", ["migration.json"], []),
        (results.STALE_WORDS, "", ["migration.json"], ["the code of migration has changed"]),
    ],
)
def test_figures_of_the_readme_are_those_of_the_results_and_as_old(
    old: str, new: str, stale: list[str] | None, words: list[str]
) -> None:
    text = results.README.read_text()
    assert old in text
    changed = None if stale is None else [Path(name) for name in stale]
    found = told(results.quoted_findings(text.replace(old, new) if old else text, changed))
    assert len(found) == len(words)
    for finding, expected in zip(found, words, strict=True):
        assert expected in finding
