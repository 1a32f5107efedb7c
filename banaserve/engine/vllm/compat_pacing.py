"""Every private vLLM name that pacing relies on, in one file; see ``compat``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core import EngineCoreProc


def on_wake(woke: Callable[[], None]) -> None:
    """Call ``woke`` whenever an engine core of this process had no work and has got some."""
    wait_for_work = EngineCoreProc._process_input_queue

    @functools.wraps(wait_for_work)
    def wait_and_tell(core: Any) -> None:
        had_work = core.has_work()
        wait_for_work(core)
        if not had_work:
            woke()

    EngineCoreProc._process_input_queue = wait_and_tell
