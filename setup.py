"""Builds csrc/ into ``banaserve._native``; everything else is in pyproject.toml."""

import os
from pathlib import Path

import nanobind
from setuptools import Extension, setup

NANOBIND = Path(nanobind.source_dir()).parent

native = Extension(
    "banaserve._native",
    sources=[
        "csrc/block_copy.cpp",
        "csrc/xxh3.cpp",
        "csrc/disk_queue.cpp",
        "csrc/disk_threads.cpp",
        "csrc/disk_uring.cpp",
        "csrc/disk_queue_bindings.cpp",
        "csrc/prefix_tree.cpp",
        "csrc/prefix_tree_bindings.cpp",
        "csrc/bindings.cpp",
        # setuptools refuses an absolute path below this folder, such as one in .venv.
        os.path.relpath(NANOBIND / "src" / "nb_combined.cpp"),
    ],
    depends=[
        "csrc/block_copy.h",
        "csrc/xxh3.h",
        "csrc/disk_queue.h",
        "csrc/disk_queue_bindings.h",
        "csrc/prefix_tree.h",
        "csrc/prefix_tree_bindings.h",
    ],
    include_dirs=[
        "csrc",
        str(NANOBIND / "include"),
        str(NANOBIND / "ext" / "robin_map" / "include"),
    ],
    define_macros=[("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None)],
    extra_compile_args=["-std=c++20", "-O3", "-fvisibility=hidden", "-fno-strict-aliasing"],
    language="c++",
)

setup(ext_modules=[native])
