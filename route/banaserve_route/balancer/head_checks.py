"""Checks of a request's head, before its body is read."""

from __future__ import annotations

from banaserve_route.balancer.auth import (
    OPEN_PATHS,
    PEER_FIELD,
    PEER_PATHS,
    Keys,
    check_key,
    check_path,
    check_peer,
)
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.page.files import STATUS_PATH, balancer_files


class HeadChecks:
    """Checks of a request's head that need the settings alone.

    Attributes:
        own_paths: Paths that the balancer itself answers to everyone, or to holders of the admin
            key.
    """

    def __init__(self, settings: BalancerSettings) -> None:
        page = {STATUS_PATH, *balancer_files()} if settings.admin_key else frozenset()
        self.own_paths = OPEN_PATHS | page
        self._keys = Keys([*settings.api_keys, *(one.key for one in settings.tenants)])
        self._admin_keys = Keys([settings.admin_key] if settings.admin_key else [])
        self._peer_keys = Keys([settings.peer_key] if settings.peer_key else [])

    def is_own(self, message: ClientRequest) -> bool:
        """Return whether ``message`` asks for one of ``own_paths``.

        Raises:
            RequestRefusedError: The path needs the admin key, or there is a body and no key.
        """
        if message.path not in self.own_paths:
            return False
        if message.path == STATUS_PATH:
            check_key(self._admin_keys, message)
        elif message.has_body:
            self.check_key(message)
        return True

    def check_key(self, message: ClientRequest) -> bool:
        """Check that ``message`` shows a client's key, or that of a peer if it comes from one.

        Returns:
            True if the client is known: its key is right, or none is needed. False for a preflight,
            which needs no key.

        Raises:
            RequestRefusedError: It shows no such key.
        """
        if PEER_FIELD in message.seen:
            # Another balancer has checked the client's key.
            check_peer(self._peer_keys, message)
        elif message.is_preflight and self._keys:
            return False
        else:
            check_key(self._keys, message)
        return True

    def is_passed(self, message: ClientRequest) -> bool:
        """Return whether ``message`` is for a replica, and not a peer's question to the balancer.

        Raises:
            RequestRefusedError: Requests for its path are not passed on.
        """
        if PEER_FIELD in message.seen and message.path in PEER_PATHS:
            return False
        check_path(message.path)
        return True
