"""Bytes to begin from, kept in ``corpus/``, and strategies that spoil them.

A fuzzer takes a file of its folder there, changes it a few times, and asks that a parser either
takes the result or raises its documented error. What has once gone wrong is kept as a file.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from depth import num_examples

T = TypeVar("T")
_CORPUS = Path(__file__).parent / "corpus"
_HANGS_S = 120
"""Much longer than any case takes on any machine."""
_EDGES = (b"\x00", b"\xff", b'"', b"\\", b"{", b"[", b"\r\n", b"\n", b",", b"e", b"-", b"9" * 30)

fuzzed = settings(
    max_examples=num_examples(2_000),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def kept(name: str) -> list[bytes]:
    """Files of the corpus ``name``, in the order of their names."""
    found = [path.read_bytes() for path in sorted((_CORPUS / name).iterdir())]
    assert found, f"the corpus {name} is empty"
    return found


@st.composite
def _changes(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 16)))
        piece = data[start:end]
        match draw(st.sampled_from(("cut", "flip", "insert", "repeat", "splice"))):
            case "cut":
                del data[start:end]
            case "flip" if start < len(data):
                data[start] ^= 1 << draw(st.integers(0, 7))
            case "insert":
                data[start:start] = draw(st.sampled_from(_EDGES) | st.binary(max_size=8))
            case "repeat":
                data[start:start] = bytes(piece) * draw(st.integers(1, 200))
            case "splice":
                other = draw(st.sampled_from(seeds))
                data[start:end] = other[: draw(st.integers(0, len(other)))]
    return bytes(data)


def spoiled(name: str) -> st.SearchStrategy[bytes]:
    """Files of the corpus ``name`` as they are, changed, and bytes of no file at all."""
    seeds = kept(name)
    return st.sampled_from(seeds) | _changes(seeds) | st.binary(max_size=300)


def attempt(
    parse: Callable[[], T], documented: type[Exception]
) -> tuple[T, None] | tuple[None, Exception]:
    """What ``parse`` returns, or the documented error; anything else, and no end, is a failure."""
    with ends():
        try:
            return parse(), None
        except documented as error:
            return None, error


@contextmanager
def ends() -> Iterator[None]:
    """Fail where the block does not come to an end."""

    def hangs(_: int, __: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(_HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
