"""``banaserve drain``: let an instance's streams go on elsewhere, and send it no requests."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from banaserve.base.arguments import argument, option
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.app import App
from banaserve.cli.terminal.console import print_error, print_json

_EXIT_FAILED = 2
_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class DrainOptions(JsonOptions):
    """Options of ``banaserve drain``."""

    instance: str = argument("such as d0")
    undo: bool = option("let it serve again", False)
    timeout_s: float = option("time to wait for its last request", 60.0)


def drain(asked: DrainOptions) -> int:
    """Move the streams of an instance to others at once, and send it no requests until --undo."""
    client, instance = asked.client(), asked.instance
    began_s = time.monotonic()
    state = client.release(instance) if asked.undo else client.drain(instance)
    while state.is_held and state.num_left and time.monotonic() - began_s < asked.timeout_s:
        if not asked.as_json:
            print(f"{instance}: {state.num_left} requests left", file=sys.stderr)
        state = client.show_drain(instance, wait_s=_LOOK_S)
    if asked.as_json:
        print_json(state)
    elif asked.undo:
        print(f"{instance} serves again")
    elif not state.num_left:
        took_s = time.monotonic() - began_s
        print(f"{instance} is drained after {took_s:.1f} s; --undo lets it serve again")
    if state.is_held and state.num_left:
        print_error(f"{state.num_left} requests are left on {instance} after {asked.timeout_s:g} s")
        return _EXIT_FAILED
    return 0


app = App(drain)
