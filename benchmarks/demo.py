"""Demonstration for people: four paced engines under a load that swings, on the page.

``make demo``. The time of the engines is modelled, so that the load of four GPUs fits two cores.
Layers move by hand first, then roles follow the load; at the end it says how to replay it all.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from banaserve.api.admin_client import AdminClient
from banaserve.arguments import Parser
from banaserve.bench.loadgen.client import OpenAiClient
from banaserve.bench.loadgen.servers import Server, banaserve_server, end_on_sigterm
from banaserve.config import MINIATURE
from banaserve.engine.vllm.migration.api import MoveLayers, Return
from banaserve.errors import UserError
from banaserve.sim import case as cases
from benchmarks.cases import CaseRequest, options_of, send
from benchmarks.script import run_script

_CASE, _SYSTEM = "oscillating-load", "banaserve"
_TIMEOUT_S = 600.0
_TIME_TO_OPEN_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Run it to its end; the exit code."""
    parser = Parser(prog="python -m benchmarks demo", description=__doc__)
    parser.add_argument("--dilate", type=float, default=2.0, help="wall seconds of a modelled one")
    parser.add_argument("--phase-s", type=float, default=20.0, help="modelled, of each of two")
    parser.add_argument("--log", type=Path, default=Path("build/demo.jsonl"), help="of decisions")
    given = parser.parse_args(list(argv))
    if given.dilate < 0.1 or given.phase_s < 1:
        raise UserError("--dilate: give 0.1 or more, --phase-s: 1 or more")
    end_on_sigterm()
    given.log.parent.mkdir(parents=True, exist_ok=True)
    given.log.unlink(missing_ok=True)
    asyncio.run(_show(given))
    return 0


async def _show(given: argparse.Namespace) -> None:
    case = cases.read(_CASE)
    phases = tuple(replace(one, duration_s=given.phase_s) for one in case.phases)
    case = replace(case, phases=phases, repeat=1)
    asked = [CaseRequest.of(one, case.seed) for one in case.requests(case.seed)]
    options = options_of(case.systems[_SYSTEM], case.profile.name, given.dilate, given.log)
    key = secrets.token_urlsafe(12)
    print("starting two prefill and two decode engines, whose time is modelled", flush=True)
    with banaserve_server(MINIATURE, *options, "--admin-key", key) as server:
        print(f"\n  page  {server.url}/ui\n  key   {key}\n", flush=True)
        print(f"the load begins in {_TIME_TO_OPEN_S:g} s", flush=True)
        await asyncio.sleep(_TIME_TO_OPEN_S)
        name = f"paced-{case.profile.name}"
        async with OpenAiClient(server.url, name, timeout_s=_TIMEOUT_S, read_late=True) as client:
            began_s = time.monotonic()
            moving = asyncio.create_task(asyncio.to_thread(_move, server, key))
            records = await send(client, asked, given.dilate)
            await moving
        failed = sum(one.error is not None for one in records)
        decided = AdminClient(server.url, key).decisions()
    done = [step.what for one in decided for step in one.steps if step.result is not None]
    print(f"{len(records)} requests in {time.monotonic() - began_s:.0f} s, {failed} failed")
    for what in done:
        print(f"  {what}")
    print(f"play it again: banaserve ui --replay {given.log}")


def _move(server: Server, key: str) -> None:
    """A quarter of a decode instance's layers to an idle one, and home again."""
    admin = AdminClient(server.url, key)
    (host,) = [one for one in admin.placement().instances if one.id == "d0"]
    print(f"layers 0:{host.num_layers // 4} of d0 go to p0, and home again", flush=True)
    for ask in (MoveLayers("d0", "p0", (0, host.num_layers // 4)), Return("d0")):
        admin.run(ask)
        time.sleep(3)  # to be looked at


if __name__ == "__main__":
    run_script(main)
