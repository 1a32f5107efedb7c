"""Files of the kit for a GPU machine: their list, their version, and how they are unpacked.

Imports the standard library alone: on that machine nothing else is certain to be installed.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KIT = ".kit"
"""Folder of the kit, from the top of the checkout."""
_LIST = "kit.json"
_CHUNK_BYTES = 1 << 20


class KitError(Exception):
    """The kit cannot be used here; the message is one line with the remedy."""


@dataclass(frozen=True)
class Kit:
    """Contents of a kit.

    Attributes:
        version: Hash of what it was built from, see ``version_of``.
        python: Version of Python that its compiled parts run on, such as ``3.12``.
        vllm: Version of vLLM.
        gpus: Compute capabilities times ten that its kernels have code for.
        pieces: SHA-256 of each piece of the archive, by file name, in their order.
    """

    version: str
    python: str
    vllm: str
    gpus: tuple[int, ...]
    pieces: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write the list of contents into the kit's folder."""
        (folder / _LIST).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Kit:
        """Read the list of contents of the kit in ``folder``.

        Raises:
            KitError: There is no list, or it is damaged.
        """
        try:
            said = json.loads((folder / _LIST).read_text())
            return cls(**{**said, "gpus": tuple(said["gpus"])})
        except FileNotFoundError:
            raise KitError(f"{folder} holds no {_LIST}: run `make gpu-kit` again") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KitError(f"{folder / _LIST}: {error}: run `make gpu-kit` again") from None


def version_of(root: Path) -> str:
    """Return a hash of the files of a checkout that a kit's contents come from."""
    named = [root / "requirements" / one for one in ("cuda.lock", "serving.lock", "gpu-kit.txt")]
    sources = [path for path in (root / "csrc").rglob("*") if path.suffix in (".cpp", ".h", ".cu")]
    found = hashlib.sha256()
    for path in sorted((*named, root / "setup.py", *sources)):
        found.update(f"{path.relative_to(root)}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def unpack(folder: Path, root: Path) -> Path:
    """Unpack the kit in ``folder``, unless it is unpacked already, and return the new folder.

    Compiled parts of banaserve are copied into the checkout.

    Args:
        root: Top of the checkout.

    Raises:
        KitError: The kit belongs to another version of the checkout or of Python, or is damaged.
    """
    kit = Kit.read(folder)
    if kit.version != version_of(root):
        raise KitError(
            f"the kit in {folder} was built from other requirements or other C++ sources than this "
            "checkout has: run `make gpu-kit` again"
        )
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if ours != kit.python:
        raise KitError(
            f"the kit needs Python {kit.python} and {sys.executable} is {ours}: name another one "
            "with torch in GPU_PYTHON"
        )
    site = root / "build" / f"gpu-site-{kit.version[:12]}"
    if not site.exists():
        _check_pieces(folder, kit)
        begun = site.with_suffix(".part")
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True)
        with tarfile.open(fileobj=_Pieces(folder, kit), mode="r|xz") as archive:
            # Python 3.11.2 has no filters; the pieces are those that their digests name.
            filtered: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(begun, **filtered)
        begun.rename(site)
    for library in (site / ".banaserve").glob("_native*.so"):
        shutil.copy(library, root / "banaserve")
    return site


def _check_pieces(folder: Path, kit: Kit) -> None:
    for name, wanted in kit.pieces.items():
        path = folder / name
        if not path.exists():
            raise KitError(f"the kit in {folder} lacks its piece {name}: bring it along too")
        with path.open("rb") as piece:
            if hashlib.file_digest(piece, "sha256").hexdigest() != wanted:
                raise KitError(f"{path} is damaged: bring it along again, or run `make gpu-kit`")


class _Pieces(io.RawIOBase):
    """Archive that lies in several files, read from its beginning to its end."""

    def __init__(self, folder: Path, kit: Kit) -> None:
        self._files = [(folder / name).open("rb") for name in kit.pieces]

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = size if size >= 0 else _CHUNK_BYTES
        while self._files:
            if found := self._files[0].read(size):
                return found
            self._files.pop(0).close()
        return b""
