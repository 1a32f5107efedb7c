"""``banaserve scale``: add instances to a running server, or remove some, while it serves."""

from __future__ import annotations

import json
import re
from typing import Annotated

import msgspec
import typer

from banaserve.cli.admin.following import followed
from banaserve.cli.admin.options import JsonOption, ServerOptions, with_server_options
from banaserve.cli.console import print_error
from banaserve.controller.schemas import ScaleRequest
from banaserve.engine.interface import Scaling
from banaserve.errors import UserError

app = typer.Typer(name="scale", add_completion=False)
_EXIT_FAILED = 2


@app.command()
@with_server_options
def scale(
    server: ServerOptions,
    pd: Annotated[
        str | None,
        typer.Option(metavar="P:D", help="Prefill and decode instances that there are to be."),
    ] = None,
    colocated: Annotated[
        int | None, typer.Option(metavar="N", help="Instances that do both.")
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(metavar="N", help="All instances, where roles follow the load."),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", help="How long to wait for the last request of one that leaves."),
    ] = 300.0,
    waits: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return at its end, or at once.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Add instances, then drain and remove surplus ones; no request is lost."""
    prefill, decode = (None, None) if pd is None else _numbers(pd)
    client = server.client()
    scaling = client.scalings.begin(ScaleRequest(prefill, decode, colocated, instances, timeout_s))
    if waits:
        scaling = followed(client.scalings, scaling, _progress, is_silent=as_json)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(scaling), indent=2))
    elif scaling.state == "done":
        typer.echo(_result(scaling))
    elif scaling.is_open:
        typer.echo(f"{scaling.id}: {scaling.state}; `banaserve status` shows how far it is")
    if not scaling.is_open and scaling.state != "done":
        print_error(f"scaling {scaling.id} {scaling.state}: {scaling.reason or 'by hand'}")
        raise typer.Exit(_EXIT_FAILED)


def _numbers(pd: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", pd.strip(), re.ASCII)
    if match is None:
        raise UserError(
            f"--pd {pd}: write the number of prefill and of decode instances, such as 3:2"
        )
    return int(match[1]), int(match[2])


def _progress(scaling: Scaling) -> str:
    return f"{scaling.now or scaling.state}, {scaling.seconds:.0f} s" if scaling.is_open else ""


def _result(scaling: Scaling) -> str:
    parts = []
    if scaling.added:
        parts.append(f"added {', '.join(scaling.added)}")
    if scaling.removed:
        parts.append(f"removed {', '.join(scaling.removed)}")
    if not parts:
        return f"there are {scaling.wanted} already"
    return f"{'; '.join(parts)} after {scaling.seconds:.1f} s"
