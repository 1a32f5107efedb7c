"""Where a guest waits for its host: at a path that an earlier start of it may have taken."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from banaserve.migration.rpc import messages
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.errors import PeerGoneError, TransferTimeoutError, TransportError
from waiting import eventually


class Start(threading.Thread):
    """A start of the guest, waiting."""

    def __init__(self, address: GuestAddress, timeout_s: float) -> None:
        super().__init__()
        self.channel: StreamChannel | None = None
        self.error: TransportError | None = None
        self._address, self._timeout_s = address, timeout_s
        self.start()

    def run(self) -> None:
        try:
            self.channel = self._address.accept(self._timeout_s)
        except TransportError as error:
            self.error = error


def until_it_listens(path: Path, before: object = None) -> object:
    """Wait for another socket at ``path`` than ``before``; returns what tells it from others."""
    found: list[object] = []

    def is_another() -> bool:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            # The number alone is given again to the next file.
            found[:] = [(status.st_ino, status.st_ctime_ns)]
            # A file that is removed just then is still found, with a new time of change.
            return status.st_nlink > 0 and found[0] != before
        return False

    eventually(is_another)
    return found[0]


class EarlierStart(Start):
    """A start that listens, and to which nobody comes; the time of its wait is over when told.

    Attributes:
        socket_file: Identity of the file of its socket, which differs from those of later starts.
    """

    def __init__(self, address: GuestAddress, patch: pytest.MonkeyPatch) -> None:
        self._is_over = is_over = threading.Event()

        class Listener(socket.socket):
            def accept(self) -> tuple[socket.socket, object]:
                assert is_over.wait(60.0)
                raise TimeoutError

        with patch.context() as patched:
            sockets = SimpleNamespace(**{**vars(socket), "socket": Listener})
            patched.setattr(messages, "socket", sockets)
            super().__init__(address, 60.0)
            self.socket_file = until_it_listens(Path(address.channel))

    def give_up(self) -> None:
        self._is_over.set()
        self.join()
        assert isinstance(self.error, TransferTimeoutError)


def until_connected(address: GuestAddress) -> StreamChannel:
    """A host's channel to the guest, which does not listen yet when its path appears."""
    made: list[StreamChannel] = []

    def is_there() -> bool:
        with contextlib.suppress(PeerGoneError):
            made.append(address.connect(10.0))
        return bool(made)

    eventually(is_there)
    return made[0]


@pytest.fixture
def address(tmp_path: Path) -> GuestAddress:
    return GuestAddress("g1", str(tmp_path / "g1.s"), "token", "shm", str(tmp_path), "00" * 32)


def test_a_host_comes_to_the_later_of_two_starts(
    address: GuestAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(address.channel)
    first = EarlierStart(address, monkeypatch)
    second = Start(address, 60.0)
    until_it_listens(path, first.socket_file)
    host = until_connected(address)
    second.join()
    assert (second.error, first.channel) == (None, None)
    assert second.channel is not None
    assert not path.exists()
    second.channel.close()
    host.close()
    first.give_up()


def test_one_that_nobody_comes_to_leaves_the_path_of_another(
    address: GuestAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(address.channel)
    first = EarlierStart(address, monkeypatch)
    second = Start(address, 60.0)
    later = until_it_listens(path, first.socket_file)
    first.give_up()
    assert until_it_listens(path) == later
    until_connected(address).close()
    second.join()
    assert second.error is None


def test_nothing_is_left_where_nobody_comes(address: GuestAddress) -> None:
    first = Start(address, 0.01)
    first.join()
    assert isinstance(first.error, TransferTimeoutError)
    assert not Path(address.channel).exists()
