"""``banaserve doctor``: what this machine can run, and how to install what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from banaserve.access.key_files import key_of
from banaserve.cli.console import print_rows
from banaserve.cli.doctor import facts
from banaserve.cli.doctor.checks import CheckStatus, Finding
from banaserve.errors import UserError
from banaserve.models import PACKAGED
from banaserve.nodes.options import KEY_VARIABLE, key_from_environment

_STYLES = {"OK": "green", "warning": "yellow", "missing": "bold red"}

app = typer.Typer(name="doctor", add_completion=False)


@app.command()
def doctor(
    model: Annotated[str, typer.Option(help="The model that is to be served.")] = PACKAGED,
    port: Annotated[int, typer.Option(help="The port to serve on.", min=1, max=65535)] = 8000,
    node: Annotated[
        list[str] | None,
        typer.Option(help="Where `banaserve node` listens; repeat.", metavar="HOST:PORT"),
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="A Ray cluster's address, or auto.", metavar="ADDRESS")
    ] = "",
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(help=f"Holds the key of the nodes; {KEY_VARIABLE}.", metavar="FILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can run. Exits with 1 if `banaserve serve` cannot.

    With --node or --cluster also compare other machines with this one: versions, model folders,
    clocks, and the links between every two of them.
    """
    findings = list(facts.examine(model, port))
    if node or cluster:
        if node and cluster:
            raise UserError("--node and --cluster: give one of them")
        key = key_of("--cluster-key", None, cluster_key_file, key_from_environment())
        # Engines run on the nodes, so this machine's memory does not matter.
        findings = [one for one in findings if one.name != "memory"]
        from banaserve.cli.doctor.node_facts import examine_nodes

        findings += examine_nodes(model, node or [], cluster, key)
    can_serve = not any(finding.status is CheckStatus.MISSING for finding in findings)
    if as_json:
        typer.echo(json.dumps(_as_json(findings, can_serve), indent=2))
    else:
        print_rows([_row(finding) for finding in findings], _STYLES)
        typer.echo(_verdict(findings, can_serve))
    raise typer.Exit(0 if can_serve else 1)


def _row(finding: Finding) -> tuple[str, str, str]:
    detail = f"{finding.detail}: {finding.advice}" if finding.advice else finding.detail
    return finding.name, finding.status.value, detail


def _verdict(findings: list[Finding], can_serve: bool) -> str:
    if can_serve:
        return "`banaserve serve` can run here."
    names = ", ".join(finding.name for finding in findings if finding.status is CheckStatus.MISSING)
    return f"`banaserve serve` cannot run here; missing: {names}."


def _as_json(findings: list[Finding], can_serve: bool) -> dict[str, object]:
    listed = [
        {
            "name": finding.name,
            "status": finding.status.value,
            "detail": finding.detail,
            "advice": finding.advice,
        }
        for finding in findings
    ]
    return {"can_serve": can_serve, "findings": listed}
