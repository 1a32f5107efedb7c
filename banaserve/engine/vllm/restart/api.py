"""Requests for rolling restarts and their answers: plain values, over HTTP as JSON."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Word = Annotated[str, msgspec.Meta(max_length=2048)]
_Words = Annotated[list[_Word], msgspec.Meta(max_length=64)]


class RestartRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replace all engines one after the other.

    Attributes:
        model: Name or folder of the weights to serve from then on; empty leaves them.
        vllm_options: Added to those that the engines have; of one given twice the last counts.
        timeout_s: How long an engine is kept for requests that no other one can take; 0 is the time
            that a request has at most.
    """

    model: _Word = ""
    vllm_options: _Words = []
    timeout_s: float = 0.0


class EngineRestart(msgspec.Struct):
    """One engine of a rolling restart.

    Attributes:
        state: waiting, draining, starting, done, failed, or taken back.
        num_left: Requests that are still on it while it drains.
        seconds: From the beginning of its turn to its end.
    """

    instance: str
    state: str = "waiting"
    num_left: int = 0
    seconds: float = 0.0


class RollingRestart(msgspec.Struct):
    """A rolling restart, under way or ended.

    Attributes:
        state: running, going back, done, failed or aborted.
        engines: In the order of their turns.
        model: That was named; empty where none was.
        is_changed: Engines are started with other options or weights than before.
        reason: Why it is not done.
    """

    id: str
    state: str
    engines: list[EngineRestart]
    model: str = ""
    vllm_options: list[str] = []
    is_changed: bool = False
    reason: str = ""
    seconds: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.state in ("running", "going back")

    def __str__(self) -> str:
        """How far it is, in words."""
        ended = sum(one.state == "done" for one in self.engines)
        under_way = [
            f"{one.instance} {one.state}" + (f", {one.num_left} left" if one.num_left else "")
            for one in self.engines
            if one.state in ("draining", "starting")
        ]
        return "; ".join([f"{ended} of {len(self.engines)} engines replaced", *under_way])
