"""Requests for rolling restarts, and their states; sent over HTTP as JSON."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Word = Annotated[str, msgspec.Meta(max_length=2048)]
_Words = Annotated[list[_Word], msgspec.Meta(max_length=64)]


class RestartRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to replace all engines, one at a time.

    Attributes:
        model: Name or folder of the new weights; empty keeps the present ones.
        vllm_options: vLLM's options to add to those of the engines; the last value of an option
            counts.
        timeout_s: Maximum time an engine is kept for requests that no other engine can take, in
            seconds; 0 for the time budget of a request.
    """

    model: _Word = ""
    vllm_options: _Words = []
    timeout_s: float = 0.0


class EngineRestart(msgspec.Struct):
    """State of an engine in a rolling restart.

    Attributes:
        state: State: waiting, draining, starting, done, failed, or taken back.
        num_left: Number of requests still on the engine while it drains.
        seconds: Duration of the engine's turn, in seconds.
    """

    instance: str
    state: str = "waiting"
    num_left: int = 0
    seconds: float = 0.0


class RollingRestart(msgspec.Struct):
    """State of a rolling restart, running or ended.

    Attributes:
        state: State: running, going back, done, failed or aborted.
        engines: Engines in the order of their turns.
        model: Name or folder of the new weights; empty if they stay the same.
        vllm_options: vLLM's options that the restart adds.
        is_changed: True if engines are started with new options or weights.
        reason: Reason why the restart is not done; empty if it is done or running.
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
        """Return the progress of the restart, for people."""
        ended = sum(one.state == "done" for one in self.engines)
        under_way = [
            f"{one.instance} {one.state}" + (f", {one.num_left} left" if one.num_left else "")
            for one in self.engines
            if one.state in ("draining", "starting")
        ]
        return "; ".join([f"{ended} of {len(self.engines)} engines replaced", *under_way])
