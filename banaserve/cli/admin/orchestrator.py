"""``banaserve orchestrator``: pause or resume the control loop of a running server."""

from __future__ import annotations

from banaserve.cli.admin.options import ServerOptions
from banaserve.cli.admin.views.status import controller_line
from banaserve.cli.app import App


def pause(server: ServerOptions) -> None:
    """Begin no more steps; steps under way are completed."""
    print(controller_line(server.client().set_paused(True)))


def resume(server: ServerOptions) -> None:
    """Begin steps again."""
    print(controller_line(server.client().set_paused(False)))


app = App(
    None,
    "Pause the orchestrator of a running server, or let it go on.",
    pause=pause,
    resume=resume,
)
