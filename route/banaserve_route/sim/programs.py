"""Programs of clients, whose next requests depend on the answers to the previous ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """Request of a program, with the digests of its prompt's and its answer's blocks."""

    prompt: bytes
    output: bytes
    session: str


Program = Iterator[list[ProgramCall] | float]
"""Calls that are made at once, the next ones when all are answered; or a pause in seconds."""

MakeProgram = Callable[[Random, str], Program]
