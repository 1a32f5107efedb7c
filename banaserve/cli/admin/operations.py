"""Commands that change a running server: roles, numbers, rests and restarts of instances, nodes.

``follow`` shows the progress of an operation until its end.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from banaserve.base.arguments import ABOVE_0, NOT_NEGATIVE, argument, extra, option
from banaserve.base.config.serve_config import parse_pd
from banaserve.base.errors import UserError
from banaserve.base.types import Role
from banaserve.cli.admin.options import JsonOptions, ServerOptions
from banaserve.cli.admin.status import STYLES, controller_line, node_rows
from banaserve.cli.app import App
from banaserve.cli.terminal.console import print_error, print_json, print_rows
from banaserve.contracts.control_api import NodeRequest, RoleRequest, ScaleRequest
from banaserve.contracts.instances import NodeChange, RoleChange, Scaling
from banaserve.contracts.migration_api import Migration
from banaserve.contracts.restart_api import RestartRequest, RollingRestart
from banaserve.frontdoor.admin_client import OperationClient

_LOOK_S = 0.5
Ask = TypeVar("Ask")
State = TypeVar("State", Migration, NodeChange, RoleChange, RollingRestart, Scaling)


def begin(operations: OperationClient[Ask, State], ask: Ask) -> State:
    """Begin an operation; if Ctrl-C comes before the answer, say that it may have begun.

    Raises:
        UserError: The request is refused, or the server cannot be reached.
    """
    try:
        return operations.begin(ask)
    except KeyboardInterrupt:
        print_error("no answer yet: `banaserve status` shows whether the server has begun it")
        raise


def follow(
    asked: JsonOptions,
    operations: OperationClient[Any, State],
    begun: State,
    *,
    progress: Callable[[State], str],
    done: Callable[[State], str],
    failure: Callable[[State], str],
    waits: bool = True,
    aborts: bool = True,
    goal: str = "done",
    code: int = 2,
) -> int:
    """Wait for the end of an operation, print the operation, and return the exit code.

    Args:
        progress: Returns the line that describes a state; a changed line is printed unless empty,
            on a terminal with the seconds so far.
        done: Returns the lines on an operation that has ended in ``goal``.
        failure: Returns the error of one that has not.
        waits: False to return at once.
        aborts: True if Ctrl-C aborts the operation and waits for its end, instead of leaving it.
        goal: Final state that the user wants.
        code: Exit code of an operation that has ended in another state.

    Raises:
        UserError: The server cannot be reached.
    """
    state, said = begun, ""

    def say() -> None:
        nonlocal said
        line = "" if asked.as_json else progress(state)
        if line and state.is_open and sys.stderr.isatty():
            line += f", {state.seconds:.0f} s"
        if line and line != said:
            said = line
            print(line, file=sys.stderr, flush=True)

    try:
        while waits and state.is_open:
            say()
            state = operations.show(state.id, wait_s=_LOOK_S)
    except KeyboardInterrupt:
        if not aborts:
            print_error(f"{state.id} continues: `banaserve status` shows how far it is")
            raise
        with contextlib.suppress(UserError):  # it has ended meanwhile, or can no longer be undone
            operations.abort(state.id)
        while state.is_open:
            state = operations.show(state.id, wait_s=_LOOK_S)
    if waits:
        say()
    if asked.as_json:
        print_json(state)
    elif state.state == goal:
        print(done(state))
    elif state.is_open:
        print(f"{state.id}: {state.state}; `banaserve status` shows how far it is")
    if state.is_open or state.state == goal:
        return 0
    print_error(failure(state))
    return code


_EXIT_FAILED = 2
_WAIT = "return at its end, or at once (--wait)"


def role(
    asked: JsonOptions,
    instance: str = argument("instance, such as p1; it keeps its name"),
    role: str = argument("prefill, decode or both", metavar="ROLE"),
    timeout_s: float = option(
        "time after which it keeps its role if it is not drained", 300.0, rule=ABOVE_0
    ),
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
        begin(roles, RoleRequest(instance, role, timeout_s, max_num_batched_tokens)),
        progress=lambda one: f"{instance}: {one.num_left} requests left" if one.is_open else "",
        done=done,
        failure=lambda one: f"role switch {one.id} {one.state}: {one.reason or 'by hand'}",
    )


def scale(
    asked: JsonOptions,
    pd: str | None = option("wanted numbers of prefill and decode instances", None, metavar="P:D"),
    colocated: int | None = option("wanted number of instances that do both", None, int),
    instances: int | None = option(
        "wanted number of all instances, if roles follow the load", None, int
    ),
    timeout_s: float = option(
        "time to wait for the last request of an instance that leaves", 300.0, rule=ABOVE_0
    ),
    waits: bool = option(_WAIT, True, name="--wait"),
) -> int:
    """Add instances, then drain and remove surplus ones; no request is lost."""
    prefill, decode = (None, None) if pd is None else parse_pd(pd, least=0)
    scalings = asked.client().scalings
    return follow(
        asked,
        scalings,
        begin(scalings, ScaleRequest(prefill, decode, colocated, instances, timeout_s)),
        progress=lambda one: one.now or one.state if one.is_open else "",
        done=_scaled,
        failure=lambda one: f"scaling {one.id} {one.state}: {one.reason or 'by hand'}",
        waits=waits,
    )


def _scaled(scaling: Scaling) -> str:
    changes = {"added": scaling.added, "removed": scaling.removed}
    parts = [f"{verb} {', '.join(names)}" for verb, names in changes.items() if names]
    if not parts:
        return f"there are {scaling.wanted} already"
    return f"{'; '.join(parts)} after {scaling.seconds:.1f} s"


def drain(
    asked: JsonOptions,
    instance: str = argument("instance, such as d0"),
    undo: bool = option("let it serve again", False),
    timeout_s: float = option("time to wait for its last request", 60.0, rule=NOT_NEGATIVE),
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
    elif state.is_held and not state.num_left:
        took_s = time.monotonic() - began_s
        print(f"{instance} is drained after {took_s:.1f} s; --undo lets it serve again")
    if state.is_held and state.num_left:
        print_error(f"{state.num_left} requests are left on {instance} after {timeout_s:g} s")
        return _EXIT_FAILED
    if not (undo or state.is_held):
        print_error(f"{instance} has been released meanwhile: it serves again")
        return _EXIT_FAILED
    return 0


_ADDRESS = "HOST:PORT of `banaserve node`, as --node has it"


def list_nodes(asked: JsonOptions) -> None:
    """Show the nodes, their instances, and how many more they have room for."""
    found = asked.client().nodes()
    if asked.as_json:
        print_json(found)
    elif found:
        print_rows(node_rows(found), STYLES)
    else:
        print("the engines of this server run on its own machine")


def add(
    asked: JsonOptions,
    address: str = argument(_ADDRESS, metavar="ADDRESS"),
    waits: bool = option(_WAIT, True, name="--wait"),
) -> int:
    """Add a node; `banaserve scale` and the policy may then use it.

    With --cluster, ADDRESS is that of a Ray node; nodes that join Ray are added automatically.
    """
    return _change(asked, NodeRequest("add", address), waits)


def remove(
    asked: JsonOptions,
    address: str = argument(_ADDRESS, metavar="ADDRESS"),
    waits: bool = option(_WAIT, True, name="--wait"),
    keep: bool = option(
        "do with fewer instances, instead of starting as many on other nodes first",
        True,
        name="--shrink",
        action="store_false",
        also=(
            extra(
                "--keep", "keep the number of instances (the default)", True, action="store_true"
            ),
        ),
    ),
    timeout_s: float = option(
        "time to wait for the last request of an instance", 300.0, rule=ABOVE_0
    ),
) -> int:
    """Drain a node and give it back; no request is lost."""
    return _change(asked, NodeRequest("remove", address, timeout_s, keep), waits)


def _change(asked: JsonOptions, ask: NodeRequest, waits: bool) -> int:
    changes = asked.client().node_changes
    done = "has joined" if ask.action == "add" else "has left"
    return follow(
        asked,
        changes,
        begin(changes, ask),
        progress=lambda one: one.now or one.state if one.is_open else "",
        done=lambda one: f"node {one.node} {done} after {one.seconds:.1f} s",
        failure=lambda one: one.reason or f"{one.id} was given up",
        waits=waits,
    )


nodes_app = App(
    None,
    "Show the nodes of a running server, add one, or drain and remove one.",
    list=list_nodes,
    add=add,
    remove=remove,
)


def pause(server: ServerOptions) -> None:
    """Begin no more steps; steps under way are completed."""
    print(controller_line(server.client().set_paused(True)))


def resume(server: ServerOptions) -> None:
    """Begin steps again."""
    print(controller_line(server.client().set_paused(False)))


orchestrator_app = App(
    None,
    "Pause the orchestrator of a running server, or let it go on.",
    pause=pause,
    resume=resume,
)


def restart(
    asked: JsonOptions,
    vllm_options: tuple[str, ...] = argument(
        "options added to those of the engines; if one is given twice, the last counts",
        (),
        metavar="-- VLLM_OPTIONS",
    ),
    rolling: bool = option("one engine after the other; no request is lost", False),
    model: str = option("folder or name of weights of the same architecture", ""),
    timeout_s: float = option(
        "time for which an engine is kept for streams that no other one can take; 0 is serve's "
        "--request-timeout",
        0.0,
        rule=NOT_NEGATIVE,
    ),
    abort: bool = option("abort the restart under way; engines already replaced go back", False),
) -> int:
    """Replace all engines of a running server."""
    restarts = asked.client().restarts
    if abort:
        found = next((one for one in restarts.last() if one.is_open), None)
        if found is None:
            raise UserError("no rolling restart is under way")
        restarts.abort(found.id)
    elif not rolling:
        raise UserError(
            "all engines at once would end every request: give --rolling, which replaces one after "
            "the other"
        )
    else:
        found = begin(restarts, RestartRequest(_path(model), list(vllm_options), timeout_s))
    return follow(
        asked,
        restarts,
        found,
        progress=lambda one: f"{one.state}: {one}" if one.is_open else "",
        done=_ending if abort else _replaced,
        failure=_ending,
        aborts=False,
        goal="aborted" if abort else "done",
        code=1,
    )


def _path(model: str) -> str:
    """Return a folder as an absolute path: the server may have another working directory."""
    folder = Path(model).expanduser()
    return str(folder.absolute()) if model and folder.is_dir() else model


def _replaced(found: RollingRestart) -> str:
    return f"{len(found.engines)} engines replaced in {found.seconds:.1f} s"


def _ending(found: RollingRestart) -> str:
    words = f"the restart {found.state}: {found.reason}"
    names = [one.instance for one in found.engines if one.state == "taken back"]
    return words + (f"; {', '.join(names)} went back to what was" if names else "")


drain_app, role_app, scale_app, restart_app = App(drain), App(role), App(scale), App(restart)
