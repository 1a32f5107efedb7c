"""A signal ends a command that is starting, even where somebody swallows exceptions."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from banaserve.cli.serve.command import Leaving

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_leaves_with_its_code_and_later_ones_do_not_disturb_the_clean_up(number):
    cleaned_up = []

    def work() -> None:
        with Leaving():
            try:
                send(number)
            finally:
                send(signal.SIGINT)
                send(signal.SIGTERM)
                cleaned_up.append(True)

    with pytest.raises(SystemExit) as ending:
        work()
    assert ending.value.code == 128 + number
    assert cleaned_up


@pytest.mark.parametrize("number", SIGNALS)
def test_a_swallowed_signal_comes_again(number):
    swallowed = []

    def work() -> None:
        with Leaving() as leaving, leaving.insisting():
            for _ in range(3):
                with contextlib.suppress(SystemExit):
                    if not swallowed:
                        send(number)
                    signal.pause()
                swallowed.append(number)
            signal.pause()

    with pytest.raises(SystemExit) as ending:
        work()
    assert ending.value.code == 128 + number
    assert len(swallowed) == 3


def test_nothing_comes_after_the_block_and_the_handlers_are_back():
    before = [signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)]

    def work() -> None:
        with Leaving() as leaving, leaving.insisting():
            send(signal.SIGTERM)

    with pytest.raises(SystemExit):
        work()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert [signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)] == before
