"""Streams that never end while layers and heads move, and what their tokens should be."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import small_model
import written_prompts
from banaserve.base import models
from banaserve.base.errors import UserError
from banaserve.contracts.migration_api import (
    InstancePlacement,
    Migration,
    MigrationRequest,
    MoveContext,
    MoveHeads,
    MoveLayers,
    Return,
)
from banaserve.frontdoor.admin_client import AdminClient
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.servers import Server
from fork_server import ForkServer
from observing import until, writer, writers
from reference import reference_tokens, tokenizer

OUTPUT_TOKENS = 20
DEADLINE_S = 120.0
SAMPLING = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}


class Reference:
    """Prompts, and what one plain vLLM engine answers."""

    def __init__(self, forks: ForkServer, num_prompts: int, longest: int, seed: int) -> None:
        model = small_model.resolve()
        tokenize = tokenizer(model.path_or_id)
        few = max(1, num_prompts // 8)
        found = written_prompts.prompts("synthetic", num_prompts - few, 40, 160, seed, tokenize)
        found += written_prompts.prompts(
            "synthetic", few, longest // 2, longest, seed + 1, tokenize
        )
        self.prompts = [tokenize(prompt.text) for prompt in found]
        answers = reference_tokens(forks, model.path_or_id, self.prompts, {"it": SAMPLING})
        self.tokens = answers["it"]


class Load:
    """Keeps ``num_streams`` requests under way, over all prompts again and again.

    Attributes:
        records: Of requests that have ended.
    """

    def __init__(self, server: Server, reference: Reference, num_streams: int) -> None:
        self.records: list[RequestRecord] = []
        self._server = server
        self._reference = reference
        self._num_streams = num_streams
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        self.wait_tokens(self._num_streams)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "streams hang"

    async def _run(self) -> None:
        async with OpenAiClient(
            self._server.url, models.PACKAGED, return_token_ids=True, timeout_s=DEADLINE_S
        ) as client:
            await asyncio.gather(*(self._stream(client) for _ in range(self._num_streams)))

    async def _stream(self, client: OpenAiClient) -> None:
        while not self._stop.is_set():
            number = next(self._numbers) % len(self._reference.prompts)
            call = CompletionCall(
                str(number),
                prompt=self._reference.prompts[number],
                max_tokens=OUTPUT_TOKENS,
                extra={"ignore_eos": True},
            )
            self.records.append(await client.send(call))

    def wait_tokens(self, num_tokens: int) -> None:
        """Return when so many more tokens have been generated."""
        enough = generated(self._server) + num_tokens
        until(lambda: generated(self._server) >= enough, f"{num_tokens} more tokens")

    def check(self) -> None:
        """Every answer that has ended is right."""
        assert self.records
        assert [record.error for record in self.records if record.error] == []
        wrong = [
            record.id
            for record in self.records
            if record.token_ids != self._reference.tokens[int(record.id)]
        ]
        assert wrong == [], f"{len(wrong)} of {len(self.records)} answers have other tokens"


def answers(
    server: Server, reference: Reference, which: Sequence[int], salt: str
) -> list[RequestRecord]:
    """To some prompts one after the other, which share no block with those of another salt."""

    async def ask() -> list[RequestRecord]:
        extra = {"ignore_eos": True, "cache_salt": salt}
        async with OpenAiClient(server.url, models.PACKAGED, return_token_ids=True) as client:
            return [
                await client.send(
                    CompletionCall(
                        str(n), reference.prompts[n], max_tokens=OUTPUT_TOKENS, extra=extra
                    )
                )
                for n in which
            ]

    return asyncio.run(ask())


def generated(server: Server) -> float:
    return server.metric("vllm:generation_tokens_total")


def done(admin: AdminClient, ask: MigrationRequest) -> Migration:
    """Run a migration, which must succeed."""
    migration = admin.run(ask)
    assert (migration.state, migration.error) == ("done", ""), migration
    return migration


def until_phase(admin: AdminClient, migration: Migration, phase: str) -> Migration:
    """Return as soon as a migration is in ``phase``, or past it."""
    while migration.is_open and migration.moves[0].phase != phase:
        migration = admin.migrations.show(migration.id)
    return migration


def until_clean(server: Server, admin: AdminClient) -> None:
    """Nothing is away, no guest is left, no lease and no request."""

    def is_clean() -> bool:
        found = admin.placement()
        return not found.guests and all(
            instance.state == "ready"
            and not instance.migration_blocker
            and not instance.units
            and instance.blocks_gained == 0
            for instance in found.instances
        )

    until(is_clean, "everything is at home and no guest is left")
    until(lambda: server.metric("banaserve_kvstore_leased_slots") == 0, "no leases")
    until(lambda: server.metric("banaserve_kvstore_writing_slots") == 0, "nothing half written")
    until(lambda: server.metric("banaserve_requests_in_flight") == 0, "no request in flight")


@contextlib.contextmanager
def streaming(server: Server, reference: Reference, num_streams: int) -> Iterator[Load]:
    """Streams while the block runs; afterwards all of their tokens are checked."""
    with Load(server, reference, num_streams) as load:
        yield load
    load.check()


# ---- what is where


def placed(admin: AdminClient, instance: str) -> InstancePlacement:
    (found,) = [one for one in admin.placement().instances if one.id == instance]
    return found


def units_away(admin: AdminClient) -> list[str]:
    return [unit.unit_id for one in admin.placement().instances for unit in one.units]


def bring_home(admin: AdminClient, instance: str) -> None:
    """Return when nothing is away; a process that dies under a move may end that."""

    def is_home() -> bool:
        with contextlib.suppress(UserError):
            admin.run(Return(instance))
        with contextlib.suppress(UserError):
            return units_away(admin) == []
        return False

    until(is_home, "everything is at home")


def guests_of(run_dir: Path) -> list[int]:
    """Processes that write a guest's log."""
    return [pid for name, pid in writers(run_dir) if name.startswith("guest-")]


def strike_guests(run_dir: Path, number: int) -> None:
    """Send a signal to every guest."""
    for pid in guests_of(run_dir):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def strike_engine(run_dir: Path, instance: str, number: int = signal.SIGKILL) -> None:
    os.kill(writer(run_dir, instance), number)


def ended(admin: AdminClient, migration: Migration) -> Migration:
    """A migration's end; it must come soon after a fault."""
    for _ in range(60):
        if not migration.is_open:
            return migration
        migration = admin.migrations.show(migration.id, wait_s=1.0)
    raise AssertionError(f"still {migration.moves[0].phase}")


def random_ask(rng: random.Random) -> MigrationRequest:
    """Small ranges more often than large ones; heads of up to three layers."""
    host, target = rng.sample(["d0", "d1", "p0"], 2)
    kind = rng.choice(["layers", "layers", "heads", "heads", "context", "return"])
    if kind == "return":
        return Return(host)
    first = rng.randrange(30)
    if kind != "heads":
        move = MoveLayers if kind == "layers" else MoveContext
        return move(host, target, (first, min(30, first + rng.choice([1, 2, 5, 10]))))
    layers = rng.sample(range(30), rng.randint(1, 3))
    return MoveHeads(
        host, target, {n: tuple(sorted(rng.sample(range(3), rng.randint(1, 3)))) for n in layers}
    )
