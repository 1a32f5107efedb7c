"""Print pip's configuration as variables of uv, which does not read it itself."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys

_VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "keyring-provider": "UV_KEYRING_PROVIDER",
    "no-index": "UV_NO_INDEX",
    "proxy": "ALL_PROXY",
    "retries": "UV_HTTP_RETRIES",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""By settings of pip. Other settings do not change what is installed from a lock with hashes."""


def main() -> None:
    """Print a shell's exports; what a person has set for uv itself is left alone."""
    # `.venv` may be without pip as yet.
    for python in (sys.executable, os.path.realpath(sys.executable)):
        command = [python, "-m", "pip", "config", "list"]
        if listing := subprocess.run(command, capture_output=True, text=True).stdout:
            break
    for name, value in variables(listing).items():
        if name not in os.environ:
            print(f"export {name}={shlex.quote(value)}")


def variables(listing: str) -> dict[str, str]:
    """Return uv's variables for pip's settings, as ``pip config list`` prints them."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for section, name, value in re.findall(r"(?m)^([^.=]+)\.([^=]+)=(.*)$", listing):
        if section in sections:
            words = str(ast.literal_eval(value)).split()
            sections[section][name.replace("_", "-").lower()] = " ".join(words)
    # As in pip, the environment wins, and the best version of all indexes is taken.
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, value in (sections["global"] | sections["install"] | sections[":env:"]).items():
        if name == "no-index":
            value = "1" if value.lower() in ("1", "true", "yes", "on") else ""
        elif name == "find-links":
            value = value.replace(" ", ",")
        if name in _VARIABLES and value:
            found[_VARIABLES[name]] = value
    return found


if __name__ == "__main__":
    main()
