"""Folder of one run: its logs, its sockets, and a note about its server."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from banaserve.base.errors import UserError

_NOTE = "run.json"
_ADMIN = "admin.json"
_OFFER = "door"
_KEPT_RUNS = 10
_SOCKETS = "banaserve-"
_LOCK = "lock"
_NEW_S = 60.0
"""Grace period for a run that has created its folder and has not locked it yet, in seconds."""
_LOCK_S = 5.0
"""Time to wait for the lock of a killed run, which its engines hold until they end, in seconds."""
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folders of one run.

    Attributes:
        logs: Folder of logs, which stays after the run.
        sockets: Folder of sockets: a short path, mode 0700, removed after the run.
    """

    logs: Path
    sockets: Path

    @property
    def store_socket(self) -> Path:
        """Unix socket on which the run's store listens."""
        return self.sockets / "kv"

    @property
    def offer(self) -> Path:
        """Unix socket on which the server offers its listening socket for take-over."""
        return self.sockets / _OFFER


@contextlib.contextmanager
def open_run_dir(chosen: Path | None) -> Iterator[RunDir]:
    """Make the folders of a run, and remove its sockets and notes when the run ends.

    A folder that a killed run left behind is used again, and its logs are continued.

    Raises:
        UserError: Another run uses ``chosen``, or ``chosen`` cannot be written.
    """
    logs = chosen or _fresh()
    try:
        logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        note = _own(logs)
        remove_admin(logs)
        _sweep_killed_runs()
        sockets, lock = _locked_sockets()
        said = {"pid": os.getpid(), "started_at": time.time(), "sockets": str(sockets)}
        note.truncate(0)
        note.write(json.dumps(said))
        note.flush()
    except OSError as error:
        raise UserError(f"--run-dir {logs}: {error.strerror}") from error
    try:
        yield RunDir(logs, sockets)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
        lock.close()
        remove_admin(logs)
        (logs / _NOTE).unlink(missing_ok=True)
        note.close()


def tail_of(log: Path, max_bytes: int = _TAIL_BYTES) -> str:
    """Return the last complete lines of a log, at most ``max_bytes``.

    Raises:
        OSError: The log cannot be read.
    """
    with log.open("rb") as file:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, num_bytes - max_bytes))
        said = file.read(max_bytes)
    if num_bytes > max_bytes:
        _, _, said = said.partition(b"\n")
    return said.decode(errors="replace")


class AdminAccess(NamedTuple):
    """Access data of a running server's admin API.

    Attributes:
        key: Admin key of the run; empty if the user chose the key.
        certificate: File of the server's TLS certificate; empty without TLS.
    """

    url: str
    key: str
    certificate: str = ""


def write_admin(logs: Path, access: AdminAccess) -> None:
    """Write ``access`` to the admin note of a run's folder, readable only by its user."""
    descriptor = os.open(logs / _ADMIN, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as note:
        os.fchmod(note.fileno(), 0o600)
        json.dump(access._asdict(), note)


def admin_note(logs: Path) -> Path:
    """Return the path of the admin note in a run's folder."""
    return logs / _ADMIN


def remove_admin(logs: Path) -> None:
    """Remove the admin note: the server cannot be reached any more."""
    (logs / _ADMIN).unlink(missing_ok=True)


def find_admin(chosen: Path | None, port: int | None = None) -> AdminAccess:
    """Return the admin API of the server in ``chosen``, on ``port``, or of the only server.

    Raises:
        UserError: No server matches, or several do.
    """
    return find_admin_dir(chosen, port)[1]


def admin_on(port: int) -> AdminAccess | None:
    """Return the admin API of the server on ``port``; None if no run in a default folder has it."""
    everyone = (access for _, access in _running(None))
    return next((access for access in everyone if urlsplit(access.url).port == port), None)


def find_admin_dir(chosen: Path | None, port: int | None = None) -> tuple[Path, AdminAccess]:
    """Return the run folder and the admin API of a server, chosen as by ``find_admin``.

    Raises:
        UserError: No server matches, or several do.
    """
    everyone = dict(_running(chosen))
    ports = {urlsplit(access.url).port: folder for folder, access in everyone.items()}
    running = everyone if port is None else {ports[port]: ()} if port in ports else {}
    if not running:
        where = f" on port {port}" if port is not None else f" in {chosen}" if chosen else ""
        yours = "" if chosen else " of yours"
        others = f" (others: {_listed(ports)})" if ports else ""
        raise UserError(
            f"no banaserve{yours} serves{where}{others}: give the --run-dir that it was started "
            "with, or see --help"
        )
    if len(running) > 1:
        raise UserError(f"several run: choose one with --port ({_listed(ports)}) or --run-dir")
    (folder,) = running
    return folder, everyone[folder]


def _listed(ports: Iterable[int | None]) -> str:
    return ", ".join(str(port) for port in sorted(port for port in ports if port is not None))


def find_offer(chosen: Path | None, port: int) -> Path:
    """Return the take-over socket of the server in ``chosen``, or of the only server on ``port``.

    Raises:
        UserError: No server matches, or several do, or the note of its run cannot be read.
    """
    running = [
        folder for folder, access in _running(chosen) if chosen or urlsplit(access.url).port == port
    ]
    if not running:
        where = f"in {chosen}" if chosen else f"on port {port} with a folder of its own"
        raise UserError(
            f"--take-over: no banaserve of yours serves {where}: name its run directory "
            "(--take-over RUN_DIR), or leave the option out"
        )
    if len(running) > 1:
        names = ", ".join(str(folder) for folder in sorted(running))
        raise UserError(f"several run: choose one with --take-over RUN_DIR ({names})")
    try:
        return Path(json.loads((running[0] / _NOTE).read_text())["sockets"]) / _OFFER
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--take-over: cannot read {running[0] / _NOTE}: {error}") from error


def _running(chosen: Path | None) -> Iterator[tuple[Path, AdminAccess]]:
    """Yield folder and admin API of each reachable server: that in ``chosen``, or all of this user.

    Raises:
        UserError: An admin note cannot be read.
    """
    for folder in [chosen] if chosen else _runs().glob("2*"):
        try:
            said = (folder / _ADMIN).read_text()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"cannot read {folder / _ADMIN}: {error.strerror}") from error
        if not _is_running(folder):
            continue
        try:
            yield folder, AdminAccess(**json.loads(said))
        except (ValueError, TypeError) as error:
            raise UserError(f"cannot read {folder / _ADMIN}: {error}") from error


def _locked_sockets() -> tuple[Path, IO[str]]:
    """Return a new folder for sockets, and its lock.

    Another run may remove the folder before it is locked; then another folder is made.
    """
    while True:
        sockets = Path(tempfile.mkdtemp(prefix=_SOCKETS))
        with contextlib.suppress(FileNotFoundError):
            lock = (sockets / _LOCK).open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (sockets / _LOCK).exists():
                return sockets, lock
            lock.close()


def _sweep_killed_runs() -> None:
    """Remove the socket folders of this user's runs that were killed.

    A lock shows that a run is alive; a process id would not, since containers share temporary
    folders and have process ids of their own. Engines inherit the lock, so it is held until the
    last engine has ended.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_SOCKETS}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def state_folder() -> Path:
    """Return the folder of what banaserve keeps for this user, which may not exist yet."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "banaserve"


def _runs() -> Path:
    return state_folder() / "runs"


def _fresh() -> Path:
    runs = _runs()
    old = sorted(runs.glob("2*")) if runs.is_dir() else []
    for folder in old[: -_KEPT_RUNS or None]:
        if not (_is_new(folder) or _is_running(folder)):
            shutil.rmtree(folder, ignore_errors=True)
    # Process ids are not unique: containers that share a home folder have their own ids.
    own = f"{os.getpid()}-{secrets.token_hex(3)}"
    return runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{own}"


def _is_new(folder: Path) -> bool:
    """Return whether ``folder`` is so new that its run may not have locked it yet."""
    try:
        return time.time() - folder.stat().st_mtime < _NEW_S
    except OSError:
        return True


def _own(folder: Path) -> IO[str]:
    """Return the note of a folder, locked as long as it is open.

    Raises:
        UserError: Another run holds the lock.
    """
    until_s = time.monotonic() + _LOCK_S
    while True:
        note = (folder / _NOTE).open("a")
        try:
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(note.fileno()), (folder / _NOTE).stat()):
                return note
        except FileNotFoundError:
            pass  # the run that held the note has just ended
        except BlockingIOError:
            if time.monotonic() > until_s:
                note.close()
                raise UserError(
                    f"--run-dir {folder} is in use by another banaserve: choose another"
                ) from None
            time.sleep(0.05)
        note.close()


def _is_running(folder: Path) -> bool:
    """Return whether a process holds the lock of a run.

    A process id would not be reliable: in a container, the same id is another process.
    """
    try:
        with (folder / _NOTE).open() as note:
            fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
