"""``banaserve role``, ``scale`` and ``drain``: roles of instances, their number, and their rest."""

from __future__ import annotations

import re
import sys
import time

from banaserve.base.arguments import argument, option
from banaserve.base.errors import UserError
from banaserve.base.types import Role
from banaserve.cli.admin.operation_progress import follow
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.app import App
from banaserve.cli.terminal.console import print_error, print_json
from banaserve.contracts.control_api import RoleRequest, ScaleRequest
from banaserve.contracts.instances import RoleChange, Scaling

_EXIT_FAILED = 2
_LOOK_S = 0.5


def role(
    asked: JsonOptions,
    instance: str = argument("such as p1; it keeps its name"),
    role: str = argument("prefill, decode or both", metavar="ROLE"),
    timeout_s: float = option("time after which it keeps its role if it is not drained", 300.0),
    max_num_batched_tokens: int = option(
        "most tokens of its steps from then on; 0: those of its role", 0
    ),
) -> int:
    """Give a running instance another role once its requests have ended."""

    def done(change: RoleChange) -> str:
        now = "does both" if change.role == Role.COLOCATED.value else f"is for {change.role}"
        return f"{instance} {now} after {change.seconds:.1f} s"

    roles = asked.client().roles
    return follow(
        asked,
        roles,
        roles.begin(RoleRequest(instance, role, timeout_s, max_num_batched_tokens)),
        progress=lambda one: f"{instance}: {one.num_left} requests left" if one.is_open else "",
        done=done,
        failure=lambda one: f"role switch {one.id} {one.state}: {one.reason or 'by hand'}",
    )


def scale(
    asked: JsonOptions,
    pd: str | None = option(
        "prefill and decode instances that there are to be", None, metavar="P:D"
    ),
    colocated: int | None = option("instances that do both", None, int),
    instances: int | None = option("all instances, where roles follow the load", None, int),
    timeout_s: float = option("time to wait for the last request of one that leaves", 300.0),
    waits: bool = option("return at its end, or at once (--wait)", True, name="--wait"),
) -> int:
    """Add instances, then drain and remove surplus ones; no request is lost."""
    prefill, decode = (None, None) if pd is None else _numbers(pd)
    scalings = asked.client().scalings
    return follow(
        asked,
        scalings,
        scalings.begin(ScaleRequest(prefill, decode, colocated, instances, timeout_s)),
        progress=lambda one: f"{one.now or one.state}, {one.seconds:.0f} s" if one.is_open else "",
        done=_scaled,
        failure=lambda one: f"scaling {one.id} {one.state}: {one.reason or 'by hand'}",
        waits=waits,
    )


def _numbers(pd: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", pd.strip(), re.ASCII)
    if match is None:
        raise UserError(
            f"--pd {pd}: write the number of prefill and of decode instances, such as 3:2"
        )
    return int(match[1]), int(match[2])


def _scaled(scaling: Scaling) -> str:
    changes = {"added": scaling.added, "removed": scaling.removed}
    parts = [f"{verb} {', '.join(names)}" for verb, names in changes.items() if names]
    if not parts:
        return f"there are {scaling.wanted} already"
    return f"{'; '.join(parts)} after {scaling.seconds:.1f} s"


def drain(
    asked: JsonOptions,
    instance: str = argument("such as d0"),
    undo: bool = option("let it serve again", False),
    timeout_s: float = option("time to wait for its last request", 60.0),
) -> int:
    """Move the streams of an instance to others at once, and send it no requests until --undo."""
    client, began_s = asked.client(), time.monotonic()
    state = client.release(instance) if undo else client.drain(instance)
    while state.is_held and state.num_left and time.monotonic() - began_s < timeout_s:
        if not asked.as_json:
            print(f"{instance}: {state.num_left} requests left", file=sys.stderr)
        state = client.show_drain(instance, wait_s=_LOOK_S)
    if asked.as_json:
        print_json(state)
    elif undo:
        print(f"{instance} serves again")
    elif not state.num_left:
        took_s = time.monotonic() - began_s
        print(f"{instance} is drained after {took_s:.1f} s; --undo lets it serve again")
    if state.is_held and state.num_left:
        print_error(f"{state.num_left} requests are left on {instance} after {timeout_s:g} s")
        return _EXIT_FAILED
    return 0


drain_app, role_app, scale_app = App(drain), App(role), App(scale)
