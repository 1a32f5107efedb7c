"""``banaserve drain``: let an instance's streams go on elsewhere, and send it no requests."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import msgspec
import typer

from banaserve.cli.admin.migrate import JsonOption
from banaserve.cli.admin.options import ServerOptions, with_server_options
from banaserve.cli.console import print_error

app = typer.Typer(name="drain", add_completion=False)
_EXIT_FAILED = 2
_LOOK_S = 0.5


@app.command()
@with_server_options
def drain(
    server: ServerOptions,
    instance: Annotated[str, typer.Argument(help="Such as d0.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it serve again.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="How long to wait for its last request.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Move the streams of an instance to others at once, and send it no requests until --undo."""
    client = server.client()
    began_s = time.monotonic()
    state = client.release(instance) if undo else client.drain(instance)
    while state.is_held and state.num_left and time.monotonic() - began_s < timeout_s:
        if not as_json:
            print(f"{instance}: {state.num_left} requests left", file=sys.stderr)
        state = client.show_drain(instance, wait_s=_LOOK_S)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(state), indent=2))
    elif undo:
        typer.echo(f"{instance} serves again")
    elif not state.num_left:
        took_s = time.monotonic() - began_s
        typer.echo(f"{instance} is drained after {took_s:.1f} s; --undo lets it serve again")
    if state.is_held and state.num_left:
        print_error(f"{state.num_left} requests are left on {instance} after {timeout_s:g} s")
        raise typer.Exit(_EXIT_FAILED)
