"""How a host gets to know a guest, in the background."""

from __future__ import annotations

import logging
import threading
import time

from banaserve.engine.vllm.migration import messages
from banaserve.engine.vllm.migration.guest_address import GuestAddress
from banaserve.engine.vllm.migration.guest_link import GuestLink
from banaserve.engine.vllm.migration.host import MigrationHost
from banaserve.errors import BanaServeError, MigrationError
from banaserve.transport.errors import PeerGoneError
from banaserve.transport.interface import Channel

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 120.0
"""A guest that is not forked imports vLLM first."""


class Attaching:
    """One attempt; its outcome stands in ``host.links`` or in ``host.attaching``."""

    def __init__(self, host: MigrationHost, address: GuestAddress) -> None:
        self._host = host
        self._address = address

    @classmethod
    def begin(cls, host: MigrationHost, address: GuestAddress) -> None:
        """Connect in a thread.

        Raises:
            MigrationError: A guest of this name is there already.
        """
        known = host.links.get(address.guest_id)
        if (known is not None and known.lost is None) or (
            host.attaching.get(address.guest_id, {}).get("state") == "connecting"
        ):
            raise MigrationError(f"guest {address.guest_id} is attached already")
        host.attaching[address.guest_id] = {"state": "connecting", "reason": ""}
        thread = threading.Thread(
            target=cls(host, address)._run, name=f"attach-{address.guest_id}", daemon=True
        )
        thread.start()

    def _run(self) -> None:
        guest_id = self._address.guest_id
        try:
            link = self._connect()
        except (BanaServeError, OSError) as failed:
            self._failed(str(failed))
            return
        except Exception as failed:
            logger.exception("guest %s", guest_id)
            self._failed(f"{type(failed).__name__}: {failed}")
            return
        self._host.links[guest_id] = link
        self._host.attaching.pop(guest_id, None)

    def _failed(self, reason: str) -> None:
        logger.error("guest %s: %s", self._address.guest_id, reason)
        self._host.attaching[self._address.guest_id] = {"state": "lost", "reason": reason}

    def _connect(self) -> GuestLink:
        address, host = self._address, self._host
        channel = self._open_channel(time.monotonic() + ATTACH_TIMEOUT_S)
        link = GuestLink(
            address.guest_id,
            channel,
            address.make_transport(),
            lambda: host.epoch,
            host.settings.stall_s,
        )
        hello = messages.Hello(address.token, f"host of {address.guest_id}")
        ready = link.ask(hello, messages.Ready, ATTACH_TIMEOUT_S)
        link.watch(ready.pid)
        return link

    def _open_channel(self, deadline_s: float) -> Channel:
        while True:
            try:
                return self._address.connect(deadline_s - time.monotonic())
            except PeerGoneError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
