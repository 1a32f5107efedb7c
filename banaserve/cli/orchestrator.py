"""``banaserve orchestrator``: pause the control loop of a running server, or let it go on."""

from __future__ import annotations

import typer

from banaserve.cli.admin_options import KeyOption, RunDirOption, UrlOption, admin_client
from banaserve.cli.status import controller_line

app = typer.Typer(
    name="orchestrator",
    help="Pause the orchestrator of a running server, or let it go on.",
    add_completion=False,
    no_args_is_help=True,
)


@app.command()
def pause(run_dir: RunDirOption = None, url: UrlOption = None, admin_key: KeyOption = None) -> None:
    """Begin nothing more; what is under way comes to its end."""
    typer.echo(controller_line(admin_client(run_dir, url, admin_key).set_paused(True)))


@app.command()
def resume(
    run_dir: RunDirOption = None, url: UrlOption = None, admin_key: KeyOption = None
) -> None:
    """Begin steps again."""
    typer.echo(controller_line(admin_client(run_dir, url, admin_key).set_paused(False)))
