"""Rooms of the tests, and which of them a change concerns.

``tests/rooms.toml`` is the map. From the command line::

    room_map.py ROOM        folder of a room
    room_map.py --changed   folders of the rooms that have changed since all tests were last green
    room_map.py --record [ROOM ...]    note that their tests are green as everything is now

What was green is kept as a hash of the files that concern a room, not as a commit: CI may have
another history. Of Python files only the statements count: what reads docstrings is in `make test`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
MAP = TESTS / "rooms.toml"
LAST_GREEN = TESTS / "last_green"
"""File with a line for each room, its name and hash when all of its tests were last green."""
_APART = tuple(f"tests/support/{name}" for name in ("room_map.py", "room_times.py"))
"""Files that choose tests and count their time: no test's result comes from them."""


class Room(NamedTuple):
    """A folder of tests and the sources that its tests are for.

    Attributes:
        name: Name of the folder below ``tests/``.
        sources: Patterns of paths from the top of the repository; a change in one of them makes CI
            run all tests of the room.
        spine_s: Most core-seconds of the room's tests in ``make test``.
        all_s: Most core-seconds of all of the room's tests that are not ``long``.
    """

    name: str
    sources: tuple[str, ...]
    spine_s: float
    all_s: float

    def has(self, path: str) -> bool:
        """Whether a change of ``path``, from the top of the repository, concerns the room."""
        if path in _APART:
            return False
        patterns = (*self.sources, f"tests/{self.name}")
        return any(PurePosixPath(path).match(one) or path.startswith(f"{one}/") for one in patterns)


class RoomError(Exception):
    """The map, or a name that was to be found in it, is wrong; one line for people."""


@functools.cache
def rooms() -> dict[str, Room]:
    """All rooms of the map, by name.

    Raises:
        RoomError: A room has no folder, a folder no room, or the file has another form.
    """
    try:
        read = tomllib.loads(MAP.read_text())
        shared = tuple(read.pop("shared"))
        found = {
            name: Room(name, (*entry["sources"], *shared), *map(float, entry["core_seconds"]))
            for name, entry in read.items()
        }
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise RoomError(f"{MAP.name} cannot be read: {error!r}") from None
    folders = {one.relative_to(TESTS).parts[0] for one in TESTS.glob("*/**/test_*.py")}
    if wrong := sorted(folders ^ found.keys()):
        raise RoomError(f"{MAP.name} and the folders of tests differ: {', '.join(wrong)}")
    return found


def room_of(path: Path) -> str:
    """Name of the room in which a test file lies."""
    return path.relative_to(TESTS).parts[0]


def folder_of(name: str) -> Path:
    """Folder of the room of this name.

    Raises:
        RoomError: There is no such room.
    """
    known = rooms()
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RoomError(f"there is no room {name}{hint} (rooms: {', '.join(sorted(known))})")
    return TESTS / name


def concerned(paths: Iterable[str]) -> list[Room]:
    """Rooms that changes of these paths concern, those with the least to run first."""
    changed = list(paths)
    found = [one for one in rooms().values() if any(one.has(path) for path in changed)]
    return sorted(found, key=lambda one: one.all_s)


def _git(*words: str, given: str = "") -> str:
    """Run git; returns what it printed, each line end as it was."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=TESTS.parent,
            input=given.encode(),
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise RoomError(f"there is no git to tell what has changed: {error}") from None
    if done.returncode:
        said = done.stderr.decode().strip().splitlines() or ["it said nothing"]
        raise RoomError(f"git cannot tell what has changed: {said[-1]}: run `make test-all`")
    return done.stdout.decode()


def fingerprints(commit: str = "HEAD") -> dict[str, str]:
    """A hash for each room of the files that concern it at ``commit``.

    Raises:
        RoomError: This is not a checkout of git, or it has no such commit.
    """
    blobs: dict[str, str] = {}
    for line in _git("ls-tree", "-r", "-z", commit).split("\0"):
        if line:
            described, _, path = line.partition("\t")
            blobs[path] = described.split()[2]
    concerning = {name: list(filter(room.has, sorted(blobs))) for name, room in rooms().items()}
    modules = sorted({path for some in concerning.values() for path in some if path[-3:] == ".py"})
    texts = _texts([blobs[path] for path in modules])
    blobs.update((path, _statements(text)) for path, text in zip(modules, texts, strict=True))
    return {name: _hashed(paths, blobs) for name, paths in concerning.items()}


def _hashed(paths: Iterable[str], blobs: Mapping[str, str]) -> str:
    lines = (f"{path} {blobs[path]}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _texts(blobs: Sequence[str]) -> Iterator[str]:
    """The contents of objects of git, in their order."""
    asked = "".join(f"{blob}\n" for blob in blobs)
    told = io.BytesIO(_git("cat-file", "--batch", given=asked).encode())
    for _ in blobs:
        num_bytes = int(told.readline().split()[2])
        yield told.read(num_bytes).decode()
        told.readline()


def _statements(source: str) -> str:
    """A hash of a module without comments, docstrings and the layout of its lines."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return hashlib.sha256(source.encode()).hexdigest()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _is_words(one)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_words(node: ast.stmt) -> bool:
    """Whether a statement is a text alone, as docstrings of modules, functions and names are."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _last_green() -> dict[str, str]:
    lines = LAST_GREEN.read_text().splitlines() if LAST_GREEN.exists() else []
    return {name: found for name, _, found in (line.partition(" ") for line in lines)}


def _uncommitted() -> list[str]:
    """Paths that are not as they were committed, but for the record's own."""
    _git("rev-parse", "HEAD")  # says best that this is no checkout
    paths = _git("diff", "--name-only", "--no-renames", "HEAD", "--").splitlines()
    paths += _git("ls-files", "--others", "--exclude-standard").splitlines()
    return [path for path in paths if path != f"{TESTS.name}/{LAST_GREEN.name}"]


def changed_since_green() -> list[Room]:
    """Rooms that have changed since their tests were last green; all where that is not known.

    Raises:
        RoomError: This is not a checkout of git.
    """
    green = _last_green()
    names = {one.name for one in concerned(_uncommitted())}
    names |= {name for name, found in fingerprints().items() if green.get(name) != found}
    return sorted((rooms()[name] for name in names), key=lambda one: one.all_s)


def record_green(names: Iterable[str]) -> str:
    """Write the hashes of rooms to ``LAST_GREEN``; returns what there is to say.

    Raises:
        RoomError: This is not a checkout of git.
    """
    if _uncommitted():
        return "not recorded as green: the tree has changes that are not committed"
    now, green = fingerprints(), _last_green()
    green.update((name, now[name]) for name in names)
    lines = (f"{name} {green[name]}\n" for name in sorted(green.keys() & now.keys()))
    LAST_GREEN.write_text("".join(lines))
    return f"recorded as green in tests/{LAST_GREEN.name}: commit it"


def main(words: list[str]) -> int:
    try:
        match words:
            case ["--changed"]:
                print(*(TESTS / one.name for one in changed_since_green()))
            case ["--record", *names]:
                print(record_green([folder_of(name).name for name in names] or rooms()))
            case [name] if not name.startswith("-"):
                print(folder_of(name))
            case _:
                raise RoomError("usage: room_map.py ROOM | --changed | --record [ROOM ...]")
    except RoomError as error:
        print(f"rooms: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
