"""Builds csrc/ into ``banaserve._native``; everything else is in pyproject.toml.

With ``BANASERVE_CUDA=1`` it also builds csrc/cuda/ into ``banaserve._native_cuda``, with nvcc from
``CUDA_HOME`` or PATH.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NANOBIND = Path(nanobind.source_dir()).parent
# setuptools refuses an absolute path below this folder, such as one in .venv.
NANOBIND_SOURCE = os.path.relpath(NANOBIND / "src" / "nb_combined.cpp")
NANOBIND_INCLUDES = [str(NANOBIND / "include"), str(NANOBIND / "ext" / "robin_map" / "include")]
MACROS = [("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None)]
# nanobind's stable ABI begins with 3.12: from there on one wheel is for all that have a GIL.
STABLE = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
if STABLE:
    MACROS.append(("Py_LIMITED_API", "0x030C0000"))
FLAGS = ["-std=c++20", "-O3", "-fvisibility=hidden", "-fno-strict-aliasing"]
# Each gets code of its own; the last one also code that newer GPUs translate.
GPUS = ("80", "90", "100")
# `cudart` for a runtime that is not CUDA's own: tests/nullgpu.
CUDART = os.environ.get("BANASERVE_CUDART", "cudart_static")

native = Extension(
    "banaserve._native",
    sources=[
        "csrc/block_copy.cpp",
        "csrc/xxh3.cpp",
        "csrc/prefix_tree.cpp",
        "csrc/prefix_tree_bindings.cpp",
        "csrc/latency_bindings.cpp",
        "csrc/bindings.cpp",
        NANOBIND_SOURCE,
    ],
    depends=[
        "csrc/block_copy.h",
        "csrc/xxh3.h",
        "csrc/prefix_tree.h",
        "csrc/prefix_tree_bindings.h",
        "csrc/latency_bindings.h",
    ],
    include_dirs=["csrc", *NANOBIND_INCLUDES],
    define_macros=MACROS,
    extra_compile_args=FLAGS,
    language="c++",
    py_limited_api=STABLE,
)


class BuildWithNvcc(build_ext):
    """Compiles what ends in .cu with nvcc, the rest as always."""

    def build_extension(self, ext):
        kernels = [source for source in ext.sources if source.endswith(".cu")]
        ext.sources = [source for source in ext.sources if source not in kernels]
        ext.extra_objects = [*ext.extra_objects, *map(self._compile, kernels)]
        super().build_extension(ext)

    def _compile(self, source):
        target = Path(self.build_temp) / Path(source).with_suffix(".o")
        target.parent.mkdir(parents=True, exist_ok=True)
        codes = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in GPUS]
        codes.append(f"-gencode=arch=compute_{GPUS[-1]},code=compute_{GPUS[-1]}")
        flags = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
        self.spawn([str(cuda_home() / "bin/nvcc"), *flags, *codes, "-c", source, "-o", str(target)])
        return str(target)


def cuda_home():
    """The folder of the CUDA toolkit."""
    if named := os.environ.get("CUDA_HOME"):
        return Path(named)
    nvcc = shutil.which("nvcc")
    usual = Path("/usr/local/cuda")
    if (usual / "bin/nvcc").exists():
        return usual
    if nvcc is None:
        sys.exit("BANASERVE_CUDA=1 needs nvcc: put it on PATH, or set CUDA_HOME")
    return Path(nvcc).resolve().parents[1]


def cuda_extension():
    """The runtime is linked in; the driver's functions are found at run time."""
    home = cuda_home()
    return Extension(
        "banaserve._native_cuda",
        sources=[
            "csrc/cuda/gpu_copy.cu",
            "csrc/cuda/gpu_slab.cpp",
            "csrc/cuda/bindings.cpp",
            NANOBIND_SOURCE,
        ],
        depends=["csrc/cuda/gpu_copy.h", "csrc/cuda/gpu_slab.h"],
        include_dirs=["csrc/cuda", str(home / "include"), *NANOBIND_INCLUDES],
        library_dirs=[str(home / "lib64")],
        libraries=[CUDART, "rt", "dl", "pthread"],
        define_macros=MACROS,
        extra_compile_args=FLAGS,
        language="c++",
        py_limited_api=STABLE,
    )


extensions = [native]
if os.environ.get("BANASERVE_CUDA", "") == "1":
    extensions.append(cuda_extension())

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildWithNvcc},
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if STABLE else {},
)
