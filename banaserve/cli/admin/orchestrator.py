"""``banaserve orchestrator``: pause or resume the control loop of a running server."""

from __future__ import annotations

import typer

from banaserve.cli.admin.options import ServerOptions, with_server_options
from banaserve.cli.admin.status import controller_line

app = typer.Typer(
    name="orchestrator",
    help="Pause the orchestrator of a running server, or let it go on.",
    add_completion=False,
    no_args_is_help=True,
)


@app.command()
@with_server_options
def pause(server: ServerOptions) -> None:
    """Begin no more steps; steps under way are completed."""
    typer.echo(controller_line(server.client().set_paused(True)))


@app.command()
@with_server_options
def resume(server: ServerOptions) -> None:
    """Begin steps again."""
    typer.echo(controller_line(server.client().set_paused(False)))
