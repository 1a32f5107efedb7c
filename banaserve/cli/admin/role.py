"""``banaserve role``: give an instance of a running server the role prefill, decode or both."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import typer

from banaserve.cli.admin.following import followed
from banaserve.cli.admin.migrate import JsonOption
from banaserve.cli.admin.options import ServerOptions, with_server_options
from banaserve.cli.console import print_error
from banaserve.controller.schemas import RoleRequest
from banaserve.engine.interface import RoleChange
from banaserve.types import Role

app = typer.Typer(name="role", add_completion=False)
_EXIT_FAILED = 2


@app.command()
@with_server_options
def role(
    server: ServerOptions,
    instance: Annotated[str, typer.Argument(help="Such as p1; it keeps its name.")],
    new_role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or both.")],
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="It keeps its role if it is not drained by then.")
    ] = 300.0,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens of its steps from then on; 0: those of its role.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Give a running instance another role once its requests have ended."""
    client = server.client()
    change = client.roles.begin(RoleRequest(instance, new_role, timeout_s, max_num_batched_tokens))
    change = followed(client.roles, change, _progress, is_silent=as_json)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(change), indent=2))
    elif change.state == "done":
        now = "does both" if change.role == Role.COLOCATED.value else f"is for {change.role}"
        typer.echo(f"{instance} {now} after {change.seconds:.1f} s")
    if change.state != "done":
        print_error(f"role switch {change.id} {change.state}: {change.reason or 'by hand'}")
        raise typer.Exit(_EXIT_FAILED)


def _progress(change: RoleChange) -> str:
    return f"{change.instance}: {change.num_left} requests left" if change.is_open else ""
