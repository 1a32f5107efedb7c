"""Service states of an instance: a model of all of them, and the refusals in words."""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from banaserve.base.errors import MigrationError
from banaserve.base.types import Role
from banaserve.serving.instances.service_state import ServiceState


class AnyOrder(RuleBasedStateMachine):
    """Transitions in any order; what is refused changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ServiceState("p0")
        self.reason, self.was_drained = "", False

    def _may(self, is_allowed: bool, ask) -> bool:
        if is_allowed:
            ask()
            return True
        with pytest.raises(MigrationError, match=r"^instance p0 "):
            ask()
        return False

    @rule()
    def drain(self) -> None:
        if self._may(self.reason in ("", "drained", "leaving"), self.state.drain):
            self.reason = self.reason or "drained"

    @rule()
    def release(self) -> None:
        if self._may(self.reason == "drained", self.state.release):
            self.reason = ""

    @precondition(lambda self: self.reason != "leaving")
    @rule()
    def leave(self) -> None:
        if self._may(self.reason in ("", "drained"), self.state.leave):
            self.was_drained, self.reason = self.reason == "drained", "leaving"

    @precondition(lambda self: self.reason == "leaving")
    @rule()
    def stay(self) -> None:
        self.state.stay()
        self.reason = "drained" if self.was_drained else ""

    @rule()
    def switch(self) -> None:
        def ask() -> None:
            self.state.begin_switch(Role.DECODE, drains=True)

        if self._may(not self.reason, ask):
            self.reason = "switching"

    @precondition(lambda self: self.reason == "switching")
    @rule()
    def end_switch(self) -> None:
        self.state.end_switch()
        self.reason = ""

    @rule()
    def replace(self) -> None:
        drained = self.state.is_drained
        with self.state.replacing():
            assert self.state.is_replaced
            assert not self.state.takes_requests
            with pytest.raises(MigrationError):
                self.state.check_switch()
        assert self.state.is_drained == drained

    @invariant()
    def readers_agree(self) -> None:
        assert self.state.takes_requests is (not self.reason)
        assert self.state.is_drained is (self.reason in ("drained", "leaving"))
        assert self.state.is_switching is (self.reason == "switching")
        assert (self.state.next_role is None) is (self.reason != "switching")


TestAnyOrder = AnyOrder.TestCase


def test_it_serves_until_its_role_has_changed_if_it_does_not_drain() -> None:
    state = ServiceState("p0")
    state.begin_switch(Role.DECODE, drains=False)
    assert (state.takes_requests, state.next_role) == (True, Role.DECODE)


def test_refusals_in_words() -> None:
    state = ServiceState("p0")
    with pytest.raises(MigrationError, match=r"^instance p0 was not drained: nothing to undo$"):
        state.release()
    state.leave()
    with pytest.raises(MigrationError, match=r"^instance p0 is being removed$"):
        state.release()
    with pytest.raises(MigrationError, match=r"is drained: `banaserve drain p0 --undo` first$"):
        state.check_switch()
