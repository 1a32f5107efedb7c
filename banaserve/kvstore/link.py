"""A client's channel to the store, kept open over the store's absences."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from banaserve.errors import FingerprintError, ProtocolError, StoreUnavailableError
from banaserve.kvstore import wire
from banaserve.kvstore.channel import R, StoreChannel
from banaserve.kvstore.fingerprint import Fingerprint

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0


class StoreLink:
    """Calls the store, or says at once that it is away. Not thread-safe.

    Args:
        socket_path: Where the store listens.
        fingerprint: What a block of this client means.
        client_name: Names the instance.
        timeout_s: Longest wait for an answer.
        reconnect: Whether to try again once the store has gone.
        on_open: Called after each greeting with the welcome and the file descriptors of pool and
            board, which are closed afterwards.
        on_lost: Called when the store has gone.
    """

    def __init__(
        self,
        socket_path: Path,
        fingerprint: Fingerprint,
        client_name: str,
        *,
        timeout_s: float,
        reconnect: bool,
        on_open: Callable[[wire.Welcome, int, int], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.generation = 0
        self._socket_path = socket_path
        self._fingerprint = fingerprint
        self._client_name = client_name
        self._timeout_s = timeout_s
        self._reconnect = reconnect
        self._on_open = on_open
        self._on_lost = on_lost
        self._channel: StoreChannel | None = None
        self._pid = os.getpid()
        # What could not be told yet: if it were forgotten, slots would stay in use for nothing.
        self._untold: list[wire.ReleaseLeases | wire.Abandon] = []
        self._retry_at_s = 0.0
        self._retry_pause_s = FIRST_RETRY_S
        self._was_greeted = False
        self._is_away = False
        self._is_closed = False

    def open(self) -> None:
        """Connect now, unless connected.

        Raises:
            StoreUnavailableError: Nobody answers, or this link is closed.
            FingerprintError: The store refuses to share blocks with this client.
        """
        if self._is_closed:
            raise StoreUnavailableError("this client is closed")
        self._forget_parents_channel()
        if self._channel is not None:
            return
        channel = StoreChannel(
            self._socket_path, self._client_name, self._fingerprint, self._timeout_s, self._on_late
        )
        try:
            self._on_open(channel.welcome, *channel.fds)
        except (OSError, ValueError) as error:
            channel.close()
            raise StoreUnavailableError(f"cannot map the store's pool: {error}") from error
        channel.close_fds()
        self._channel = channel
        self.generation = channel.welcome.generation
        self._untold = [said for said in self._untold if said.generation == self.generation]
        self._was_greeted = True
        self._note_present()

    def call(self, build: Callable[[int], wire.Request], reply_type: type[R]) -> R | None:
        """The reply to the request that ``build`` makes from its seq; None while away.

        Raises:
            FingerprintError: At the first connection only.
        """
        # The second attempt is for a store that was restarted since the last call.
        for _ in range(2):
            channel = self._present_channel()
            if channel is None:
                return None
            try:
                self._tell_untold(channel)
                seq = channel.next_seq()
                return channel.call(seq, build(seq), reply_type)
            except TimeoutError:
                self._note_away("it does not answer in time")
                return None
            except (OSError, ProtocolError) as error:
                self._lose(error)
        self._note_away("it closes its connections")
        return None

    def tell(self, message: wire.ReleaseLeases | wire.Abandon) -> None:
        """Send now where the store is present, else before the next call."""
        if message.generation != self.generation:
            return
        self._untold.append(message)
        if self._channel is None or self._channel.is_lagging:
            return
        try:
            self._tell_untold(self._channel)
        except (OSError, ProtocolError) as error:
            self._lose(error)

    def is_lost(self) -> bool:
        """Whether the store is known to be gone, without asking it."""
        return self._channel is None or not self._channel.is_open()

    def refresh(self) -> None:
        """Find out whether the store is still the one that was connected; reconnect if not.

        Raises:
            FingerprintError: At the first connection only.
        """
        self.note_if_lost()
        self._present_channel()

    def note_if_lost(self) -> None:
        """Let go of a store that has closed the connection; reconnects to none."""
        if self._channel is not None and not self._channel.is_open():
            self._lose(ConnectionResetError("the store closed the connection"))

    def close(self) -> None:
        """Say goodbye and disconnect for good."""
        self._forget_parents_channel()
        self._is_closed = True
        if self._channel is None:
            return
        try:
            self._tell_untold(self._channel)
            self._channel.send(wire.Goodbye())
        except (OSError, ProtocolError) as error:
            log.warning("left the KV cache store without goodbye: %s", error)
        self._channel.close()
        self._channel = None

    def _present_channel(self) -> StoreChannel | None:
        self._forget_parents_channel()
        channel = self._channel
        if channel is not None and not channel.is_lagging:
            return channel
        if self._is_closed or time.monotonic() < self._retry_at_s:
            return None
        return self._reopened() if channel is None else self._caught_up(channel)

    def _reopened(self) -> StoreChannel | None:
        if self._was_greeted and not self._reconnect:
            return None
        try:
            self.open()
        except StoreUnavailableError as error:
            self._note_away(str(error))
        except FingerprintError as error:
            if not self._was_greeted:
                raise
            self._note_away(str(error))
        return self._channel

    def _caught_up(self, channel: StoreChannel) -> StoreChannel | None:
        try:
            channel.catch_up()
        except (OSError, ProtocolError) as error:
            self._lose(error)
            return self._reopened()
        if channel.is_lagging:
            self._note_away("it does not answer in time")
            return None
        self._note_present()
        return channel

    def _on_late(self, reply: wire.Reply) -> None:
        """Give back what a reply grants that nobody waits for any more."""
        if not isinstance(reply, wire.SlotsGranted):
            return
        if reply.lease_id is not None:
            self._untold.append(wire.ReleaseLeases(self.generation, reply.lease_id))
        serials = [pair[1] for pair in reply.reserved if pair is not None]
        if serials:
            self._untold.append(wire.Abandon(self.generation, serials, None))

    def _tell_untold(self, channel: StoreChannel) -> None:
        while self._untold:
            channel.send(self._untold[0])
            del self._untold[0]

    def _lose(self, error: Exception) -> None:
        log.info("lost the KV cache store: %s", error)
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._on_lost()

    def _forget_parents_channel(self) -> None:
        """After a fork the inherited connection is the parent's: two must not use it."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._untold = []
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _note_away(self, reason: str) -> None:
        if not self._is_away:
            log.warning("going on without the KV cache store: %s", reason)
            self._is_away = True
            self._retry_pause_s = FIRST_RETRY_S
        self._retry_at_s = time.monotonic() + self._retry_pause_s
        self._retry_pause_s = min(2 * self._retry_pause_s, LONGEST_RETRY_S)

    def _note_present(self) -> None:
        if self._is_away:
            log.warning("the KV cache store is back")
        self._is_away = False
        self._retry_at_s = 0.0
