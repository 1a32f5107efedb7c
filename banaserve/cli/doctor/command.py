"""``banaserve doctor``: what this machine can run, and how to install what is missing."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE, key_option
from banaserve.base.arguments import Rule, option
from banaserve.base.errors import UserError
from banaserve.base.models import PACKAGED
from banaserve.cli.app import App
from banaserve.cli.doctor import facts
from banaserve.cli.doctor.checks import CheckStatus, Finding
from banaserve.cli.terminal.console import print_json, print_rows

_STYLES = {"OK": "green", "warning": "yellow", "missing": "bold red"}

_PORT = Rule(lambda value: 0 < value < 65536, "must be between 1 and 65535")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of ``banaserve doctor``."""

    model: str = option("model that is to be served", PACKAGED)
    port: int = option("port to serve on", 8000, metavar="PORT", rule=_PORT)
    node: tuple[str, ...] = option(
        "where `banaserve node` listens; repeat for several", (), metavar="HOST:PORT"
    )
    cluster: str = option("address of a Ray cluster, or auto", "", metavar="ADDRESS")
    cluster_key: str = key_option(
        "--cluster-key",
        "",
        f"file with the key of the nodes (${CLUSTER_KEY_VARIABLE})",
        CLUSTER_KEY_VARIABLE,
    )
    as_json: bool = option("print JSON", False, name="--json")


def doctor(asked: DoctorOptions) -> int:
    """Say what this machine can run. Exits with 1 if `banaserve serve` cannot.

    With --node or --cluster also compare other machines with this one: versions, model folders,
    clocks, and the links between every two of them.
    """
    findings = list(facts.examine(asked.model, asked.port))
    if asked.node or asked.cluster:
        if asked.node and asked.cluster:
            raise UserError("--node and --cluster: give one of them")
        # Engines run on the nodes, so this machine's memory does not matter.
        findings = [one for one in findings if one.name != "memory"]
        from banaserve.cli.doctor.nodes import examine_nodes

        findings += examine_nodes(asked.model, list(asked.node), asked.cluster, asked.cluster_key)
    can_serve = not any(finding.status is CheckStatus.MISSING for finding in findings)
    if asked.as_json:
        print_json({"can_serve": can_serve, "findings": findings})
    else:
        print_rows([_row(finding) for finding in findings], _STYLES)
        print(_verdict(findings, can_serve))
    return 0 if can_serve else 1


def _row(finding: Finding) -> tuple[str, str, str]:
    detail = f"{finding.detail}: {finding.advice}" if finding.advice else finding.detail
    return finding.name, finding.status.value, detail


def _verdict(findings: list[Finding], can_serve: bool) -> str:
    if can_serve:
        return "`banaserve serve` can run here."
    names = ", ".join(finding.name for finding in findings if finding.status is CheckStatus.MISSING)
    return f"`banaserve serve` cannot run here; missing: {names}."


app = App(doctor)
