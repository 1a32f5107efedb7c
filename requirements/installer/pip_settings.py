"""Translation of pip's configuration into uv's variables: uv does not read pip's.

What a person has configured for pip (a mirror, a proxy, a certificate, a folder of wheels) holds
for uv too. A setting that uv has no word for is named, so that the caller can use pip instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

_SECTIONS = ("global", "install", ":env:")
"""In the order in which pip lets a later one win."""

_HARMLESS = {
    *("break-system-packages", "cache-dir", "config-file", "constraint"),
    "disable-pip-version-check",
    *("log", "no-cache-dir", "no-color", "no-compile", "no-input", "no-warn-script-location"),
    *("prefer-binary", "progress-bar", "quiet", "require-virtualenv", "resume-retries"),
    *("root-user-action", "upgrade-strategy", "verbose"),
}
"""They change nothing of what is installed from a lock.

A constraint neither: the lock names one version of each package, and uv takes no constraint but of
one version (``==``) beside hashes.
"""

_WORDS = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "index-url": "UV_DEFAULT_INDEX",
    "keyring-provider": "UV_KEYRING_PROVIDER",
    "no-index": "UV_NO_INDEX",
    "proxy": "ALL_PROXY",
    "retries": "UV_HTTP_RETRIES",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}


def read(listing: str) -> dict[str, str]:
    """Settings that hold for ``pip install``, from what ``pip config list`` prints."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        section, dot, name = key.partition(".")
        if separator and dot and section in found:
            found[section][name.replace("_", "-").lower()] = str(ast.literal_eval(value))
    merged: dict[str, str] = {}
    for section in _SECTIONS:
        merged |= found[section]
    return {name: value for name, value in merged.items() if value}


def unknown_to_uv(settings: Iterable[str]) -> list[str]:
    return sorted(set(settings) - _HARMLESS - set(_WORDS) - {"find-links"})


def uv_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """uv's variables that say what ``settings`` say to pip."""
    # As pip does: the best version of all indexes, not the first index that knows the name.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, value in settings.items():
        if name == "find-links":
            variables["UV_FIND_LINKS"] = ",".join(value.split())
        elif name in ("no-index",):
            if value.lower() in ("1", "true", "yes", "on"):
                variables["UV_NO_INDEX"] = "1"
        elif name in _WORDS:
            variables[_WORDS[name]] = " ".join(value.split())
    return variables
