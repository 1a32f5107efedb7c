"""Cost of handing over a request whose layers have partly moved.

``python -m benchmarks handover-moved``. Two servers at ``--pd 1:1``, both with layers of p0 in a
guest beside d0, get the same prompts in turn, one at a time. On one the guest saves the KV of its
layers to the store; on the other it sends the KV to p0 first, which saves it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.progress import Progress

from banaserve.base import models
from banaserve.base.arguments import Parser, positive
from banaserve.base.errors import UserError
from banaserve.base.run_dir import find_admin
from banaserve.contracts.migration_api import MoveLayers
from banaserve.frontdoor.admin_client import AdminClient
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.servers import Server, banaserve_server, end_on_sigterm
from banaserve_bench.results import result
from banaserve_bench.statistics import median, paired_ratios

_SAME = (
    *("--pd", "1:1", "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 30)),
    # Times of first tokens must differ only by what is handed over.
    *("--migration-overlap", "1"),
)
_SAVES = {"guest": "on", "host": "off"}
"""Process that saves the KV of moved layers, and its value of ``--migration-guest-saves``."""


class MovedRun(NamedTuple):
    """Results of one pass of prompts over one server, per request: bytes and seconds.

    Attributes:
        host_bytes: Bytes that p0 copied to the store.
        guest_bytes: Bytes that the guest copied to the store.
        save_s: Time of copies to the store, which mostly overlap with computing.
        save_wait_s: Time from a step's last layer until everything is saved and committed.
        ttft_s: Median time to first token.
        second_s: Median time from the first token, which prefill samples, to the second.
    """

    host_bytes: float
    guest_bytes: float
    save_s: float
    save_wait_s: float
    ttft_s: float
    second_s: float
    token_ids: list[list[int]]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write the result; return the exit code."""
    parser = Parser(prog="python -m benchmarks handover-moved", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the result there")
    add("--runs", type=positive, default=5)
    add("--requests", type=positive, default=4, help="a run")
    add("--prompt-tokens", type=positive, default=2000)
    add("--output-tokens", type=positive, default=8)
    add("--layers", type=positive, default=15, help="of p0's 30, its last ones, beside d0")
    given = parser.parse_args(list(argv))
    if given.layers >= 30 or given.output_tokens < 2:
        raise UserError("--layers is below 30, --output-tokens at least 2")
    end_on_sigterm()
    record = asyncio.run(_measure(given, datetime.now(UTC)))
    result.deliver(record, given.json)
    return 0


async def _measure(given: argparse.Namespace, started_at: datetime) -> result.Result:
    runs: dict[str, list[MovedRun]] = {name: [] for name in _SAVES}
    with contextlib.ExitStack() as stack, Progress(transient=True) as progress:
        task = progress.add_task("two servers", total=len(_SAVES) * (given.runs + 1))
        servers = {
            name: stack.enter_context(_server(option, given.layers))
            for name, option in _SAVES.items()
        }
        for number in range(given.runs + 1):  # the first warms up
            for name in sorted(_SAVES, reverse=bool(number % 2)):
                run = await _run(servers[name], given, number)
                if number:
                    runs[name].append(run)
                progress.advance(task)
    return _result(given, started_at, runs)


@contextlib.contextmanager
def _server(guest_saves: str, num_layers: int) -> Iterator[Server]:
    options = (*_SAME, "--migration-guest-saves", guest_saves)
    with TemporaryDirectory(prefix="bench-") as folder:
        run_dir = Path(folder) / "run"
        with banaserve_server(models.PACKAGED, *options, "--run-dir", str(run_dir)) as server:
            admin = AdminClient(*find_admin(run_dir))
            moved = admin.run(MoveLayers("p0", "d0", (30 - num_layers, 30)))
            if moved.state != "done":
                raise UserError(f"layers {moved.state}: {moved.error}")
            yield server


async def _run(server: Server, given: argparse.Namespace, number: int) -> MovedRun:
    model = models.resolve(models.PACKAGED, None, lambda line: print(line, flush=True))
    before = _counts(server)
    async with OpenAiClient(server.url, model.served_name, return_token_ids=True) as client:
        records = [
            (await client.send(_call(given, number * given.requests + i))).checked()
            for i in range(given.requests)
        ]
    spent = {name: (value - before[name]) / len(records) for name, value in _counts(server).items()}
    return MovedRun(
        host_bytes=spent["saved_bytes"] - spent["guest_saved_bytes"],
        guest_bytes=spent["guest_saved_bytes"],
        save_s=spent["save_seconds"],
        save_wait_s=spent["save_wait_seconds"],
        ttft_s=median([r.token_at_s[0] - r.sent_at_s for r in records]),
        second_s=median([r.token_at_s[1] - r.token_at_s[0] for r in records]),
        token_ids=[r.token_ids for r in records],
    )


def _counts(server: Server) -> dict[str, float]:
    names = ("saved_bytes", "guest_saved_bytes", "save_seconds", "save_wait_seconds")
    return {n: server.metric(f"banaserve_{n}_total", instance_id="p0") for n in names}


def _call(given: argparse.Namespace, number: int) -> CompletionCall:
    ids = [1000 + (number * 977 + 37 * i) % 40000 for i in range(given.prompt_tokens)]
    tokens = given.output_tokens
    return CompletionCall(str(number), prompt=ids, max_tokens=tokens, extra={"ignore_eos": True})


def _result(
    given: argparse.Namespace, started_at: datetime, runs: dict[str, list[MovedRun]]
) -> result.Result:
    guest, host = runs["guest"], runs["host"]
    answers = [[ids for run in found for ids in run.token_ids] for found in (guest, host)]
    equal = [float(a == b) for a, b in zip(*answers, strict=True)]
    samples: dict[str, tuple[list[float], str]] = {
        "host_bytes_ratio": (
            paired_ratios([g.host_bytes for g in guest], [h.host_bytes for h in host]),
            "ratio",
        ),
        "ttft_ratio": (paired_ratios([g.ttft_s for g in guest], [h.ttft_s for h in host]), "ratio"),
        "equal_answers_fraction": ([sum(equal) / len(equal)], "fraction"),
    }
    for name, found in runs.items():
        samples[f"{name}_saves.host_bytes"] = [run.host_bytes for run in found], "B"
        samples[f"{name}_saves.guest_bytes"] = [run.guest_bytes for run in found], "B"
        for field in ("save_s", "save_wait_s", "ttft_s", "second_s"):
            figure = f"{name}_saves.{field.removesuffix('_s')}"
            samples[figure] = [1e3 * getattr(run, field) for run in found], "ms"
    return result.result(
        "handover-moved",
        seed=0,
        options={name: str(value) for name, value in vars(given).items() if name != "json"},
        started_at=started_at,
        figures={name: result.figure(*sample) for name, sample in samples.items()},
        notes=[
            "a request each; float32; both servers run at once, the idle one waits",
            "host_bytes: of KV that p0 copied to the store; guest_bytes: that its guest did",
            "save: copies to the store, beside computing; save_wait: from the end of a step's last "
            "layer until all is saved and committed; second: from the first token, which prefill "
            "samples, to the second, which decode does",
            "KV travels between guest and host through shared memory: a copy is a memcpy",
        ],
    )
