"""Service state of an instance: whether it receives new requests, and if not, why.

Each state and the states that may follow it:

    serving    switching, draining, drained, leaving
    switching  serving                 the role changes, and the instance serves until then
    draining   serving                 the role changes once the instance has no requests left
    drained    serving, leaving        drained by an operator, until released
    leaving    serving, drained        being removed; a removal that is cancelled restores the state

The replacement of the engine by a rolling restart may fall into each of them and changes none: an
instance that was drained before is still drained afterwards.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

from banaserve.base.errors import MigrationError
from banaserve.base.types import Role


class _State(enum.Enum):
    SERVING = "serving"
    SWITCHING = "switching"
    DRAINING = "draining"
    DRAINED = "drained"
    LEAVING = "leaving"


class ServiceState:
    """Service state of one instance, changed only by these methods.

    Args:
        name: Id of the instance, for messages.

    Attributes:
        next_role: Role after the running role switch; None if the instance keeps its role.
        is_replaced: True while a rolling restart replaces the engine.
    """

    def __init__(self, name: str) -> None:
        self.next_role: Role | None = None
        self.is_replaced = False
        self._name = name
        self._now = self._before_leaving = _State.SERVING

    @property
    def takes_requests(self) -> bool:
        """True if the instance receives new requests while its engine is ready."""
        return self._now in (_State.SERVING, _State.SWITCHING) and not self.is_replaced

    @property
    def is_switching(self) -> bool:
        """True during a role switch, whether or not the instance drains."""
        return self._now in (_State.SWITCHING, _State.DRAINING)

    @property
    def is_drained(self) -> bool:
        """True if the instance receives no requests until it is released, or is being removed."""
        return self._now in (_State.DRAINED, _State.LEAVING)

    def check_switch(self) -> None:
        """Raise MigrationError with the reason if no role switch may begin."""
        if self.is_switching:
            raise MigrationError(f"instance {self._name} is switching its role already")
        if self.is_replaced:
            raise MigrationError(f"instance {self._name} is being restarted")
        if self.is_drained:
            raise MigrationError(
                f"instance {self._name} is drained: `banaserve drain {self._name} --undo` first"
            )

    def begin_switch(self, role: Role, *, drains: bool) -> None:
        """Begin a switch to ``role``; raise MigrationError if ``check_switch`` does."""
        self.check_switch()
        self._now = _State.DRAINING if drains else _State.SWITCHING
        self.next_role = role

    def end_switch(self) -> None:
        """End a role switch, done or not."""
        assert self.is_switching
        self._now, self.next_role = _State.SERVING, None

    def check_drain(self) -> None:
        """Raise MigrationError with the reason if the instance must not be drained."""
        if self.is_switching:
            raise MigrationError(f"instance {self._name} is switching its role")

    def drain(self) -> None:
        """Drain the instance; idempotent. Raises MigrationError if ``check_drain`` does."""
        self.check_drain()
        if not self.is_drained:
            self._now = _State.DRAINED

    def release(self) -> None:
        """Let a drained instance serve again.

        Raises:
            MigrationError: The instance was not drained, or is being removed.
        """
        if not self.is_drained:
            raise MigrationError(f"instance {self._name} was not drained: nothing to undo")
        if self._now is _State.LEAVING:
            raise MigrationError(f"instance {self._name} is being removed")
        self._now = _State.SERVING

    def leave(self) -> None:
        """Begin the removal of the instance; raise MigrationError if ``check_drain`` does."""
        self.check_drain()
        assert self._now is not _State.LEAVING
        self._before_leaving, self._now = self._now, _State.LEAVING

    def stay(self) -> None:
        """Cancel the removal of the instance: it serves again unless it was drained before."""
        assert self._now is _State.LEAVING
        self._now = self._before_leaving

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Send the instance no requests for the duration of the block: its engine is replaced."""
        assert not self.is_replaced
        self.is_replaced = True
        try:
            yield
        finally:
            self.is_replaced = False
