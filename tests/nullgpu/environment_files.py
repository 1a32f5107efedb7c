"""Environment of the room ``nullgpu``: torch for CUDA, vLLM's CUDA build, and a GPU without one.

    python tests/nullgpu/environment_files.py      # fills .cache/nullgpu; `make test-nullgpu`

It has the versions of a GPU machine without a network, and beside them vLLM as ``make gpu-kit``
carries it. Nothing else that is tested needs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FOLDER = ROOT / ".cache" / "nullgpu"
PYTHON = FOLDER / "python" / "bin" / "python"
SITE = Path(os.environ.get("BANASERVE_NULL_GPU_SITE", FOLDER / "site"))
"""Folder with vLLM: the kit's, or one of another version that was filled by hand."""
STUBS = FOLDER / "stubs"
_FILLED = FOLDER / ".filled"
_CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
_LIBRARIES = {
    # Source, names that it has to define, library.
    "runtime.c": (r"(?:__)?cuda[A-Z]\w*", "libnullgpu.so"),
    "blas.c": (r"cublas\w*", "libnullgpu.so"),
    "driver.c": (r"cu[A-Z]\w*", "libcuda.so.1"),
    "kernels.c": (r"null_gpu_kernel_\w*", "libcuda.so.1"),
    "nvml.c": (r"nvml\w*", "libnvidia-ml.so.1"),
    "nccl.c": (r"nccl[A-Z]\w*", "libnccl.so.2"),
}


def missing() -> str:
    """Return why the environment cannot be used; empty if it can."""
    if not _FILLED.exists():
        return "no environment with torch for CUDA: `make test-nullgpu` makes it"
    return ""


def variables(num_gpus: int = 1) -> dict[str, str]:
    """Return the environment variables of a process that sees GPUs which compute nothing."""
    kept = ("HOME", "TMPDIR", "LANG", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": f"{STUBS / 'bin'}:{PYTHON.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{SITE}",
        "LD_PRELOAD": f"{STUBS / 'libnullgpu.so'}:{STUBS / 'libnccl.so.2'}",
        "LD_LIBRARY_PATH": str(STUBS),
        "TRITON_LIBCUDA_PATH": str(STUBS),
        "TRITON_CACHE_DIR": str(FOLDER / "triton"),
        "BANASERVE_NULL_GPU": str(num_gpus),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def fill() -> None:
    """Install the packages, unpack vLLM, compile banaserve's parts and the GPU."""
    if _FILLED.exists() and _FILLED.stat().st_mtime >= max(
        path.stat().st_mtime for path in (*HERE.rglob("*.[ch]"), HERE / "requirements.txt")
    ):
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not PYTHON.exists():
        _run(newer_python(), "-m", "venv", str(FOLDER / "python"))
    pip = (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-q")
    _run(*pip, "-r", str(HERE / "requirements.txt"))
    if not SITE.exists():
        shared = {**os.environ, "BANASERVE_CUDART": "cudart"}
        kit = (sys.executable, "-m", "benchmarks", "gpu-kit", "--experts", "--site", str(SITE))
        _run(*kit, variables=shared)
    for library in SITE.glob(".banaserve/_native*.so"):
        shutil.copy(library, ROOT / "banaserve")  # as the kit's are, where it is unpacked
    make_stubs(STUBS, _wanting())
    _FILLED.touch()


def newer_python() -> str:
    """Return the Python for which vLLM and banaserve are built."""
    from benchmarks.gpu.kit import newer_python as found

    return found()


def _wanting() -> list[Path]:
    """Return the libraries that call CUDA's functions."""
    torch = next((FOLDER / "python" / "lib").glob("python3*/site-packages/torch/lib"))
    return [*torch.glob("*.so"), *(SITE / "vllm").rglob("*.so"), *SITE.glob(".banaserve/*.so")]


def make_stubs(target: Path, wanting: Iterable[Path]) -> None:
    """Compile the libraries of a GPU that computes nothing, and its ``nvidia-smi``.

    Args:
        wanting: Libraries whose undefined functions must be there.
    """
    (target / "bin").mkdir(parents=True, exist_ok=True)
    undefined = set()
    for library in wanting:
        listed = _run("nm", "-D", "--undefined-only", str(library)).split()
        undefined |= {name.split("@")[0] for name in listed}
    declared = (_CUDA / "include" / "cuda.h").read_text()
    of_driver = set(re.findall(r"^CUresult CUDAAPI (cu\w+)", declared, re.MULTILINE))
    undefined |= of_driver | {f"{name}_v2" for name in of_driver} | {"cuGetProcAddress"}
    sources: dict[str, list[str]] = {}
    for name, (pattern, library) in _LIBRARIES.items():
        source = HERE / "null_gpu" / name
        written = set(re.findall(rf"\b({pattern})\(", source.read_text()))
        rest = sorted(one for one in undefined - written if re.fullmatch(pattern, one))
        others = target / f"rest_{name}"
        others.write_text("".join(f"int {one}(void) {{ return 0; }}\n" for one in rest))
        sources.setdefault(library, []).extend((str(source), str(others)))
    for library, files in sources.items():
        flags = (
            "-shared",
            "-fPIC",
            "-w",
            "-O1",
            f"-I{_CUDA / 'include'}",
            f"-Wl,-soname,{library}",
        )
        _run("gcc", *flags, "-o", str(target / library), *files, "-ldl", "-lpthread")
    command = target / "bin" / "nvidia-smi"
    command.write_text("#!/bin/sh\nfor _ in $(seq ${BANASERVE_NULL_GPU:-1}); do\n")
    with command.open("a") as script:
        script.write('echo "NVIDIA H100 80GB HBM3"\ndone\n')
    command.chmod(0o755)


def _run(*command: str, variables: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"nullgpu: {' '.join(command[:4])} ... failed with exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    fill()
