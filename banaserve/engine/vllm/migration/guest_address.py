"""Where a guest answers, and what its host has to know to talk to it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from banaserve.transport.connect import connect, over_unix
from banaserve.transport.errors import PeerGoneError, TransferTimeoutError
from banaserve.transport.interface import Channel, Transport
from banaserve.transport.options import TransportOptions
from banaserve.transport.registry import create


class GuestAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Made by the coordinator; given to the guest when it starts and to its host.

    Attributes:
        guest_id: Of the guest: one for each host and target, or for each move.
        channel: Path of the Unix socket at which the guest answers.
        token: Secret that the host shows.
        transport: Name of the transport for KV.
        folder: Private folder of the run.
        secret: Of the transports of the run, in hex, at least 32 digits.
        listen_host: Address for transports that use TCP.
        target: Id of the instance beside which the guest runs, on the same devices.
    """

    guest_id: str
    channel: str
    token: str
    transport: str
    folder: str
    secret: str
    listen_host: str = "127.0.0.1"
    target: str = ""

    def make_transport(self) -> Transport:
        """For either side.

        Raises:
            UserError: There is no such transport here.
        """
        return create(self.transport, self._options)

    def accept(self, timeout_s: float) -> Channel:
        """The guest's side: wait for the host.

        Raises:
            TransportError: Nobody comes, or somebody who may not.
        """
        path = Path(self.channel)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(self.channel)
            listener.listen(1)
            listener.settimeout(timeout_s)
            sock, _ = listener.accept()
        except TimeoutError:
            raise TransferTimeoutError(f"no host has come to {path.name}") from None
        except OSError as error:
            raise PeerGoneError(f"cannot listen at {path}: {error.strerror}") from error
        finally:
            listener.close()
            path.unlink(missing_ok=True)
        return over_unix(sock)

    def connect(self, timeout_s: float) -> Channel:
        """The host's side.

        Raises:
            TransportError: The guest does not answer.
        """
        return connect(f"unix:{self.channel}", self._options, timeout_s)

    @property
    def _options(self) -> TransportOptions:
        return TransportOptions(
            folder=self.folder, secret=bytes.fromhex(self.secret), host=self.listen_host
        )
