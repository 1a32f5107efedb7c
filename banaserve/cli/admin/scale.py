"""``banaserve scale``: add instances to a running server, or remove some, while it serves."""

from __future__ import annotations

import re
from dataclasses import dataclass

from banaserve.base.arguments import option
from banaserve.base.errors import UserError
from banaserve.cli.admin.following import ended, followed
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.app import App
from banaserve.contracts.control_api import ScaleRequest
from banaserve.contracts.instances import Scaling


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(JsonOptions):
    """Options of ``banaserve scale``."""

    pd: str | None = option(
        "prefill and decode instances that there are to be", None, metavar="P:D"
    )
    colocated: int | None = option("instances that do both", None, int)
    instances: int | None = option("all instances, where roles follow the load", None, int)
    timeout_s: float = option("time to wait for the last request of one that leaves", 300.0)
    waits: bool = option(
        "return at its end, or at once (--wait)",
        True,
        name="--wait",
    )


def scale(asked: ScaleOptions) -> int:
    """Add instances, then drain and remove surplus ones; no request is lost."""
    prefill, decode = (None, None) if asked.pd is None else _numbers(asked.pd)
    scalings = asked.client().scalings
    ask = ScaleRequest(prefill, decode, asked.colocated, asked.instances, asked.timeout_s)
    scaling = scalings.begin(ask)
    if asked.waits:
        scaling = followed(scalings, scaling, _progress, is_silent=asked.as_json)
    failure = f"scaling {scaling.id} {scaling.state}: {scaling.reason or 'by hand'}"
    return ended(scaling, asked.as_json, [_result(scaling)], failure)


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


app = App(scale)
