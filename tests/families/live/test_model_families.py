"""Families of models: tokens of one engine through hand-over, store and moves, or one line why not.

What is shown here is recorded for ``docs/models.md``, see ``support_record.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import random_models
from adapter_files import RANK, write_adapter
from banaserve.base.errors import BanaServeError
from banaserve.base.platform.run_dir import find_admin
from banaserve.cli.admin.migrate import experts_for
from banaserve.contracts.migration_api import (
    ExpertLoadRequest,
    MoveContext,
    MoveExperts,
    MoveHeads,
    MoveLayers,
    Return,
)
from banaserve.frontdoor.admin_client import AdminClient
from fork_server import ForkServer
from observing import until, writer
from reference import reference_tokens
from server_run import Run
from streams import Answer, Kind, asked_all, back
from support_record import record
from types_that_run import TYPES, first_that_runs

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Family:
    """How a family is served and measured.

    Attributes:
        model: Of ``random_models``; the family's own name where empty.
        options: Of the server.
        has_adapter: Requests name a LoRA adapter.
        has_drafter: A small model guesses at next tokens (EAGLE).
        custom_ops: What the plain engine is told of vLLM's kernels, as the server tells its own.
        types: Types of numbers: the first that plain vLLM runs on this processor is taken.
        kept_tokens: Tokens of a block where states are kept at its end; 0 where there are none.
        no_layers: Words of the line that refuses to move layers; empty where they move.
        no_heads: The same of heads.
        no_experts: The same of experts.
        no_older: The same of older blocks.
    """

    model: str = ""
    options: tuple[str, ...] = ()
    has_adapter: bool = False
    has_drafter: bool = False
    custom_ops: tuple[str, ...] = ()
    types: tuple[str, ...] = TYPES
    kept_tokens: int = 0
    no_layers: str = ""
    no_heads: str = ""
    no_experts: str = "has no experts"
    no_older: str = ""

    @property
    def most_computed(self) -> int:
        """Tokens that are computed of all prompts whose prefixes the store has.

        The last one of each always is, and with states all behind the last whole block.
        """
        kept = self.kept_tokens or 1
        return sum(length - (length - 1) // kept * kept for length in LENGTHS)


LATENT = "one latent for all of its heads"
# Of vLLM's rotary kernel for CPUs answers depend on the batch: see ``rotate_latents_in_torch``.
MLA = Family(custom_ops=("-rotary_embedding",), no_heads=LATENT, no_experts="", no_older=LATENT)
WITHOUT_KERNEL = (
    'with --compilation-config \'{"custom_ops": ["-rotary_embedding"]}\', which servers of ours '
    "set by themselves: with vLLM's own kernel answers depend on what else is in the batch"
)
BY_RANKS = "each is on one of the tensor-parallel ranks"
ADAPTERS = "LoRA adapters would have to move"
DRAFTS = "speculative decoding reads states"
STATES = "states of Mamba or linear-attention layers would have to move"
HYBRID = Family(
    kept_tokens=128, no_layers=STATES, no_heads=STATES, no_experts=STATES, no_older=STATES
)
WITHOUT_PREFIXES = (
    "with --no-enable-prefix-caching, which servers of ours set by themselves: the store keeps "
    "prefixes and their states"
)
NGRAMS = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
FAMILIES = {
    "qwen3_moe": Family(no_experts=""),
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "gemma3_text": Family(no_older="a sliding window"),
    "gpt_oss": Family(no_heads="attention sinks", no_experts="", no_older="attention sinks"),
    "granite": Family(),
    "llama_adapter": Family(
        "llama",
        ("--enable-lora", "--max-lora-rank", str(RANK)),
        has_adapter=True,
        no_layers=ADAPTERS,
        no_heads=ADAPTERS,
        no_experts=ADAPTERS,
        no_older=ADAPTERS,
    ),
    "llama_compiled": Family("llama", ("--no-enforce-eager",)),
    "llama_ngrams": Family(
        "llama",
        ("--speculative-config", NGRAMS),
        no_layers=DRAFTS,
        no_heads=DRAFTS,
        no_experts=DRAFTS,
        no_older=DRAFTS,
    ),
    "llama_eagle": Family(
        "llama",
        has_drafter=True,
        no_layers=DRAFTS,
        no_heads=DRAFTS,
        no_experts=DRAFTS,
        no_older=DRAFTS,
    ),
    "llama_two_ranks": Family("llama", ("--tensor-parallel-size", "2"), no_heads=BY_RANKS),
    "llama_prefill_two_ranks": Family("llama", ("--prefill-tensor-parallel-size", "2")),
    "llama_decode_two_ranks": Family(
        "llama", ("--decode-tensor-parallel-size", "2"), no_heads=BY_RANKS
    ),
    "deepseek_v2_prefill_two_ranks": Family(
        "deepseek_v2",
        ("--prefill-tensor-parallel-size", "2"),
        custom_ops=MLA.custom_ops,
        no_heads=MLA.no_heads,
        no_experts="",
        no_older=LATENT,
    ),
    "qwen3_moe_two_ranks": Family(
        "qwen3_moe", ("--tensor-parallel-size", "2"), no_heads=BY_RANKS, no_experts=""
    ),
    "deepseek_v2_two_ranks": Family(
        "deepseek_v2",
        ("--tensor-parallel-size", "2"),
        custom_ops=MLA.custom_ops,
        no_heads=BY_RANKS,
        no_experts="",
        no_older=LATENT,
    ),
    "phi3": Family(),
    "falcon_h1": HYBRID,
    "granitemoehybrid": HYBRID,
    "granitemoehybrid_two_ranks": replace(
        HYBRID, model="granitemoehybrid", options=("--tensor-parallel-size", "2")
    ),
    # vLLM 0.32's linear attention on a CPU knows no other type.
    "qwen3_next": replace(HYBRID, types=("bfloat16",), kept_tokens=256),
}
EVERY_TIME = ("qwen3_moe", "deepseek_v2", "granitemoehybrid")
LENGTHS = (5, 16, 33, 100, 256, 300)
OUTPUT_TOKENS = 24
NUM_STREAMS = 3
STREAM_TOKENS = 400
MOST_STARTS = 3
OPTIONS = (
    *("--max-model-len", "1024", "--skip-prefill-below-tokens", "0"),
    *("--kv-cache-memory-bytes", str(96 << 20), "--kv-store-size", "256MiB"),
)
NAME = "m"


def by_mark(name: str) -> Any:
    """A family's parameter, which a short run leaves out unless it is of ``EVERY_TIME``."""
    return pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.long)


def prompts() -> list[list[int]]:
    """One shorter than a block, one of a block, and others: no two begin alike."""
    random = np.random.default_rng(11)
    return [random.integers(100, 40_000, length).tolist() for length in LENGTHS]


def asking(prompt: list[int], max_tokens: int) -> Kind:
    body = {"model": NAME, "prompt": prompt, "temperature": 0.0, "max_tokens": max_tokens}
    streamed = {"stream": True, "return_token_ids": True, "ignore_eos": True}
    return Kind("/v1/completions", body | streamed)


@pytest.fixture(
    scope="module",
    params=[by_mark(name) for name in FAMILIES],
)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``make(model)``: its folder."""
    folder = tmp_path_factory.mktemp("models")

    def made(name: str) -> str:
        path = folder / name
        return str(path) if path.exists() else random_models.make(name, path)

    return made


@pytest.fixture(scope="module")
def model(make: Callable[[str], str], family: str) -> str:
    return make(FAMILIES[family].model or family)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, family: str) -> str:
    """The folder of the family's LoRA adapter; empty where it has none."""
    if not FAMILIES[family].has_adapter:
        return ""
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(folder, 1, *random_models.ADAPTED)
    return str(folder)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, family: str, model: str) -> tuple[str, ...]:
    """Options for the small model that guesses; none where the family has none."""
    if not FAMILIES[family].has_drafter:
        return ()
    path = random_models.make_drafter(tmp_path_factory.mktemp("drafter") / "m", model)
    how = {"method": "eagle", "model": path, "num_speculative_tokens": 2}
    return ("--speculative-config", json.dumps(how))


@pytest.fixture(scope="module")
def plain(
    fork_server: ForkServer, model: str, family: str, adapter: str
) -> tuple[str, list[list[int]]]:
    """The type of one engine, and its tokens: long answers, which begin with the short ones."""
    sampling = {"temperature": 0.0, "max_tokens": STREAM_TOKENS, "ignore_eos": True}

    def run(dtype: str) -> list[list[int]]:
        return reference_tokens(
            fork_server,
            model,
            prompts(),
            {"it": sampling},
            dtype=dtype,
            custom_ops=FAMILIES[family].custom_ops,
            adapter=adapter,
            prefix_caching=not FAMILIES[family].kept_tokens,
        )["it"]

    return first_that_runs(model, run, FAMILIES[family].types)


@pytest.fixture(scope="module")
def dtype(plain: tuple[str, list[list[int]]]) -> str:
    return plain[0]


@pytest.fixture(scope="module")
def expected(plain: tuple[str, list[list[int]]]) -> list[list[int]]:
    return plain[1]


@pytest.fixture(scope="module")
def ssd(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    return tmp_path_factory.mktemp(f"ssd-{family}")


@pytest.fixture(scope="module")
def start(
    serve: Callable[..., Run],
    model: str,
    dtype: str,
    ssd: Path,
    family: str,
    adapter: str,
    drafter: tuple[str, ...],
) -> Callable[..., Run]:
    def run() -> Run:
        # What is asked for is the adapter, where there is one.
        name = ("other", "--lora-modules", f"{NAME}={adapter}") if adapter else (NAME,)
        return serve(
            *("--pd", "1:1", "--model", model, *OPTIONS, "--served-model-name", *name),
            *("--kv-store-ssd", str(ssd), "--kv-store-ssd-size", "1GiB", "--migration-poison"),
            *("--dtype", dtype, *FAMILIES[family].options, *drafter),
        )

    return run


@pytest.fixture(scope="module")
def server(start: Callable[..., Run]) -> Iterator[Run]:
    run = start()
    yield run
    if run.process.poll() is None:
        assert run.end() == 0


def tokens_of(answers: dict[str, Answer]) -> list[list[int]]:
    assert [one.error for one in answers.values()] == [""] * len(answers)
    return [one.tokens[0] for one in answers.values()]


def answers(server: Run) -> list[list[int]]:
    kinds = {str(n): asking(prompt, OUTPUT_TOKENS) for n, prompt in enumerate(prompts())}
    return tokens_of(asyncio.run(asked_all(server, kinds)))


def computed(server: Run, instance: str) -> float:
    """Prompt tokens that the engine has computed since it started."""
    name = "banaserve_prompt_tokens_computed_total"
    return server.metric(name, instance_id=instance)


def begins(expected: list[list[int]]) -> list[list[int]]:
    return [tokens[:OUTPUT_TOKENS] for tokens in expected]


def refusal(admin: AdminClient, order: Any) -> str:
    """Why the order is not carried out: at once, or when it was tried; empty where it was."""
    try:
        return str(admin.run(order).error)
    except BanaServeError as refused:
        return str(refused)


def test_prefill_hands_over_to_decode(
    server: Run, expected: list[list[int]], family: str, request: pytest.FixtureRequest
) -> None:
    assert answers(server) == begins(expected)
    assert computed(server, "p0") == sum(LENGTHS)
    # All of a prompt is handed over, tails included: at most its last token is computed again.
    assert computed(server, "d0") <= len(LENGTHS)
    is_said = "MLA without vLLM's rotary kernel" in server.printed()
    assert is_said == bool(FAMILIES[family].custom_ops)
    is_said = "its states lie in the store" in server.printed()
    assert is_said == bool(FAMILIES[family].kept_tokens)
    if FAMILIES[family].has_drafter:
        assert server.metric("vllm:spec_decode_num_drafts_total", instance_id="d0") > 0
    note = WITHOUT_KERNEL if FAMILIES[family].custom_ops else ""
    note = WITHOUT_PREFIXES if FAMILIES[family].kept_tokens else note
    record(family, "plain vLLM", request.node.nodeid, note=note)
    record(family, "hand-over", request.node.nodeid)


def in_mid_stream(
    server: Run, expected: list[list[int]], order: Any, sums_dtype: str = "float32"
) -> None:
    """Carry out a move while streams run, and take everything home; tokens are as expected.

    The streams begin again until the move is done: how long it takes is up to the machine.

    Args:
        sums_dtype: The type in which parts of a sum are added that the move tears apart. In any
            but float32 near ties between tokens of the streams may fall otherwise.
    """
    admin = AdminClient(*find_admin(server.run_dir))
    number = {str(n): asking(prompts()[n], STREAM_TOKENS) for n in range(-NUM_STREAMS, 0)}
    begun, moved, seen = threading.Event(), threading.Event(), set[int]()
    rounds: list[dict[str, Answer]] = []

    def see(answer: Answer) -> None:
        seen.add(id(answer))
        if len(seen) == NUM_STREAMS:
            begun.set()

    def stream() -> None:
        while not moved.is_set():
            rounds.append(asyncio.run(asked_all(server, number, see)))

    streams = threading.Thread(target=stream)
    streams.start()
    try:
        assert begun.wait(60)
        away = admin.run(order)
    finally:
        moved.set()
        streams.join()
    assert (away.state, away.error) == ("done", "")
    for found in rounds:
        if sums_dtype == "float32":
            assert tokens_of(found) == expected[-NUM_STREAMS:]
        else:
            assert [len(tokens) for tokens in tokens_of(found)] == [STREAM_TOKENS] * NUM_STREAMS
    back = admin.run(Return("d0"))
    assert (back.state, back.error) == ("done", "")
    assert answers(server) == begins(expected)
    assert server.metric("banaserve_migration_lost_steps_total") == 0


def test_layers_move_in_mid_stream(
    server: Run, expected: list[list[int]], family: str, request: pytest.FixtureRequest
) -> None:
    order, reason = MoveLayers("d0", "p0", (1, 3)), ""
    if words := FAMILIES[family].no_layers:
        reason = refusal(AdminClient(*find_admin(server.run_dir)), order)
        assert words in reason
    else:
        in_mid_stream(server, expected, order)
    record(family, "layers in mid-stream", request.node.nodeid, refused=reason)


def test_experts_move_in_mid_stream(
    server: Run,
    expected: list[list[int]],
    family: str,
    dtype: str,
    request: pytest.FixtureRequest,
) -> None:
    admin, reason = AdminClient(*find_admin(server.run_dir)), ""
    if words := FAMILIES[family].no_experts:
        reason = refusal(admin, MoveExperts("d0", "p0", {1: (0, 2)}))
        assert words in reason
    else:
        admin.expert_load(ExpertLoadRequest("d0"))
        assert answers(server) == begins(expected)
        counted = admin.expert_load(ExpertLoadRequest("d0", counting=False)).chosen
        half = {layer: experts_for(counted[layer], 0.5) for layer in (1, 2)}
        assert all(0 < len(half[layer]) < len(counted[layer]) for layer in half)
        in_mid_stream(server, expected, MoveExperts("d0", "p0", half), dtype)
    record(family, "experts in mid-stream", request.node.nodeid, refused=reason)


def test_older_blocks_move_in_mid_stream(
    server: Run,
    expected: list[list[int]],
    family: str,
    dtype: str,
    request: pytest.FixtureRequest,
) -> None:
    order, reason = MoveContext("d0", "p0", (1, 3)), ""
    if words := FAMILIES[family].no_older:
        reason = refusal(AdminClient(*find_admin(server.run_dir)), order)
        assert words in reason
    else:
        in_mid_stream(server, expected, order, dtype)
    record(family, "older blocks in mid-stream", request.node.nodeid, refused=reason)


def test_heads_move_or_are_refused_for_a_reason(
    server: Run, expected: list[list[int]], family: str, request: pytest.FixtureRequest
) -> None:
    admin = AdminClient(*find_admin(server.run_dir))
    reason = refusal(admin, MoveHeads("d0", "p0", {1: (0,)}))
    if words := FAMILIES[family].no_heads:
        assert words in reason
    else:
        assert reason == ""
        assert answers(server) == begins(expected)
        assert refusal(admin, Return("d0")) == ""
    record(family, "heads", request.node.nodeid, refused=reason)


def test_engines_that_start_again_find_the_prompts_in_the_store(
    server: Run, expected: list[list[int]], family: str, request: pytest.FixtureRequest
) -> None:
    for name in ("p0", "d0"):
        pid = writer(server.run_dir, name)
        os.kill(pid, signal.SIGKILL)
        back(server, name, pid)
    before = {name: computed(server, name) for name in ("p0", "d0")}
    assert answers(server) == begins(expected)
    for name, had in before.items():
        assert computed(server, name) - had <= FAMILIES[family].most_computed, name
    record(family, "store, engines anew", request.node.nodeid)


def test_a_server_that_starts_again_finds_them_on_disk(
    server: Run,
    start: Callable[..., Run],
    expected: list[list[int]],
    family: str,
    request: pytest.FixtureRequest,
) -> None:
    assert server.end() == 0
    for _ in range(MOST_STARTS):
        second = start()
        assert answers(second) == begins(expected)
        num_computed = computed(second, "p0")
        late = second.metric("banaserve_promotions_total", instance_id="p0", kind="late")
        assert second.end() == 0
        if not late:  # what the disk brings too late on a busy machine is computed
            break
    assert num_computed <= FAMILIES[family].most_computed
    record(family, "store on disk, server anew", request.node.nodeid)


# ---- what is refused before any engine starts


@pytest.fixture
def refused(launch: Callable[..., Run]) -> Callable[..., str]:
    """Starts a server that must be refused, and returns the line that says why."""

    def line(*options: str) -> str:
        run = launch(*options, *OPTIONS)
        until(lambda: run.process.poll() is not None, "it has ended", 120)
        said = run.errors.read_text()
        assert run.process.returncode == 2, said
        assert said.startswith("banaserve: "), said
        assert said.count("\n") == 1, said
        assert "starting instances" not in run.printed()
        run.check_nothing_left()
        return said.removeprefix("banaserve: ").strip()

    return line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--enable-lora",), "LoRA adapters would have to move"),
        (
            ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
            "speculative decoding",
        ),
    ],
)
def test_moves_that_were_asked_for_and_cannot_be_made_are_refused(
    options: tuple[str, ...], words: str, make: Callable[[str], str], refused: Callable[..., str]
) -> None:
    line = refused("--pd", "1:1", "--model", make("llama"), "--migration", "on", *options)
    assert line.startswith("--migration on: this engine cannot migrate: ")
    assert words in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--enable-prefix-caching",), "--enable-prefix-caching: "),
        (("--mamba-cache-mode", "align"), "--mamba-cache-mode: "),
        (("--speculative-config", NGRAMS), "--speculative-config: "),
        (("--migration", "on"), "states of Mamba or linear-attention layers would have to move"),
    ],
)
def test_what_a_model_with_states_cannot_have_is_refused(
    options: tuple[str, ...], words: str, make: Callable[[str], str], refused: Callable[..., str]
) -> None:
    line = refused("--pd", "1:1", "--model", make("granitemoehybrid"), *options)
    assert words in line


def test_stages_get_no_store(make: Callable[[str], str], refused: Callable[..., str]) -> None:
    line = refused("--pd", "1:1", "--model", make("llama"), "--pipeline-parallel-size", "2")
    assert "not of pipeline or context parallel ones" in line
