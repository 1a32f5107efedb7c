"""Answers of one plain vLLM engine and of ``--pd 1:1``, whose modules move during streams.

``python -m benchmarks served``. Runs on any device: first vLLM's own API server answers, then
banaserve with the same weights, prompt by prompt, again from the store, and while layers, heads,
older blocks and, if the model has any, experts leave the decode instance and come home. Without a
model, one of random weights is made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import (
    Migration,
    MigrationRequest,
    MoveContext,
    MoveExperts,
    MoveHeads,
    MoveLayers,
    Return,
)
from banaserve.frontdoor.admin_client import AdminClient
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.loadgen.servers import (
    SHARES_GPU,
    Server,
    banaserve_server,
    log_folder,
    vllm_server,
)
from banaserve_bench.results import result
from banaserve_bench.results.result import Result
from banaserve_bench.results.statistics import median
from benchmarks.measurement import Measurement, Samples, model_of, parser_of, progress_of
from benchmarks.migration import done
from benchmarks.random_model import SIZES, random_weights

_NAME = "m"


@dataclass
class Seen:
    """Measurements of one server.

    Attributes:
        alone: Answers to prompts that were sent one at a time.
        again: Answers to the same prompts, which the store has by then.
        streams: Answers to prompts that run together, by the kind of module that left and came
            home meanwhile, or should have.
        moves: Moves of each kind, away and home.
        failed: Reason why a kind did not leave or did not come home, by kind.
    """

    alone: list[RequestRecord] = field(default_factory=list)
    again: list[RequestRecord] = field(default_factory=list)
    streams: dict[str, list[RequestRecord]] = field(default_factory=dict)
    moves: dict[str, tuple[Migration, Migration]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write the result; return 1 if an answer in float32 differs."""
    parser = parser_of("served", __doc__)
    add = parser.add_argument
    add("--model", default="", help="folder or name; random weights without it")
    add("--size", choices=sorted(SIZES), default="tiny", help="of random weights")
    add("--dtype", default="", help="float32 on a CPU and bfloat16 on a GPU without it")
    add("--prompts", type=positive, default=6)
    add("--prompt-tokens", type=positive, default=1000, help="of the longest")
    add("--output-tokens", type=positive, default=32)
    add("--stream-tokens", type=positive, default=200, help="of streams under which modules move")
    add("--kv-mib", type=positive, default=256, help="KV cache of each instance")
    add("--migration-stall", type=float, default=0.0, metavar="S", help="0: banaserve's default")
    given = parser.parse_args(list(argv))
    given.on_gpu = result.machine().gpu is not None
    given.dtype = given.dtype or ("bfloat16" if given.on_gpu else "float32")
    measurement = Measurement("served", given)

    def record_of(plain: Seen, seen: Seen) -> Result:
        return measurement.result(_figures(plain, seen), _notes(seen))

    def keep(plain: Seen, seen: Seen) -> None:
        measurement.keep(record_of(plain, seen))

    record = record_of(*asyncio.run(_measure(given, keep)))
    measurement.deliver(record)
    equal = [f.min for name, f in record.figures.items() if name.startswith("equal_")]
    return 0 if given.dtype != "float32" or min(equal) == 1.0 else 1


async def _measure(
    options: argparse.Namespace, keep: Callable[[Seen, Seen], None]
) -> tuple[Seen, Seen]:
    """Return what vLLM's own server answered, and what ours did; ``keep`` gets both meanwhile."""
    with _model(options) as (path, shape), contextlib.ExitStack() as stack:
        orders = list(_orders(shape))
        tell = stack.enter_context(progress_of(3 + len(orders), "plain vLLM answers"))
        same = (
            *("--dtype", options.dtype, "--kv-cache-memory-bytes", str(options.kv_mib << 20)),
            *("--max-model-len", "2048", "--enforce-eager"),
            *(SHARES_GPU if options.on_gpu else ()),
        )
        plain = Seen()
        with vllm_server(path, _NAME, *same) as server:
            async with OpenAiClient(server.url, _NAME, return_token_ids=True) as client:
                plain.alone = await closed_loop(client, _calls(options, shape), 1)
                plain.streams[""] = await _together(client, _streams(options, shape))
        tell("banaserve starts")
        with log_folder() as folder:
            run_dir = folder / "run"
            ours = ["--pd", "1:1", "--served-model-name", _NAME, "--run-dir", str(run_dir)]
            ours += ["--migration", "on", *same]
            if options.on_gpu:
                ours += ["--devices", "0;0"]
            if options.migration_stall:
                ours += ["--migration-stall", str(options.migration_stall)]
            with banaserve_server(path, *ours) as server:
                admin = AdminClient(*find_admin(run_dir))
                so_far = functools.partial(keep, plain)
                seen = await _serve(server, admin, options, shape, orders, tell, so_far)
    return plain, seen


async def _serve(
    server: Server,
    admin: AdminClient,
    options: argparse.Namespace,
    shape: Shape,
    orders: Sequence[MigrationRequest],
    tell: Callable[[str], None],
    keep: Callable[[Seen], None],
) -> Seen:
    """Return what our server answers; ``keep`` gets it after each part: the next may never end."""
    seen = Seen()
    async with OpenAiClient(server.url, _NAME, return_token_ids=True) as client:
        tell("prompts are handed over")
        seen.alone = await closed_loop(client, _calls(options, shape), 1)
        seen.again = await closed_loop(client, _calls(options, shape), 1)
        keep(seen)
        for order in orders:
            kind = type(order).__name__.removeprefix("Move").lower()
            tell(f"{kind} leave and come home")
            calls = _streams(options, shape)
            streams = seen.streams[kind] = []
            try:
                there = await _meanwhile(client, calls, admin, order, streams)
                streams += await _together(client, calls)
                home = await _meanwhile(client, calls, admin, Return("d0"), streams)
                seen.moves[kind] = there, home
            except UserError as error:
                seen.failed[kind] = str(error)
            keep(seen)
    return seen


async def _meanwhile(
    client: OpenAiClient,
    calls: Sequence[CompletionCall],
    admin: AdminClient,
    order: MigrationRequest,
    streams: list[RequestRecord],
) -> Migration:
    """Carry out a move while streams run, repeatedly, until it has ended; extend ``streams``.

    Raises:
        UserError: The move is refused, or has failed.
    """
    move = asyncio.create_task(done(admin, order))
    streams += await _together(client, calls)
    while not move.done():
        streams += await _together(client, calls)
    return await move


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the model: modules that moves may name, and token ids for prompts."""

    num_layers: int
    num_kv_heads: int
    num_experts: int
    vocab_size: int


def _orders(shape: Shape) -> Iterator[MigrationRequest]:
    """Yield moves of some of each kind of module, from the middle of the model."""
    first = shape.num_layers // 4
    last = max(first + 1, shape.num_layers // 2)
    yield MoveLayers("d0", "p0", (first, last))
    if shape.num_kv_heads > 1:
        some = tuple(range(shape.num_kv_heads // 2))
        yield MoveHeads("d0", "p0", dict.fromkeys(range(first, last), some))
        yield MoveContext("d0", "p0", (first, last))
    if shape.num_experts:
        half = tuple(range(shape.num_experts // 2))
        yield MoveExperts("d0", "p0", dict.fromkeys(range(first, last), half))


@contextlib.contextmanager
def _model(options: argparse.Namespace) -> Iterator[tuple[str, Shape]]:
    """Yield a folder with the model, and its shape; random weights are removed afterwards."""
    from transformers import AutoConfig

    weights: contextlib.AbstractContextManager[str] = random_weights(options.size, options.dtype)
    if options.model:
        weights = contextlib.nullcontext(model_of(options.model).path_or_id)
    with weights as path:
        config = AutoConfig.from_pretrained(path)
        experts = ("num_experts", "num_local_experts", "n_routed_experts")
        yield (
            path,
            Shape(
                config.num_hidden_layers,
                getattr(config, "num_key_value_heads", config.num_attention_heads),
                next((int(getattr(config, name)) for name in experts if hasattr(config, name)), 0),
                config.vocab_size,
            ),
        )


def _prompts(options: argparse.Namespace, shape: Shape, count: int, seed: int) -> list[list[int]]:
    """Return prompts of lengths from some tokens to the longest; no two begin alike."""
    draw = random.Random(seed)
    lengths = [max(5, options.prompt_tokens * n // count) for n in range(1, count + 1)]
    last = min(shape.vocab_size, 40_000)
    return [draw.choices(range(100, last), k=length) for length in lengths]


def _calls(options: argparse.Namespace, shape: Shape) -> list[CompletionCall]:
    prompts = _prompts(options, shape, options.prompts, 1)
    return CompletionCall.numbered(prompts, options.output_tokens)


def _streams(options: argparse.Namespace, shape: Shape) -> list[CompletionCall]:
    return CompletionCall.numbered(_prompts(options, shape, 3, 2), options.stream_tokens)


async def _together(client: OpenAiClient, calls: Sequence[CompletionCall]) -> list[RequestRecord]:
    return await closed_loop(client, list(calls), len(calls))


# ---- what was found


def _equal(ours: Sequence[RequestRecord], plain: Sequence[RequestRecord]) -> float:
    """Return the fraction of answers that have the same tokens; a failed request has others."""
    expected = {one.id: one.token_ids for one in plain}
    return sum(not one.error and one.token_ids == expected[one.id] for one in ours) / len(ours)


def _failures(records: Mapping[str, Sequence[RequestRecord]]) -> Iterator[str]:
    """Yield for each kind of which requests failed how many did, and the first error."""
    for kind, some in records.items():
        if errors := [one.error for one in some if one.error]:
            yield f"{kind}: {len(errors)} of {len(some)} requests failed: {errors[0]}"


def _ttft(records: Sequence[RequestRecord]) -> tuple[list[float], str]:
    return [median([one.ttft_s for one in records if one.ttft_s is not None])], "s"


def _figures(plain: Seen, ours: Seen) -> Samples:
    for why in _failures({"plain vLLM": (*plain.alone, *plain.streams[""])}):
        raise UserError(why)
    figures: Samples = {
        "equal_handed_over": ([_equal(ours.alone, plain.alone)], "fraction"),
        "equal_from_store": ([_equal(ours.again, plain.alone)], "fraction"),
        "ttft_vllm": _ttft(plain.alone),
        "ttft": _ttft(ours.alone),
        "ttft_from_store": _ttft(ours.again),
    }
    for kind, streams in ours.streams.items():
        figures[f"equal_{kind}"] = ([_equal(streams, plain.streams[""])], "fraction")
    for kind, (there, home) in ours.moves.items():
        seconds = sum(sum(move.seconds.values()) for move in there.moves)
        figures[f"{kind}_s"] = ([seconds], "s")
        figures[f"{kind}_stall"] = ([_fact(there, "stall_s")], "s")
        figures[f"{kind}_stall_home"] = ([_fact(home, "stall_s")], "s")
        copied = _fact(there, "precopy_bytes") + _fact(there, "commit_bytes")
        figures[f"{kind}_kv"] = ([copied], "B")
        figures[f"{kind}_weights"] = ([_fact(there, "weight_bytes")], "B")
    return figures


def _notes(ours: Seen) -> tuple[str, ...]:
    return (
        *(f"{kind} did not leave and come home: {why}" for kind, why in ours.failed.items()),
        *_failures({"handed over": ours.alone, "from the store": ours.again, **ours.streams}),
        "one prompt at a time, so that both servers compute the same batches; streams together",
        "in bfloat16 a batch may round otherwise, and near ties of tokens fall otherwise",
    )


def _fact(migration: Migration, name: str) -> float:
    return float(sum(move.facts.get(name, 0) for move in migration.moves))
