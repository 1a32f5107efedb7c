"""Seeded faults for byte streams and regions: the wrappers misbehave, the code under them does not.

Loaded by path, since the tests' folders are no packages.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from banaserve.transport.errors import PeerGoneError, TransferTimeoutError

FAULTS = ("drop", "duplicate", "delay", "corrupt", "stall", "kill")


@dataclass
class Faults:
    """Which operations go wrong.

    Attributes:
        kind: One of ``FAULTS``.
        seed: Of what is random: which byte is corrupted, and which operations where ``chance`` < 1.
        at: Numbers of the operations that may go wrong, from 0; None for all.
        chance: Of each of them to do so.
        delay_s: Length of a delay.
        pid: Whom ``kill`` kills.
        done: Numbers of the operations that went wrong.
    """

    kind: str
    seed: int = 0
    at: Sequence[int] | None = None
    chance: float = 1.0
    delay_s: float = 0.05
    pid: int = 0
    done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.kind in FAULTS, self.kind
        self.random = random.Random(self.seed)
        self._count = 0

    def strikes(self) -> bool:
        """Whether the next operation goes wrong."""
        number, self._count = self._count, self._count + 1
        may = self.at is None or number in self.at
        if may and self.random.random() < self.chance:
            self.done.append(number)
            return True
        return False

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class FaultyStream:
    """A ``SocketStream`` whose writes, each of which is one frame, go wrong."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, parts: Sequence[memoryview | bytes], deadline: float) -> None:
        frame = b"".join(parts)
        if not self._faults.strikes():
            self._inner.write([frame], deadline)
            return
        match self._faults.kind:
            case "duplicate":
                self._inner.write([frame, frame], deadline)
            case "delay":
                Event().wait(self._faults.delay_s)
                self._inner.write([frame], deadline)
            case "corrupt":
                self._inner.write([corrupted(frame, self._faults.random)], deadline)
            case "stall":
                self._inner.write([frame[: len(frame) // 2]], deadline)
            case "kill":
                self._faults.kill()
                self._inner.write([frame], deadline)


class FaultyChannel:
    """A ``StreamChannel`` whose messages go wrong before they become frames.

    ``duplicate`` sends a message twice; ``corrupt`` changes a byte of its body.
    """

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, message: Any, timeout_s: float) -> None:
        self._go_wrong(self._inner.send, message, timeout_s)

    def call(self, message: Any, timeout_s: float) -> Any:
        return self._go_wrong(self._inner.call, message, timeout_s)

    def _go_wrong(self, act: Callable[..., Any], message: Any, timeout_s: float) -> Any:
        if not self._faults.strikes():
            return act(message, timeout_s)
        match self._faults.kind:
            case "drop" | "stall":
                raise TransferTimeoutError("the message was lost")
            case "duplicate":
                act(message, timeout_s)
            case "delay":
                Event().wait(self._faults.delay_s)
            case "corrupt":
                body = corrupted(message.body, self._faults.random)
                message = type(message)(body, message.tensors, message.epoch, message.token)
            case "kill":
                self._faults.kill()
        return act(message, timeout_s)


class FaultyTransport:
    """A ``Transport`` whose opened regions' transfers go wrong."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, descriptor: Any, timeout_s: float) -> FaultyRegion:
        return FaultyRegion(self._inner.open(descriptor, timeout_s), self._faults)


class FaultyRegion:
    """A ``RemoteRegion``. Each submission is one operation."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit_write(self, *plan: Any) -> Any:
        return self._submit(self._inner.submit_write, plan)

    def submit_read(self, *plan: Any) -> Any:
        return self._submit(self._inner.submit_read, plan)

    def _submit(self, submit: Callable[..., Any], plan: tuple[Any, ...]) -> Any:
        if not self._faults.strikes():
            return submit(*plan)
        match self._faults.kind:
            case "drop" | "corrupt":
                # A transport notices both: as a connection that is of no use any more.
                self._inner.close()
                raise PeerGoneError("the connection was lost")
            case "stall":
                return _NeverEnds()
            case "duplicate":
                submit(*plan)
            case "delay":
                Event().wait(self._faults.delay_s)
            case "kill":
                self._faults.kill()
        return submit(*plan)


class _NeverEnds:
    def __init__(self) -> None:
        self._cancelled = False

    def poll(self) -> bool:
        return self._cancelled

    def wait(self, timeout_s: float) -> None:
        Event().wait(timeout_s)
        raise TransferTimeoutError("the transfer stands still")

    def cancel(self) -> bool:
        self._cancelled = True
        return True


def corrupted(data: bytes, chosen: random.Random) -> bytes:
    """``data`` with one bit changed."""
    if not data:
        return data
    changed = bytearray(data)
    changed[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
    return bytes(changed)
