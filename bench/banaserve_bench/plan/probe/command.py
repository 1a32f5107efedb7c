"""Command line of ``banaserve plan probe``."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from banaserve.base.access.key_files import key_option
from banaserve.base.arguments import ABOVE_0, AT_LEAST_1, Rule, option
from banaserve.base.errors import UserError
from banaserve.cli.terminal.console import print_json
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import MemorySection, Profile
from banaserve_bench.loadgen.client import OpenAiClient
from banaserve_bench.loadgen.modelled_time import StretchedClock, modelled_time
from banaserve_bench.loadgen.target import ServerUnderTest, find_target
from banaserve_bench.plan.probe.fit import StepFit
from banaserve_bench.plan.probe.judging import held_out_errors, stated_error
from banaserve_bench.plan.probe.measuring import ProbeSamples, ServerProbe, Tell, measured
from banaserve_bench.plan.probe.model_shape import read_shape
from banaserve_bench.plan.probe.report import ProbeReport
from banaserve_bench.plan.probe.schedule import ProbeLimits
from banaserve_bench.plan.probe.server_facts import ServerMetrics, read_metrics

_LIKE = "llama-3.1-8b-h100"
_LEAST_S = 10.0
_MOST_CONTEXT = 32_768
"""Context that is assumed of a server that does not tell one."""


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options of ``banaserve plan probe``."""

    url: str = option("address of the server, such as http://127.0.0.1:8000")
    api_key: str = key_option(
        "--api-key",
        "API key, if the server needs one",
        "file with that key",
        "BANASERVE_API_KEY",
        metavar="KEY",
    )
    served_model: str | None = option("name of the model in the API (the first one)", None)
    duration_s: float = option(
        "most time that the probes take",
        120.0,
        rule=Rule(lambda value: value >= _LEAST_S, f"give {_LEAST_S:g} s or more"),
    )
    save: Path | None = option("write a profile there", None, Path, metavar="FILE.toml")
    model: Path | None = option(
        "folder or config.json of the model, for its shape (where the server says it is)",
        None,
        Path,
        metavar="PATH",
    )
    step_tokens: int = option("the server's --max-num-batched-tokens (2048)", 2048, rule=AT_LEAST_1)
    kv_tokens: int | None = option(
        "capacity of an engine's KV cache (what the server's metrics say)",
        None,
        int,
        rule=AT_LEAST_1,
    )
    link_bandwidth: float | None = option(
        "bandwidth of the link between instances in bytes a second", None, float, rule=ABOVE_0
    )
    like: str = option("profile for all else that a probe cannot see", _LIKE, metavar="PROFILE")
    as_json: bool = option("print the result as JSON", False, name="--json")


class Unseen(NamedTuple):
    """Parts of a profile that a probe cannot measure.

    Attributes:
        profile: Profile with these parts.
        assumed: Parts that neither the server nor an option has told, each with the remedy.
    """

    profile: Profile
    assumed: Sequence[str]


def probe_command(options: ProbeOptions) -> int:
    """Measure the step times of a running server, and how wrong they are.

    The server must serve nothing else meanwhile. Unlike prompts are sent alone, many requests
    decode together, and requests arrive while others are served; the last ones and some of the
    others are not fitted, and tell the error.
    """
    if options.save is not None and options.save.suffix != ".toml":
        raise UserError(f"--save {options.save}: give a name that ends in .toml")
    if options.save is not None and not options.save.parent.is_dir():
        raise UserError(f"--save {options.save}: there is no folder {options.save.parent}")
    target = find_target(options.url, options.served_model, options.api_key or None)
    metrics = read_metrics(target.url, options.api_key or None)
    if metrics.num_engines is not None and metrics.num_engines > 1:
        raise UserError(
            f"{target.url} has {metrics.num_engines} engines: probe a server of one, since step "
            "times are an engine's"
        )
    unseen = unseen_parts(options, target, metrics)
    report = _probed(options, target, unseen)
    if options.as_json:
        print_json(report.as_json())
    else:
        report.show()
    if options.save is not None:
        report.save(options.save)
    return 0


def unseen_parts(options: ProbeOptions, target: ServerUnderTest, metrics: ServerMetrics) -> Unseen:
    """Return shape, memory and link: as given, else as the server tells, else assumed.

    Raises:
        UserError: A file or the profile to take them from cannot be read.
    """
    like, assumed = profiles.load(options.like), []
    shape, link = like.model, like.link
    told = (
        Path(target.root) if target.root and (Path(target.root) / "config.json").is_file() else None
    )
    path = options.model or told
    if path is not None:
        shape = read_shape(path)
    else:
        assumed.append(f"shape of the model, that of {like.name} (--model)")
    context = target.context_tokens or (shape.max_context_tokens if path else _MOST_CONTEXT)
    if not target.context_tokens:
        assumed.append(f"context of {context} tokens (the server tells none)")
    kv_tokens = options.kv_tokens or metrics.kv_tokens
    if kv_tokens is None:
        kv_tokens = like.memory.kv_tokens
        assumed.append(f"KV cache of {kv_tokens} tokens, that of {like.name} (--kv-tokens)")
    if options.link_bandwidth is None:
        assumed.append(f"link of {link.bytes_per_s / 1e9:g} GB/s (--link-bandwidth)")
    else:
        link = replace(link, bytes_per_s=options.link_bandwidth)
    assumed.append(f"steps of up to {options.step_tokens} tokens (--step-tokens)")
    found = replace(
        like,
        model=replace(shape, max_context_tokens=context),
        memory=MemorySection(kv_tokens, metrics.block_tokens or like.memory.block_tokens),
        link=link,
        decode_large=None,
        error=None,
    )
    return Unseen(found, assumed)


def _probed(options: ProbeOptions, target: ServerUnderTest, unseen: Unseen) -> ProbeReport:
    limits = ProbeLimits(
        unseen.profile.model.max_context_tokens,
        unseen.profile.memory.kv_tokens,
        options.step_tokens,
    )
    found = _measured(options, target, limits)
    samples = found.calm()
    fit = StepFit.of(samples.prompt_steps(limits, fitted=True), samples.batch_steps(fitted=True))
    name = options.save.stem if options.save else Path(target.model).name
    profile = replace(unseen.profile, name=name, prefill=fit.prefill, decode_small=fit.decode)
    errors = held_out_errors(samples, fit, profile, limits)
    at = datetime.now(UTC).date().isoformat()
    profile = replace(
        profile,
        source=f"banaserve plan probe of {Path(target.model).name}, {at}, {_range(samples)}",
        error=stated_error(errors),
    )
    return ProbeReport(target, profile, errors, samples, len(found.loads), unseen.assumed)


def _measured(options: ProbeOptions, target: ServerUnderTest, limits: ProbeLimits) -> ProbeSamples:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    is_silent = not console.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=is_silent
    ) as progress:
        task = progress.add_task("", total=1.0)
        return asyncio.run(
            _run(
                options,
                target,
                limits,
                lambda share, words: progress.update(task, completed=share, description=words),
            )
        )


async def _run(
    options: ProbeOptions, target: ServerUnderTest, limits: ProbeLimits, tell: Tell
) -> ProbeSamples:
    key = options.api_key or None
    paced = modelled_time(target.url)
    dilation = 1.0 if paced is None else paced.dilation

    async def num_requests() -> int | None:
        return (await asyncio.to_thread(read_metrics, target.url, key)).num_requests

    async with OpenAiClient(
        target.url,
        target.model,
        api_key=key,
        return_token_ids=True,
        timeout_s=options.duration_s / 2,
        read_late=True,
        clock=StretchedClock(dilation),
    ) as client:
        probe = ServerProbe(client, num_requests, secrets.randbits(64))
        return await measured(probe, limits, options.duration_s / dilation, tell)


def _range(samples: ProbeSamples) -> str:
    """Return the range of the fitted probes, in words."""
    prompts = max(tokens for found in samples.prompts.values() for tokens, _ in found)
    batch = max(one.batch for one in samples.batches)
    context = max(tokens for found in samples.batches.values() for tokens, _ in found)
    return f"prompts of up to {prompts} tokens, {batch} requests, contexts of up to {context:.0f}"
