"""The map of rooms: which rooms a change concerns, and one line for each wrong input."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import room_map

SCRIPT = Path(room_map.__file__)
MAP = """
shared = ["tests/support"]
kvstore = { core_seconds = [10, 20], sources = ["banaserve/kvstore", "csrc"] }
serving = { core_seconds = [10, 90], sources = ["banaserve/engine/*.py"] }
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with two rooms whose tests were green at its first commit."""
    for name in ("tests/kvstore/test_a.py", "tests/serving/live/test_b.py", "csrc/a.cpp"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / "tests" / "support").mkdir()
    shutil.copy(SCRIPT, tmp_path / "tests" / "support")
    (tmp_path / "tests" / "rooms.toml").write_text(MAP)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    assert "commit it" in run(tmp_path, "--record").stdout
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *words: str) -> None:
    names = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "tests" / "support" / SCRIPT.name
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, env=env
    )


def changed(folder: Path) -> list[str]:
    done = run(folder, "--changed")
    assert done.returncode == 0, done.stderr
    return [Path(one).name for one in done.stdout.split()]


def test_nothing_has_changed_since_the_record_but_the_record(checkout: Path) -> None:
    assert changed(checkout) == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("csrc/a.cpp", {"kernels", "kvstore"}),
        ("banaserve/kvstore/tiers/ssd/new.py", {"kvstore", "simulation"}),
        ("banaserve/frontdoor/page/new.py", {"page"}),
        ("tests/route/test_new.py", {"route"}),
        ("tests/support/new.py", set(room_map.rooms())),
        ("README.md", set()),
        ("tests/support/room_map.py", set()),
    ],
)
def test_a_change_concerns_the_rooms_of_its_sources(path: str, expected: set[str]) -> None:
    assert {one.name for one in room_map.concerned([path])} == expected


def test_changes_count_committed_or_not(checkout: Path) -> None:
    (checkout / "csrc" / "a.cpp").write_text("changed")
    assert changed(checkout) == ["kvstore"]
    commit(checkout)
    new = checkout / "banaserve" / "engine" / "new.py"
    new.parent.mkdir(parents=True)
    new.touch()
    assert changed(checkout) == ["kvstore", "serving"]


def test_other_words_change_nothing_and_other_statements_do(checkout: Path) -> None:
    module = checkout / "banaserve" / "engine" / "a.py"
    module.parent.mkdir(parents=True)
    module.write_text('"""One."""\n\n\ndef f():\n    """Two."""\n    return "three"\n')
    commit(checkout)
    run(checkout, "--record")
    commit(checkout)
    module.write_text('"""Éins."""\n\n\ndef f():  # and why\n    return "three"\n')
    commit(checkout)
    assert changed(checkout) == []
    module.write_text('"""One."""\n\n\ndef f():\n    """Two."""\n    return "four"\n')
    commit(checkout)
    assert changed(checkout) == ["serving"]
    module.write_text("def f(:\n")
    commit(checkout)
    assert changed(checkout) == ["serving"]


def test_another_history_changes_nothing(checkout: Path) -> None:
    """CI may get all commits as one."""
    shutil.rmtree(checkout / ".git")
    git(checkout, "init", "--quiet")
    commit(checkout)
    assert changed(checkout) == []


def test_what_went_away_counts(checkout: Path) -> None:
    (checkout / "csrc" / "a.cpp").unlink()
    assert changed(checkout) == ["kvstore"]
    commit(checkout)
    assert changed(checkout) == ["kvstore"]


@pytest.mark.parametrize("text", ["", "0" * 40, "kvstore\nserving\n"])
def test_all_rooms_count_as_changed_where_the_record_does_not_name_them(
    text: str, checkout: Path
) -> None:
    (checkout / "tests" / "last_green").write_text(text)
    assert changed(checkout) == ["kvstore", "serving"]


def test_all_rooms_count_as_changed_without_a_record(checkout: Path) -> None:
    (checkout / "tests" / "last_green").unlink()
    assert changed(checkout) == ["kvstore", "serving"]


def test_a_changed_tree_is_not_recorded(checkout: Path) -> None:
    before = (checkout / "tests" / "last_green").read_text()
    (checkout / "csrc" / "a.cpp").write_text("changed")
    assert "not recorded" in run(checkout, "--record").stdout
    assert (checkout / "tests" / "last_green").read_text() == before


def test_rooms_are_recorded_one_by_one(checkout: Path) -> None:
    for name in ("csrc/a.cpp", "tests/serving/live/test_b.py"):
        (checkout / name).write_text("changed")
    commit(checkout)
    assert changed(checkout) == ["kvstore", "serving"]
    run(checkout, "--record", "serving")
    assert changed(checkout) == ["kvstore"]
    assert "commit it" in run(checkout, "--record", "kvstore").stdout
    assert changed(checkout) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kvstor"], "there is no room kvstor; did you mean kvstore? (rooms: kvstore, serving)"),
        (["--chnged"], "usage: "),
        ([], "usage: "),
    ],
)
def test_a_wrong_word_is_one_line(words: list[str], said: str, checkout: Path) -> None:
    done = run(checkout, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rooms: {said}")
    assert done.stderr.count("\n") == 1


def test_a_tree_without_git_is_one_line(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    done = run(checkout, "--changed")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "not a git repository" in done.stderr
    assert "run `make test-all`" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shared = [", "rooms.toml cannot be read"),
        ('shared = []\nkvstore = { sources = ["a"] }', "rooms.toml cannot be read"),
        (MAP.replace("serving", "server"), "differ: server, serving"),
    ],
)
def test_a_wrong_map_is_one_line(text: str, said: str, checkout: Path) -> None:
    (checkout / "tests" / "rooms.toml").write_text(text)
    done = run(checkout, "kvstore")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
