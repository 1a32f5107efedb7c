"""Real loads as sessions of calls: traces, agents, chats, trees and documents of a data folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import log
from pathlib import Path
from random import Random
from typing import Any

from banaserve.base.text.records import read_records, unpacked
from banaserve.sim.trace import Arrival, read_trace
from banaserve_route.policies.interface import ReplicaId
from banaserve_route.policies.prefixes.tree import make_tree
from banaserve_route.sim.arrivals import replay
from banaserve_route.sim.programs import MakeProgram, Program, ProgramCall
from banaserve_route.sim.replica import BLOCK_TOKENS, UNIT_BYTES, Accelerator
from benchmarks.prompt_digests import digests

Steps = list[list[ProgramCall] | float]
"""Calls of one session that are made at once, and pauses in seconds between them."""

_ALL = ReplicaId("all")
_UNLIMITED_BYTES = 1 << 40
_ENDLESS = 10**12


@dataclass(frozen=True, slots=True)
class LoadSession:
    """Calls of one client.

    Attributes:
        at_s: Arrival in its trace; None if arrivals are to be drawn.
        key: Sessions of one key come from one region.
    """

    steps: Steps
    at_s: float | None = None
    key: str = ""

    def calls(self) -> Iterator[ProgramCall]:
        for step in self.steps:
            if isinstance(step, list):
                yield from step

    def program(self) -> MakeProgram:
        """Return the program of the client."""

        def run(rng: Random, client: str) -> Program:
            return iter(self.steps)

        return run


ReadSessions = Callable[[Path, Random, int], Iterator[LoadSession]]
"""Function that yields sessions with at least a number of calls, from a data folder."""


def closed_loop(read: ReadSessions, data: Path) -> MakeProgram:
    """Return the program of a client that runs one session after another, without pauses.

    Each session has a name of its own, which a hash ring takes for its key.
    """

    def run(rng: Random, client: str) -> Program:
        for number, session in enumerate(read(data, rng, _ENDLESS)):
            for step in session.steps:
                if isinstance(step, list):
                    yield [replace(call, session=f"{client}/{number}") for call in step]

    return run


def unlimited(sessions: list[LoadSession], spec: Accelerator) -> tuple[float, float]:
    """Return the work and the hits of ``sessions`` with one unlimited cache for all.

    Returns:
        Seconds of work of one replica; share of the prompt tokens that are in the cache.
    """
    tree = make_tree(UNIT_BYTES, _UNLIMITED_BYTES, _UNLIMITED_BYTES)
    units = hit_units = output_units = num_calls = 0
    for session in sessions:
        for call in session.calls():
            hit_units += tree.match(call.prompt).get(_ALL, 0)
            units += len(call.prompt) // UNIT_BYTES
            output_units += len(call.output) // UNIT_BYTES
            num_calls += 1
            tree.add(call.prompt + call.output, _ALL)
    missed, output = (units - hit_units) * BLOCK_TOKENS, output_units * BLOCK_TOKENS
    # A decode step is shared by as many requests as memory and batch have room for.
    batch = min(spec.max_running, spec.kv_tokens * num_calls / (missed + output))
    step_ms = spec.decode_ms_per_request + spec.step_ms / batch
    return (spec.prefill_ms_per_token * missed + step_ms * output) / 1000, hit_units / units


def agents(data: Path, rng: Random, size: int) -> Iterator[LoadSession]:
    """Yield coding sessions of the manifest; pauses of people are cut to ``_PAUSE_S``.

    Turns are not in the manifest: 4 to 24 here, fewer than the field's median of 43.
    """
    told = json.loads(unpacked(data / "agent/coding_sessions_manifest.json"))["generation_params"]
    cache, delay, reset = told["cache"], told["inter_turn_delay"], told["reset"]
    groups = cache["layer1_5_groups"]
    weights = [rank ** -groups["zipf_alpha"] for rank in range(1, groups["num_groups"] + 1)]
    common = _named("layer1", cache["layer1_tokens"])
    while size > 0:
        [group] = rng.choices(range(len(weights)), weights)
        start = common + _named(f"layer1.5 {group}", cache["layer1_5_tokens"])
        history = start = start + _drawn(rng, cache["layer2"])
        turns, name = rng.randint(4, 24), f"agent {rng.random()}"
        steps: Steps = []
        for _ in range(turns):
            context = len(history) / UNIT_BYTES * BLOCK_TOKENS / told["max_prompt_tokens"]
            chance = reset["base_probability"] * (1 + reset["context_scaling"] * context)
            if context > 0.9 or rng.random() < chance:
                history = start
            history += _drawn(rng, told["new_tokens_per_turn"])
            call = ProgramCall(history, _drawn(rng, told["generation_length"]), name)
            history += call.output
            is_agent = rng.random() < delay["agentic_fraction"]
            kind = delay["agentic_delay" if is_agent else "human_delay"]
            pause_s = rng.lognormvariate(kind["mu"], kind["sigma"]) / 1000
            steps += [[call], min(_PAUSE_S, pause_s)]
        size -= turns
        yield LoadSession(steps)


def graphs(data: Path, rng: Random, size: int) -> Iterator[LoadSession]:
    """Yield instances of the graphs of agents' calls: calls that overlap in time are made at once.

    Instances of one graph share the system prompt, which is made as long as that of agents.
    """
    paths = sorted((data / "agent").glob("otel_*.json.zst"))
    found = [_levels(json.loads(unpacked(path))["spans"]) for path in paths]
    while size > 0:
        number = rng.randrange(len(found))
        salt = rng.randbytes(UNIT_BYTES)
        steps: Steps = []
        for pause_s, spans in found[number]:
            calls = []
            for span in spans:
                told = span["attributes"]
                text = told["gen_ai.input.messages"]
                answer = told.get("gen_ai.output.text") or told["gen_ai.output.messages"]
                prompt = _named(f"graph {number} {span['name']}", 4096) + salt + _text(text)
                calls.append(ProgramCall(prompt, _output(rng, len(answer)), salt.hex()))
            steps += [pause_s, calls]
            size -= len(calls)
        yield LoadSession(steps[1:])


def tools(data: Path, rng: Random, size: int) -> Iterator[LoadSession]:
    """Yield ToolBench's runs, of tools with Zipf popularity; functions are shared, the rest is not.

    A step's answer is what its successor's messages add.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for _, row in read_records(data / "agent/toolbench_steps.jsonl.zst"):
        runs.setdefault(row["id"], []).append(row)
    names = sorted(runs)
    weights = [1 / (rank + 1) for rank in range(8 * len(names))]
    while size > 0:
        [number] = rng.choices(range(len(weights)), weights)
        rows, copy = runs[names[number % len(names)]], number // len(names)
        functions = _text(json.dumps(rows[0]["functions"]))
        start = _named(f"tool {number % len(names)} {copy}", 64) + functions
        salt = rng.randbytes(UNIT_BYTES)
        steps: Steps = []
        for row in rows:
            prompt = start + salt + _text(json.dumps(row["messages"]))
            steps += [[ProgramCall(prompt, _output(rng, 400), salt.hex())], rng.expovariate(1.0)]
        size -= len(rows)
        yield LoadSession(steps)


def households(data: Path, rng: Random, size: int) -> Iterator[LoadSession]:
    """Yield ALFWorld episodes: two examples of a task, then turns of 26 tokens with an observation.

    The examples of each of twelve tasks are shared; the episode's turns are those of a third one.
    """
    rows = {
        r["key"]: r["prompt"]
        for _, r in read_records(data / "agent/alfworld_react_prompts.jsonl.zst")
    }
    tasks = sorted({key.rpartition("_")[0] for key in rows})
    while size > 0:
        task = rng.choice(tasks)
        turns = rows[f"{task}_2"].split("\n>")
        salt = rng.randbytes(UNIT_BYTES)
        history = _text(rows[f"{task}_0"] + rows[f"{task}_1"]) + salt
        steps: Steps = []
        for turn in turns:
            history += rng.randbytes(UNIT_BYTES * max(1, len(turn) // _BLOCK_CHARS))
            call = ProgramCall(history, rng.randbytes(2 * UNIT_BYTES), salt.hex())
            steps.append([call])
            history += call.output
        size -= len(turns)
        yield LoadSession(steps)


def documents(data: Path, rng: Random, size: int) -> Iterator[LoadSession]:
    """Yield LooGLE's questions, one a session, on forty documents: four copies of each of ten."""
    rows = [
        row
        for name in ("shortdep", "longdep")
        for _, row in read_records(data / f"loogle/{name}_qa_wiki.jsonl.zst")
    ]
    texts = [_text(row["input"]) for row in rows]
    while size > 0:
        number = rng.randrange(4 * len(rows))
        prompt = _named(f"document {number}", 64) + texts[number % len(rows)]
        call = ProgramCall(
            prompt + rng.randbytes(2 * UNIT_BYTES), rng.randbytes(2 * UNIT_BYTES), ""
        )
        size -= 1
        yield LoadSession([[call]], key=str(number))


def trees(branches: int) -> ReadSessions:
    """Return the reader of SkyWalker's trees of thoughts, four stages, on questions of GSM8K.

    The authors' client makes 30 calls for two branches and 340 for four; the paper says 15 and 85.
    """

    def read(data: Path, rng: Random, size: int) -> Iterator[LoadSession]:
        rows = _records(data / "gsm8k/train.jsonl.zst", 2000)
        common = _named("tree", 256)
        while size > 0:
            row = rng.choice(rows)
            level = [common + _text(row["question"]) + rng.randbytes(UNIT_BYTES)]
            steps: Steps = []
            for stage in range(4):
                calls = [
                    ProgramCall(
                        parent + _named(f"stage {stage}", 64), _output(rng, len(row["answer"])), ""
                    )
                    for parent in level
                    for _ in range(branches)
                ]
                steps.append(calls)
                level = [call.prompt + call.output for call in calls]
                size -= len(calls)
            yield LoadSession(steps)

    return read


def chats(data: Path, rng: Random, size: int) -> Iterator[LoadSession]:
    """Yield MT-bench's conversations, made longer: its turns again and again, after one start."""
    rows = [row["turns"] for row in _records(data / "chat/mt_bench.jsonl.zst")]
    common = _named("chat", 512)
    while size > 0:
        name, history = f"chat {rng.random()}", common
        turns = rng.randint(2, 10)
        steps: Steps = []
        for _ in range(turns):
            history += rng.randbytes(_units(len(rng.choice(rng.choice(rows)))))
            call = ProgramCall(history, _drawn(rng, {"mu": log(250), "sigma": 0.8}), name)
            steps += [[call], min(_PAUSE_S, rng.lognormvariate(log(8), 1.0))]
            history += call.output
        size -= turns
        yield LoadSession(steps)


def code(data: Path, rng: Random, size: int) -> Iterator[LoadSession]:
    """Yield HumanEval's tasks as Reflexion tries them: one to five attempts, each with the last."""
    rows = [row["prompt"] for _, row in read_records(data / "code/humaneval_py.jsonl.zst")]
    common = _named("code", 768)
    while size > 0:
        prompt = common + _text(rng.choice(rows)) + rng.randbytes(UNIT_BYTES)
        attempts, name = rng.randint(1, 5), f"code {rng.random()}"
        steps: Steps = []
        for _ in range(attempts):
            call = ProgramCall(prompt, _drawn(rng, {"mu": log(180), "sigma": 0.6}), name)
            steps += [[call], 0.5]
            prompt += call.output + rng.randbytes(_units(400))
        size -= attempts
        yield LoadSession(steps)


def _trace(name: str, hash_tokens: int = 512) -> ReadSessions:
    """Return the reader of ``size`` requests in a row of a trace, from a place that is drawn."""

    def read(data: Path, rng: Random, size: int) -> Iterator[LoadSession]:
        rows = trace_rows(data / f"traces/{name}.jsonl.zst")
        first = rng.randrange(max(1, len(rows) - size))
        for at_s, make in replay(rows[first : first + size], hash_tokens=hash_tokens):
            [step] = make(rng, "")
            assert isinstance(step, list)
            # Requests of one conversation agree in their third block.
            key = step[0].prompt[: 3 * hash_tokens // BLOCK_TOKENS * UNIT_BYTES].hex()
            yield LoadSession([step], at_s, key if rows[0].hash_ids else "")

    return read


@lru_cache
def trace_rows(path: Path) -> list[Arrival]:
    """Return the requests of a trace, which is read once."""
    return read_trace(path)


@lru_cache
def _records(path: Path, limit: int | None = None) -> list[Any]:
    return [row for _, row in read_records(path, limit)]


LOADS: Mapping[str, ReadSessions] = {
    "agents": agents,
    "agent graphs": graphs,
    "tool use": tools,
    "ALFWorld": households,
    "LooGLE": documents,
    "trees": trees(2),
    "chats": chats,
    "ShareGPT": _trace("sharegpt300_hashed", 16),
    "code": code,
    "Mooncake": _trace("mooncake_conversation"),
    "Azure": _trace("azure2023_conv"),
    "ServeGen": _trace("servegen_m-small_1h"),
}
"""Readers of sessions with at least a number of calls, by the load's name."""

_PAUSE_S = 10.0
_BLOCK_CHARS = 64


@lru_cache(maxsize=4096)
def _text(text: str) -> bytes:
    return digests(text.encode())


@lru_cache(maxsize=4096)
def _named(name: str, tokens: int) -> bytes:
    return Random(name).randbytes(tokens // BLOCK_TOKENS * UNIT_BYTES)


def _drawn(rng: Random, told: Mapping[str, Any]) -> bytes:
    tokens = min(told.get("max") or 1e6, rng.lognormvariate(told["mu"], told["sigma"]))
    return rng.randbytes(max(1, round(tokens / BLOCK_TOKENS)) * UNIT_BYTES)


def _output(rng: Random, characters: int) -> bytes:
    return rng.randbytes(_units(round(characters * rng.uniform(0.5, 1.5))))


def _units(characters: int) -> int:
    return max(1, characters // _BLOCK_CHARS) * UNIT_BYTES


def _levels(spans: list[dict[str, Any]]) -> list[tuple[float, list[dict[str, Any]]]]:
    """Return pause and spans of each group of spans that overlap in time."""
    ordered = sorted(spans, key=lambda span: span["start_time"])
    ends = accumulate((_seconds(span["end_time"]) for span in ordered), max)
    levels: list[tuple[float, list[dict[str, Any]]]] = []
    ended_s = 0.0
    for span, end_s in zip(ordered, ends, strict=True):
        start_s = _seconds(span["start_time"])
        if not levels or start_s >= ended_s:
            levels.append((min(_PAUSE_S, start_s - ended_s), [span]))
        else:
            levels[-1][1].append(span)
        ended_s = end_s
    return levels


def _seconds(stamp: str) -> float:
    hours, minutes, seconds = stamp[11:26].split(":")
    return 3600 * int(hours) + 60 * int(minutes) + float(seconds)
