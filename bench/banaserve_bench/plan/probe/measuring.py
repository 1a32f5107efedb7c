"""Measurement of a server's steps by streamed completions of known lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import NamedTuple, Self

from banaserve.base.errors import UserError
from banaserve.sim.trace import Arrival
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.loops import open_loop
from banaserve_bench.plan.probe.fit import MeasuredStep, StepFit
from banaserve_bench.plan.probe.schedule import (
    DECODE_STEPS,
    SHORTEST,
    BatchProbe,
    ProbeLimits,
    PromptProbe,
    mixed_load,
    num_steps,
    plan_of,
)
from banaserve_bench.results.statistics import median
from banaserve_bench.serving.summary import output_tokens, tpot_s

Tell = Callable[[float, str], None]
"""Function that shows the share of the time that has passed, and what is measured."""
NumRequests = Callable[[], Awaitable[int | None]]
_TOKEN_IDS = range(1000, 30_000)
"""Tokens that every vocabulary of some size has, and no special one."""
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 8
_FIRST_LOOKS = (SHORTEST, 8 * SHORTEST, 24 * SHORTEST)
_FIRST_BATCH = 4
_LEAST_GAPS = DECODE_STEPS // 2
_IDLE_TRIES, _IDLE_AGAIN_S = 5, 0.2
_BATCH_TRIES = 3
"""Most times that a batch is sent whose steps cannot be seen; a busy machine scatters one."""
_MOST_SLOWER = 0.2
"""Share by which a round may be slower than the fastest probes; beyond it something disturbs it."""
_MOST_SPREAD = 0.25
"""Largest usual spread of equal probes in rounds that nothing disturbs."""


class MixedRequest(NamedTuple):
    """Request that arrives while others are served; times in seconds, medians over rounds.

    Attributes:
        at_s: Time of sending, after that of the first request.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    latency_s: float

    @classmethod
    def of(cls, found: Sequence[RequestRecord], loads: Sequence[Sequence[RequestRecord]]) -> Self:
        """Return the request of the records ``found``, one of each of ``loads``."""
        sent_s = [one.sent_at_s - load[0].sent_at_s for one, load in zip(found, loads, strict=True)]
        return cls(
            median(sent_s),
            found[0].prompt_tokens or 1,
            output_tokens(found[0]),
            median([one.ttft_s or 0.0 for one in found]),
            median([tpot_s(one) or 0.0 for one in found]),
            median([one.token_at_s[-1] - one.sent_at_s for one in found]),
        )


@dataclass(frozen=True, slots=True)
class ProbeSamples:
    """Everything that has been measured.

    Attributes:
        prompts: Tokens by the server's count and TTFT of each round, by probe.
        batches: Mean context and time of a step in each round, by probe.
        loads: Records of the same mixed requests in each round.
    """

    prompts: dict[PromptProbe, list[tuple[int, float]]]
    batches: dict[BatchProbe, list[tuple[float, float]]]
    loads: list[list[RequestRecord]]

    def prompt_steps(self, limits: ProbeLimits, *, fitted: bool) -> list[MeasuredStep]:
        """Return the steps of prompts alone, either the fitted ones or the held-out ones."""
        return [
            MeasuredStep(tokens := found[0][0], 0, 0, _seconds(found), num_steps(tokens, limits))
            for probe, found in self.prompts.items()
            if probe.is_fitted == fitted
        ]

    def batch_steps(self, *, fitted: bool) -> list[MeasuredStep]:
        """Return the steps that decode, either the fitted ones or the held-out ones."""
        return [
            MeasuredStep(0, probe.batch, median([one for one, _ in found]), _seconds(found))
            for probe, found in self.batches.items()
            if probe.is_fitted == fitted
        ]

    @property
    def spread(self) -> float:
        """Usual relative spread of equal probes."""
        return median([max(_seconds(of)) / min(_seconds(of)) - 1 for of in self._probes()])

    def calm(self) -> ProbeSamples:
        """Return the samples of rounds that are not much slower than the fastest probes.

        Raises:
            UserError: There are fewer than two such rounds, or equal probes differ much in them.
        """
        kept = [number for number in range(len(self.loads)) if self._is_calm(number)]
        found = ProbeSamples(
            {one: [of[n] for n in kept] for one, of in self.prompts.items()},
            {one: [of[n] for n in kept] for one, of in self.batches.items()},
            [self.loads[n] for n in kept],
        )
        if len(kept) < _LEAST_ROUNDS or found.spread > _MOST_SPREAD:
            raise UserError(
                f"equal probes differ by {self.spread:.0%}: the server, or its machine, is under "
                "other load: probe it while they do nothing else"
            )
        return found

    def _is_calm(self, number: int) -> bool:
        """Return whether neither prompts, nor batches, nor mixed requests of a round were slow."""
        latencies = (
            [(0, one.latency_s or 0.0) for one in found] for found in self._mixed_records()
        )
        for kind in (self.prompts.values(), self.batches.values(), latencies):
            ratios = [seconds[number] / min(seconds) for seconds in map(_seconds, kind)]
            if median(ratios) > 1 + _MOST_SLOWER:
                return False
        return True

    def _mixed_records(self) -> list[tuple[RequestRecord, ...]]:
        return list(zip(*self.loads, strict=True))

    def keep(self, num_rounds: int) -> None:
        """Drop what was measured after ``num_rounds`` whole rounds."""
        for found in (*self._probes(), self.loads):
            del found[num_rounds:]

    def _probes(self) -> list[list[tuple[int, float]] | list[tuple[float, float]]]:
        return [*self.prompts.values(), *self.batches.values()]

    def mixed(self) -> list[MixedRequest]:
        """Return the mixed requests with the medians of their times."""
        return [MixedRequest.of(found, self.loads) for found in self._mixed_records()]


class ServerProbe:
    """Probes of one server.

    Args:
        client: Client that asks for token ids.
        num_requests: Function that returns the number of requests in the server; None if the server
            does not say.
        seed: Seed of the prompts; another one for each run, since a server caches prefixes.
    """

    def __init__(self, client: OpenAiClient, num_requests: NumRequests, seed: int) -> None:
        self.clock = client.clock
        self.draws = Random(seed)
        self._client = client
        self._num_requests = num_requests
        self._count = 0

    async def check_idle(self) -> None:
        """Check that the server serves nothing else.

        Raises:
            UserError: It does.
        """
        found: int | None = None
        for _ in range(_IDLE_TRIES):  # the metrics may be older than the last answer
            found = await self._num_requests()
            if not found:
                return
            await self.clock.sleep(_IDLE_AGAIN_S)
        raise UserError(
            f"the server is under other load ({found} requests): probe it while it serves nothing "
            "else"
        )

    async def prompt(self, tokens: int) -> tuple[int, float]:
        """Return prompt tokens by the server's count, and TTFT, of a prompt alone."""
        record = _checked(await self._client.send(self._call(tokens, 1)))
        return record.prompt_tokens or 0, record.ttft_s or 0.0

    async def batch(self, batch: int, prompt_tokens: int, output: int) -> tuple[float, float]:
        """Return mean context and time of the steps in which all requests decode.

        Raises:
            UserError: A request failed, or the steps cannot be seen in any of several tries.
        """
        most = 0
        for _ in range(_BATCH_TRIES):
            calls = [self._call(prompt_tokens, output) for _ in range(batch)]
            records = await asyncio.gather(*map(self._client.send, calls))
            found = decode_step([_checked(record) for record in records])
            if found.num_gaps >= _LEAST_GAPS:
                return found.context, found.seconds
            most = max(most, found.num_gaps)
        raise UserError(
            f"only {most} steps with all of {batch} streams can be seen: something gathers the "
            "pieces of a stream, the server does not run these requests together, or this machine "
            "is under other load"
        )

    async def load(self, rows: Sequence[Arrival]) -> list[RequestRecord]:
        """Return the records of requests that are sent when they arrive."""
        calls = [self._call(row.prompt_tokens, row.output_tokens) for row in rows]
        records = await open_loop(self._client, calls, [row.at_s for row in rows])
        return [_checked(record) for record in records]

    def _call(self, tokens: int, output: int) -> CompletionCall:
        self._count += 1
        prompt = self.draws.choices(_TOKEN_IDS, k=tokens)
        return CompletionCall.exact(f"probe{self._count}", prompt, output)


class _TimeUpError(Exception):
    """The time for the probes has passed."""


async def measured(
    probe: ServerProbe, limits: ProbeLimits, duration_s: float, tell: Tell
) -> ProbeSamples:
    """Measure a server for at most ``duration_s``; all rounds, also disturbed ones.

    Raises:
        UserError: The server fails, is under other load, or is too slow for ``duration_s``.
    """
    now, began_s = probe.clock.now, probe.clock.now()

    async def check(words: str) -> None:
        passed = (now() - began_s) / duration_s
        tell(passed, words)
        if passed > 1:
            raise _TimeUpError
        await probe.check_idle()

    await check("first look")
    rough = await _first_look(probe, limits)
    plan = plan_of(rough, duration_s - (now() - began_s), limits)
    samples = ProbeSamples({one: [] for one in plan.prompts}, {one: [] for one in plan.batches}, [])
    rows = mixed_load(probe.draws, plan.mixed_tokens, rough, limits)
    longest_s = 0.0
    for number in range(1, _MOST_ROUNDS + 1):
        round_s = now()
        if number > _LEAST_ROUNDS and round_s + longest_s > began_s + duration_s:
            break
        try:
            await _round(probe, limits, rows, samples, check)
        except _TimeUpError:
            if number <= _LEAST_ROUNDS:
                raise UserError(
                    "the server is slower than its first answers: give more than "
                    f"{duration_s:g} s as --duration"
                ) from None
            samples.keep(number - 1)
            break
        longest_s = max(longest_s, now() - round_s)
    return samples


async def _first_look(probe: ServerProbe, limits: ProbeLimits) -> StepFit:
    """Return a first estimate, each by the faster one of two probes: the first is cold."""
    prompts, batches = [], []
    lengths = [one for one in _FIRST_LOOKS if one <= limits.context_tokens // 2]
    for batch, tokens in (*((1, one) for one in lengths), (_FIRST_BATCH, SHORTEST)):
        found = [await probe.batch(batch, tokens, DECODE_STEPS + batch) for _ in range(2)]
        batches.append(MeasuredStep(0, batch, found[0][0], (min(_seconds(found)),)))
    for tokens in lengths:
        seen = [await probe.prompt(tokens) for _ in range(2)]
        steps = num_steps(tokens, limits)
        prompts.append(MeasuredStep(seen[0][0], 0, 0, (min(_seconds(seen)),), steps))
    return StepFit.of(prompts, batches)


async def _round(
    probe: ServerProbe,
    limits: ProbeLimits,
    rows: Sequence[Arrival],
    samples: ProbeSamples,
    check: Callable[[str], Awaitable[None]],
) -> None:
    for prompt, ttfts in samples.prompts.items():
        await check(f"prompt of {prompt.tokens} tokens")
        ttfts.append(await probe.prompt(prompt.tokens))
    await check("requests that arrive while others are served")
    samples.loads.append(await probe.load(rows))
    for one, steps in samples.batches.items():
        await check(f"{one.batch} requests after {one.prompt_tokens} tokens each")
        output = one.output_tokens(limits.step_tokens)
        steps.append(await probe.batch(one.batch, one.prompt_tokens, output))


class DecodeSteps(NamedTuple):
    """Steps in which all requests of a batch decode.

    Attributes:
        context: Mean context in tokens.
        seconds: Mean time of a step.
        num_gaps: Number of times that a token came after the one before it, not together with it.
    """

    context: float
    seconds: float
    num_gaps: int


def decode_step(records: Sequence[RequestRecord]) -> DecodeSteps:
    """Return the steps in which all ``records`` decode; zeros if there are none."""
    last = max(records, key=lambda one: one.token_at_s[0])
    until_s = min(one.token_at_s[-1] for one in records)
    times_s = [at_s for at_s in last.token_at_s if at_s <= until_s]
    num_gaps = sum(a < b for a, b in pairwise(times_s))
    if not num_gaps:
        return DecodeSteps(0.0, 0.0, 0)
    middle_s = (times_s[0] + times_s[-1]) / 2
    contexts = [
        (one.prompt_tokens or 0) + sum(at_s <= middle_s for at_s in one.token_at_s)
        for one in records
    ]
    step_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
    return DecodeSteps(sum(contexts) / len(contexts), step_s, num_gaps)


def _checked(record: RequestRecord) -> RequestRecord:
    """Return a record whose lengths and times are known.

    Raises:
        UserError: The request failed, or the server does not tell them.
    """
    if record.status in (400, 422):
        raise UserError(
            f"the server refuses a probe ({record.error}): it must take token ids, ignore_eos and "
            "return_token_ids, as vLLM and banaserve do"
        )
    if record.status == 200 and record.error and record.first_token_at_s is None:
        raise UserError(f"the server streams no tokens ({record.error}): a probe needs a stream")
    record.checked()
    if record.prompt_tokens is None or record.completion_tokens is None or not record.token_at_s:
        raise UserError("the server tells no usage, so that lengths are unknown: is it an old one?")
    return record


def _seconds(found: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    return tuple(seconds for _, seconds in found)
