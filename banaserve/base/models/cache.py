"""Model folders in the user's cache: written once and atomically, and checked on each use."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from banaserve.base.errors import UserError

MANIFEST = "manifest.json"


class _File(msgspec.Struct):
    bytes: int
    xxh3: str


class _Manifest(msgspec.Struct):
    files: dict[str, _File]


def cache_root(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder for all data that banaserve keeps between runs; it may not exist yet."""
    env = os.environ if env is None else env
    if own := env.get("BANASERVE_CACHE"):
        return Path(own).expanduser()
    base = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "banaserve"


def obtain(folder: Path, build: Callable[[Path], None], progress: Callable[[str], None]) -> bool:
    """Ensure that ``folder`` exists and is complete; return whether this call has built it.

    ``build`` fills a temporary folder beside ``folder``, which is then renamed atomically. If
    several processes ask at once, one builds and the others wait.

    Raises:
        UserError: The folder is damaged, or the cache cannot be written.
    """
    if folder.is_dir():
        verify(folder)
        return False
    try:
        with _locked(folder, progress):
            if folder.is_dir():
                verify(folder)
                return False
            _build(folder, build)
    except OSError as error:
        raise UserError(
            f"cannot write the model cache {folder.parent} ({error.strerror or error}): make room "
            "or give another folder in BANASERVE_CACHE"
        ) from error
    return True


def verify(folder: Path) -> None:
    """Check every file of ``folder`` against its manifest.

    Raises:
        UserError: A file is missing, unreadable, or differs from what was written.
    """
    remedy = f"remove it with `rm -r {shlex.quote(str(folder))}` and start again"
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Manifest)
        damaged = [name for name, known in manifest.files.items() if _file(folder / name) != known]
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"the model cache {folder} is damaged ({error}): {remedy}") from None
    if damaged:
        raise UserError(f"the model cache {folder} is damaged ({', '.join(damaged)}): {remedy}")


@contextmanager
def _locked(folder: Path, progress: Callable[[str], None]) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {folder.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}.tmp-"
    for stale in folder.parent.glob(f"{prefix}*"):  # left by a killed builder: we hold its lock
        shutil.rmtree(stale)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        build(temporary)
        files = {path.name: _file(path) for path in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_bytes(msgspec.json.encode(_Manifest(files)))
        temporary.chmod(0o755)
        for path in temporary.iterdir():
            _sync(path)
        temporary.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _file(path: Path) -> _File:
    digest = xxhash.xxh3_128()
    size_bytes = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size_bytes += len(block)
    return _File(bytes=size_bytes, xxh3=digest.hexdigest())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
