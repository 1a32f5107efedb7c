"""A result is stale where statements that it measures have changed; asked of a made-up history."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.measured_code import MEASURED, WRITTEN_FROM_RESULTS, History
from benchmarks.results_page import ROOT

SOURCE = '"""Steps."""\n\n\ndef step_s() -> float:\n    """Seconds."""\n    return 1.0\n'


class Repository:
    """A repository with one file of code, one of documents and one result."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.result = top / "results" / "a.json"
        self.git("init", "-q")
        self.write("sim/steps.py", SOURCE)
        self.write("sim/README.md", "# Steps\n")
        self.write("results/a.json", "{}\n")
        self.first = self.commit()

    def git(self, *arguments: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=no"]
        command = ["git", "-C", str(self.top), *names, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def write(self, name: str, text: str) -> None:
        path = self.top / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def commit(self) -> str:
        self.git("add", ".")
        self.git("commit", "-q", "-m", "x")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    return Repository(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "is_stale"),
    [
        ("sim/steps.py", SOURCE.replace("1.0", "2.0"), True),
        ("sim/new.py", "x = 1\n", True),
        ("sim/rates.toml", "a = 1\n", True),
        ("sim/rates.toml", "# a = 1\n", False),
        ("sim/steps.py", SOURCE.replace("Seconds.", "Time, in s.") + "# the end\n", False),
        ("sim/steps.py", SOURCE.replace("return 1.0", "return (\n        1.0\n    )"), False),
        ("sim/README.md", "# Other words\n", False),
        ("ui/page.py", "x = 1\n", False),
    ],
)
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_change_of_what_is_measured(
    name: str, text: str, is_stale: bool, is_committed: bool, repository: Repository
) -> None:
    repository.write(name, text)
    if is_committed:
        repository.commit()
    else:
        repository.git("add", ".")
    assert History(repository.top).has_changed(repository.first, ["sim"]) is is_stale


@pytest.mark.parametrize(
    ("name", "number", "is_stale"),
    [("MODEL", "1.0", False), ("MODEL", "2.0", True), ("OTHER", "1.0", True)],
)
def test_a_file_that_has_moved_counts_by_its_statements_and_by_the_names_of_its_imports(
    name: str, number: str, is_stale: bool, repository: Repository
) -> None:
    repository.write("sim/uses.py", SOURCE + "from sim.names import MODEL\n")
    before = repository.commit()
    (repository.top / "sim" / "uses.py").unlink()
    moved = SOURCE.replace("1.0", number) + f"from model.names import {name}\n"
    repository.write("model/uses.py", moved)
    repository.git("add", ".")
    assert History(repository.top).has_changed(before, ["model"]) is is_stale


@pytest.mark.parametrize(("text", "is_stale"), [("a = 1\n", False), ("a = 2\n", True)])
def test_a_data_file_that_has_moved_counts_by_its_text(
    text: str, is_stale: bool, repository: Repository
) -> None:
    repository.write("sim/rates.toml", "a = 1\n")
    before = repository.commit()
    (repository.top / "sim" / "rates.toml").unlink()
    repository.write("model/rates.toml", text)
    repository.git("add", ".")
    assert History(repository.top).has_changed(before, ["model"]) is is_stale


def test_a_file_that_is_gone_is_a_change(repository: Repository) -> None:
    (repository.top / "sim" / "steps.py").unlink()
    assert History(repository.top).has_changed(repository.first, ["sim"])


def test_a_file_that_is_written_from_a_result_does_not_make_it_stale(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.measured_code.WRITTEN_FROM_RESULTS", {"sim/rates.toml"})
    repository.write("sim/rates.toml", "a = 1\n")
    repository.git("add", ".")
    assert not History(repository.top).has_changed(repository.first, ["sim"])
    repository.write("sim/others.toml", "a = 1\n")
    repository.git("add", ".")
    assert History(repository.top).has_changed(repository.first, ["sim"])


def test_a_folder_that_has_moved_leaves_a_docstring_behind_and_no_change(
    repository: Repository,
) -> None:
    repository.write("sim/__init__.py", '"""Simulator: begin at ``steps``."""\n')
    before = repository.commit()
    (repository.top / "sim" / "__init__.py").unlink()
    assert not History(repository.top).has_changed(before, ["sim"])


def test_of_a_commit_that_is_not_in_the_history_the_files_own_counts(
    repository: Repository,
) -> None:
    history = History(repository.top)
    repository.write("sim/steps.py", SOURCE.replace("1.0", "2.0"))
    left_out = repository.commit()
    repository.git("reset", "-q", "--hard", repository.first)
    repository.write("results/a.json", f'{{"commit":"{left_out}"}}\n')
    measured = repository.commit()
    repository.write("results/a.json", f'{{\n "commit": "{left_out}"\n}}\n')
    laid_out_anew = repository.commit()
    assert history.measured_at(repository.first, repository.result) == repository.first
    assert history.measured_at(left_out, repository.result) == measured
    assert history.measured_at(None, repository.result) == laid_out_anew
    assert history.measured_at(None, repository.top / "results" / "b.json") is None


def test_a_history_that_lacks_commits_is_not_asked(repository: Repository, tmp_path: Path) -> None:
    repository.write("sim/steps.py", "")
    repository.commit()
    assert History(repository.top).is_whole()
    clone = tmp_path / "clone"
    repository.git("clone", "-q", "--depth", "1", f"file://{repository.top}", str(clone))
    assert not History(clone).is_whole()
    assert not History(Path("/")).is_whole()


def test_what_is_measured_is_there() -> None:
    for paths in (*MEASURED.values(), WRITTEN_FROM_RESULTS):
        for path in paths:
            assert (ROOT / path).exists(), path
