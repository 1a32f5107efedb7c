"""Failures of pip, uv and builds, each in one line with its remedy."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

from installer import places
from installer.commands import Ended
from installer.console import Problem

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HASH = re.compile(
    r"[Hh]ash mismatch for `?([^`\s]+)|"
    r"DO NOT MATCH THE HASHES[\s\S]*?\n\s+(?:from .*/)?([A-Za-z][\w.+-]*)|"
    r"No matching hash|Can't verify hashes|have no hash|"
    r"computed an archive hash"
)
_DISK = re.compile(r"No space left on device|os error 28|Errno 28|Disk quota exceeded")
_FILE_SIZE = re.compile(r"File too large|os error 27|Errno 27|signal: 25|File size limit exceeded")
_KILLED = re.compile(r"Killed signal terminated program|MemoryError|Cannot allocate memory")
_PACKAGE = re.compile(r"`([\w.-]+)==[^`]*`|([A-Za-z0-9_]+)-\d[^\s/`']*\.whl")
_BROKEN_OFF = re.compile(
    r"IncompleteRead|incomplete-download|Download failed|ended prematurely|unexpected end of file|"
    r"error decoding response body|request or response body error|connection closed before|"
    r"unexpected EOF|Connection broken|Failed to (?:extract|download)|BadZipFile|"
    r"ChunkedEncodingError|not a valid (?:zip|wheel)"
)
_NETWORK = re.compile(
    r"dns error|failed to lookup address|Name or service not known|name resolution|"
    r"Connection refused|error trying to connect|tcp connect error|client error \(Connect\)|"
    r"timed out|Network is unreachable|No route to host|NewConnectionError|Max retries|"
    r"error sending request|ProxyError|SSLError|certificate|Failed to fetch|network-"
)
_NOT_OFFERED = re.compile(
    r"(?:No matching distribution found for|no versions? of) ([A-Za-z][\w.-]*(?:==[\w.+!-]+)?)|"
    r"Because ([A-Za-z][\w.-]*) was not found in the package registry"
)
_AGAIN = "then run it again: it goes on from there"


def problem(ended: Ended, what: str, needs_bytes: int = 0) -> Problem:
    """Why ``what`` failed, as far as the output of its command says."""
    output = re.sub(r"\s*\n\s*(?:│|\|)?\s*", "\n", _ESCAPES.sub("", ended.output))
    return Problem(f"{what} failed: {_line(output, ended, needs_bytes)} (more in {_log()})")


def no_room(needs_bytes: int = 0, folder: Path = places.VENV) -> str:
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    needs = f"{needs_bytes / 1e9:.1f} GB are needed, " if needs_bytes else ""
    return (
        f"no room left on the disk of {folder.parent}: {needs}{free / 1e9:.1f} GB are free; "
        f"make room, {_AGAIN}"
    )


def _line(output: str, ended: Ended, needs_bytes: int) -> str:
    if _DISK.search(output):
        return no_room(needs_bytes)
    if _FILE_SIZE.search(output) or ended.code in (-signal.SIGXFSZ, 128 + signal.SIGXFSZ):
        return f"files may not become large enough here: raise `ulimit -f`, {_AGAIN}"
    if ended.killed or _KILLED.search(output):
        return (
            "the system ended it, for lack of memory as a rule (1 GB is needed): end other "
            f"programs, {_AGAIN}"
        )
    if found := _HASH.search(output):
        name = next((group for group in found.groups() if group), "") or _package(output)
        return (
            f"{name or 'a package'} is not the one that the lock names (its hash differs): it was "
            "damaged on its way, or the index serves a build of its own: run it again, or name "
            "another index in pip's configuration (`make lock` takes the hashes of yours)"
        )
    if _BROKEN_OFF.search(output):
        name = _package(output) or "a package"
        return f"{name} did not arrive whole: look at the network, {_AGAIN}"
    if _NETWORK.search(output):
        return (
            f"the package index does not answer{_host(output)}: look at the network and at "
            f"`pip config list`, {_AGAIN}"
        )
    if found := _NOT_OFFERED.search(output):
        name = found[1] or found[2]
        return f"no index that pip knows offers {name}: name a complete one in pip's configuration"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?i)\w*error\b", line)]
    return (errors or lines or [f"exit status {ended.code}"])[-1]


def _package(output: str) -> str:
    """The package that was spoken of last."""
    names = [pinned or file for pinned, file in _PACKAGE.findall(output)]
    return names[-1].replace("_", "-") if names else ""


def _host(output: str) -> str:
    hosts = re.findall(r"https?://([^/\s`'\")]+)", output)
    return f" ({hosts[-1].rpartition('@')[2]})" if hosts else ""


def _log() -> str:
    return str(places.LOG.relative_to(places.ROOT))
