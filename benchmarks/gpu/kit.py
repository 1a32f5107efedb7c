"""Kit for a GPU machine that reaches no package index: ``make gpu-kit``.

``python -m benchmarks gpu-kit``. The kit holds what such a machine lacks beside torch, Triton and
transformers: vLLM without the GPU code of other architectures, the packages of
``requirements/gpu-kit.txt``, banaserve's compiled parts, and the packaged model's tokenizer. It is
one archive in pieces that ``make gpu-report`` unpacks there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from rich.progress import Progress, TaskID

from banaserve.base import models
from banaserve.base.arguments import Parser, positive
from banaserve.base.errors import UserError
from benchmarks.gpu.fatbins import keep_architectures
from benchmarks.gpu.kit_files import KIT, Kit, version_of
from benchmarks.location import ROOT

_PYTHON = "3.12"
_TRAVELS_BYTES = 64 << 20
"""Size up to which the kit and the files of the checkout travel to a GPU machine in one go."""
_PIECE_BYTES = 60 << 20
_LOCKS = ("cuda.lock", "serving.lock", "dev.lock")
_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 26, 24, 17, 5)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
_LIBRARIES = (
    "_C_stable_libtorch.abi3.so",
    "vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "spinloop.abi3.so",
    "fs_io_C.abi3.so",
    "cumem_allocator.abi3.so",
)
"""Libraries of vLLM that a dense model on Hopper loads."""
_EXPERTS_LIBRARY = "_moe_C_stable_libtorch.abi3.so"
_NOT_NEEDED = re.compile(
    r"\.(so|h|hpp|cuh|cu)$|/vllm-rs$|/third_party/(deep_gemm|fmha_sm100|tml_fa4)/"
)
"""Files of vLLM that are left out unless they are among the libraries."""
_TESTS = re.compile(r"/tests?/")
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m benchmarks gpu-kit", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / KIT, help="folder of the kit")
    add("--gpu", type=positive, action="append", help="architecture, repeat; 90 without it")
    add("--experts", action="store_true", help="with the kernels of models with experts")
    add("--site", type=Path, help="fill this folder, and write no archive")
    add("--piece-mib", type=positive, default=_PIECE_BYTES >> 20, help="of each piece, at most 60")
    given = parser.parse_args(list(argv))
    if given.piece_mib << 20 > _PIECE_BYTES:
        raise UserError(f"--piece-mib {given.piece_mib}: at most {_PIECE_BYTES >> 20}")
    began_s = time.monotonic()
    gpus = given.gpu or [90]
    with Progress(transient=True) as progress:
        task = progress.add_task("packages are fetched", total=5)
        site = given.site or ROOT / "build" / "gpu-kit" / "site"
        vllm = _fill(site, gpus, given.experts, progress, task)
        if given.site:
            return 0
        pieces = _pack(site, given.out, given.piece_mib << 20, progress, task)
    kit = Kit(version_of(ROOT), _PYTHON, vllm, tuple(gpus), pieces)
    kit.write(given.out)
    kit_bytes = sum(path.stat().st_size for path in given.out.iterdir())
    tree_bytes = _tree_bytes()
    print(f"{given.out}: vLLM {kit.vllm} in {len(kit.pieces)} pieces, {_mb(kit_bytes)}", end=" ")
    print(f"after {time.monotonic() - began_s:.0f} s; with the checkout ", end="")
    print(f"{_mb(kit_bytes + tree_bytes)} of {_mb(_TRAVELS_BYTES)}")
    if kit_bytes + tree_bytes > _TRAVELS_BYTES:
        print("too large to travel at once: bring its pieces along one after the other")
    return 0


def _fill(site: Path, gpus: Sequence[int], experts: bool, progress: Progress, task: TaskID) -> str:
    """Make the folder that is packed; return the version of vLLM."""
    work = ROOT / "build" / "gpu-kit"
    wheels = work / "wheels"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    names = [*_names(), "vllm"]
    _download(locked(names, [ROOT / "requirements" / lock for lock in _LOCKS]), wheels)
    progress.update(task, advance=1, description="packages are unpacked")
    libraries = {*_LIBRARIES, _EXPERTS_LIBRARY} if experts else set(_LIBRARIES)
    vllm = ""
    for wheel in sorted(wheels.glob("*.whl")):
        if wheel.name.startswith("vllm-"):
            vllm = wheel.name.split("-")[1]
            _unpack_vllm(wheel, site, libraries, gpus)
        else:
            _unpack(wheel, site)
    shutil.rmtree(site / "mistral_common" / "data", ignore_errors=True)  # tokenizers of its models
    progress.update(task, advance=1, description="banaserve's C++ and CUDA are compiled")
    _compile(work, site / ".banaserve")
    progress.update(task, advance=1, description="the tokenizer is copied")
    _copy_model(site / ".banaserve" / "cache")
    progress.update(task, advance=1, description="the archive is written")
    return vllm


def _names() -> list[str]:
    lines = (ROOT / "requirements" / "gpu-kit.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def locked(names: Collection[str], locks: Sequence[Path]) -> str:
    """Return the requirements of the packages with their hashes, as the first lock has them.

    Raises:
        UserError: A package is in none of the locks.
    """
    found: dict[str, str] = {}
    for lock in locks:
        for entry in re.findall(r"^\S(?:.*\\\n)*.*", lock.read_text(), re.MULTILINE):
            name = re.split(r"[\s=\[]", entry, maxsplit=1)[0]
            if name in names and name not in found:
                found[name] = re.sub(r" ;[^\\\n]*", "", entry)
    if missing := sorted(set(names) - set(found)):
        raise UserError(f"requirements/gpu-kit.txt: no lock names {', '.join(missing)}")
    return "\n".join(found.values()) + "\n"


def _download(requirements: str, wheels: Path) -> None:
    """Fetch the wheels for the GPU machine's Python; remove those of an earlier kit."""
    wheels.mkdir(parents=True, exist_ok=True)
    listed = wheels.parent / "requirements.txt"
    listed.write_text(requirements)
    pinned = dict(re.findall(r"^([^\s=]+)==([^\s;]+)", requirements, re.MULTILINE))
    for wheel in wheels.glob("*.whl"):
        name, version = wheel.name.split("-")[:2]
        if pinned.get(name.replace("_", "-").replace(".", "-").lower()) != version:
            wheel.unlink()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp", "--require-hashes"]
    command += [f"--python-version={_PYTHON}", *(f"--platform={one}" for one in _PLATFORMS)]
    _run([*command, "-d", str(wheels), "-r", str(listed)], "pip cannot fetch a package")


def _unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            if path.parts[0].endswith(".data"):  # of another scheme of installation
                if path.parts[1] not in ("purelib", "platlib"):
                    continue
                path = PurePosixPath(*path.parts[2:])
            if not name.endswith("/") and not _TESTS.search(name):
                target = site / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def _unpack_vllm(wheel: Path, site: Path, libraries: Collection[str], gpus: Sequence[int]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.removeprefix("vllm/") in libraries:
                content = keep_architectures(archive.read(name), gpus)
            elif name.endswith("/") or ".data/" in name or _NOT_NEEDED.search(name):
                continue
            else:
                content = archive.read(name)
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def _compile(work: Path, target: Path) -> None:
    """Compile banaserve's parts for the stable ABI of the GPU machine's Python, with nvcc."""
    sources, environment = work / "native", work / "python"
    shutil.rmtree(sources, ignore_errors=True)
    # A copy: compiled parts for another Python stay as they are in the checkout.
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "banaserve/__init__.py"):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, sources / name)
    shutil.copytree(ROOT / "csrc", sources / "csrc")
    if not (environment / "bin" / "python").exists():
        _run([newer_python(), "-m", "venv", str(environment)], "no environment can be made")
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    lock = str(ROOT / "requirements" / "build.lock")
    _run([*pip, "--require-hashes", "-r", lock], "pip cannot install what builds")
    variables = {**os.environ, "BANASERVE_CUDA": "1"}
    command = [python, "setup.py", "-q", "build_ext", "--inplace"]
    _run(command, "the compiled parts cannot be built", sources, variables)
    target.mkdir(parents=True, exist_ok=True)
    for library in (sources / "banaserve").glob("_native*.so"):
        _run(["strip", "--strip-unneeded", "-o", str(target / library.name), str(library)], "strip")


def newer_python() -> str:
    """Return a Python from which the stable ABI of nanobind can be built.

    Raises:
        UserError: There is none.
    """
    places = sorted(Path.home().glob(f".pyenv/versions/{_PYTHON}*/bin/python"))
    for candidate in (f"python{_PYTHON}", "python3.13", *map(str, places)):
        try:
            if not subprocess.run([candidate, "-c", "0"], capture_output=True).returncode:
                return candidate
        except OSError:
            continue
    raise UserError(f"the kit's compiled parts need Python {_PYTHON}: put it on PATH")


def _copy_model(cache: Path) -> None:
    """Copy the packaged model without its weights, as banaserve keeps it in its cache."""
    source = Path(models.resolve(models.PACKAGED, None, lambda line: None).path_or_id)
    target = cache / "models" / source.name
    target.mkdir(parents=True)
    for name in _MODEL_FILES:
        shutil.copy(source / name, target)
    listed = json.loads((source / "manifest.json").read_text())
    listed["files"] = {n: one for n, one in listed["files"].items() if n in _MODEL_FILES}
    (target / "manifest.json").write_text(json.dumps(listed))


def _pack(
    site: Path, out: Path, piece_bytes: int, progress: Progress, task: TaskID
) -> dict[str, str]:
    """Write the archive in pieces; return their hashes by name."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("site.tar.xz.*"):
        old.unlink()
    paths = sorted(path for path in site.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in paths)
    done = 0

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal done
        done += info.size
        part = f"{100 * done // total} %"
        progress.update(task, description=f"the archive is written: {part}")
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    pieces = _PieceWriter(out / "site.tar.xz", piece_bytes)
    with tarfile.open(fileobj=pieces, mode="w|xz") as archive:
        for path in paths:
            archive.add(path, path.relative_to(site), recursive=False, filter=plain)
    pieces.close()
    return pieces.hashes


class _PieceWriter(io.RawIOBase):
    """File that is cut into pieces of at most some bytes.

    Attributes:
        hashes: SHA-256 of each complete piece, by file name.
    """

    def __init__(self, path: Path, piece_bytes: int) -> None:
        self.hashes: dict[str, str] = {}
        self._path = path
        self._piece_bytes = piece_bytes
        self._piece = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = bytes(data)
        self._piece += written
        while len(self._piece) >= self._piece_bytes:
            self._end_piece()
        return len(written)

    def close(self) -> None:
        if self._piece:
            self._end_piece()
        super().close()

    def _end_piece(self) -> None:
        content = bytes(self._piece[: self._piece_bytes])
        del self._piece[: self._piece_bytes]
        name = f"{self._path.name}.{len(self.hashes):02}"
        self._path.with_name(name).write_bytes(content)
        self.hashes[name] = hashlib.sha256(content).hexdigest()


def _tree_bytes() -> int:
    """Return the size of the checkout's files that travel: those that git does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True).stdout.decode().split("\0")
    paths = [ROOT / name for name in names if name]
    return sum(path.lstat().st_size for path in paths if path.is_file())


def _run(
    command: Sequence[str], failed: str, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> None:
    """Run a command to its end.

    Args:
        failed: Beginning of the error's message.

    Raises:
        UserError: The command fails; the message has its last line of output.
    """
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"{failed}: {command[0]}: {error.strerror}") from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise UserError(f"{failed}: {last[0]}")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
