"""Streams of a model that reasons go on when their instance is killed: within reasoning, behind it.

With a grammar, vLLM constrains the tokens behind the end of reasoning alone: the instance where a
stream goes on must know on which side of it the stream stands. Random weights never end reasoning
by themselves: a bias on the token that ends it does, or a budget.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

import small_model
import written_prompts
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.instances import DrainState
from banaserve.contracts.trace_events import LegBegan
from banaserve.frontdoor.admin_client import AdminClient
from observing import writer
from reference import tokenizer
from server_run import Run
from streams import Answer, Kind, asked, asked_all, back, connected, differences

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m"
NUM_FLAVOURS = 12
FLAVOURS = {
    "type": "array",
    "items": {"enum": ["vanilla", "chocolate", "raspberry"]},
    "minItems": NUM_FLAVOURS,
    "maxItems": NUM_FLAVOURS,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "order",
        "parameters": {
            "type": "object",
            "properties": {"flavours": FLAVOURS},
            "required": ["flavours"],
            "additionalProperties": False,
        },
    },
}
BUDGET_TOKENS = 60
ENDS_SOMETIME = {"temperature": 1.0, "logit_bias": {str(small_model.THINK_END): 7.5}}
"""About one token in forty."""
MAX_TOKENS = 280
MARGIN_TOKENS = 25
"""On either side of the end of reasoning: so far an engine may be ahead of who reads its stream."""
MOST_KILLS = 3
"""For one on the right side of that end: a busy machine is late."""
SEEDS = range(1, 9)
PARSERS = ["deepseek_r1", "qwen3"]
KINDS = ("text", "schema", "completion", "tool", "budget")


def made_kinds(prompt: list[int], text: str) -> dict[str, list[Kind]]:
    """Requests by what is asked for, each with several seeds."""
    common = {"model": MODEL, "stream": True, "return_token_ids": True, "max_tokens": MAX_TOKENS}
    chat = {**common, "messages": [{"role": "user", "content": text}]}
    schema = {"name": "flavours", "schema": FLAVOURS}
    formatted = {"response_format": {"type": "json_schema", "json_schema": schema}}
    named = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "order"}}}
    grammar = {"structured_outputs": {"json": FLAVOURS}}
    bodies = {
        "text": {**chat, **ENDS_SOMETIME, "ignore_eos": True},
        "schema": {**chat, **ENDS_SOMETIME, **formatted},
        "completion": {**common, **ENDS_SOMETIME, "prompt": prompt, **grammar},
        "tool": {**chat, **ENDS_SOMETIME, **named},
        "budget": {
            **chat,
            "temperature": 1.0,
            "thinking_token_budget": BUDGET_TOKENS,
            **formatted,
        },
    }
    assert tuple(bodies) == KINDS
    found = {}
    for name, body in bodies.items():
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        found[name] = [Kind(path, {**body, "seed": seed}) for seed in SEEDS]
    return found


def num_thoughts(answer: Answer) -> int:
    """Tokens before the one that ends reasoning; all where none does."""
    tokens = answer.tokens[0]
    return tokens.index(small_model.THINK_END) if small_model.THINK_END in tokens else len(tokens)


def has_room(answer: Answer) -> bool:
    """Whether it can be killed on either side of the end of its reasoning."""
    before = num_thoughts(answer)
    return before > MARGIN_TOKENS and len(answer.tokens[0]) - before > 2 * MARGIN_TOKENS


@pytest.fixture(scope="module")
def kinds() -> dict[str, list[Kind]]:
    long, short = written_prompts.prompts("synthetic", 2, 60, 200, 9, str.split)
    return made_kinds(tokenizer(small_model.resolve().path_or_id)(long.text), short.text)


@pytest.fixture(
    scope="module", params=[PARSERS[0], pytest.param(PARSERS[1], marks=pytest.mark.long)]
)
def server(
    serve: Callable[..., Run],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Run]:
    run = serve(
        *small_model.thinking(tmp_path_factory.mktemp("thinking")),
        *("--pd", "1:2", "--dtype", "float32", "--max-model-len", "2048", "--migration", "off"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--reasoning-parser", request.param),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        *("--kv-cache-memory-bytes", str(256 << 20)),
    )
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def chosen(server: Run, kinds: dict[str, list[Kind]]) -> dict[str, tuple[Kind, Answer]]:
    """Of each kind the first request with enough tokens on either side, and its answer."""
    all_of_them = {
        f"{name} {index}": kind for name, them in kinds.items() for index, kind in enumerate(them)
    }
    answers = asyncio.run(asked_all(server, all_of_them))
    assert [name for name, answer in answers.items() if answer.error] == []
    found: dict[str, tuple[Kind, Answer]] = {}
    for name, kind in all_of_them.items():
        if has_room(answers[name]):
            found.setdefault(name.split()[0], (kind, answers[name]))
    return found


def test_what_is_asked_for_is_what_comes(chosen: dict[str, tuple[Kind, Answer]]) -> None:
    assert tuple(chosen) == KINDS
    for name, (_, answer) in chosen.items():
        assert len(answer.ends[0]) == 1, name
        if name != "completion":  # a parser of reasoning looks at chats alone
            assert answer.thoughts[0], name
    for name in ("schema", "budget"):
        assert len(json.loads(chosen[name][1].texts[0])) == NUM_FLAVOURS, name
    behind = chosen["completion"][1].texts[0].rpartition("</think>")[2]
    assert len(json.loads(behind[behind.index("[") :])) == NUM_FLAVOURS
    assert num_thoughts(chosen["budget"][1]) <= BUDGET_TOKENS


@pytest.mark.parametrize("place", ["within", "behind"])
@pytest.mark.parametrize(
    "name",
    [
        *("schema", "tool"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("text", "completion", "budget")),
    ],
)
def test_no_answer_notices_a_kill(
    name: str, place: str, server: Run, chosen: dict[str, tuple[Kind, Answer]]
) -> None:
    kind, expected = chosen[name]
    end = num_thoughts(expected)
    after = 3 if place == "within" else end + 3
    # By turns: one that ends six times within minutes is given up.
    victim, other = ("d0", "d1") if place == "within" else ("d1", "d0")
    places = []
    for _ in range(MOST_KILLS):  # one may come late, even when the whole answer is there
        if place in places:
            break
        found, resumed_tokens = killed(server, victim, other, kind, after)
        assert differences({name: kind}, {name: expected}, {name: found}) == {}
        assert len(resumed_tokens) <= 1
        assert all(resumed >= after for resumed in resumed_tokens)
        places += ["within" if resumed <= end else "behind" for resumed in resumed_tokens]
    assert place in places, places


def killed(
    server: Run, victim: str, other: str, kind: Kind, after: int
) -> tuple[Answer, list[int]]:
    """The answer to a request whose instance is killed after so many tokens.

    Returns:
        It, and how many tokens it had where it went on.
    """
    admin, pid = AdminClient(*find_admin(server.run_dir)), writer(server.run_dir, victim)
    admin.drain(other)
    done: list[Future[DrainState]] = []
    with ThreadPoolExecutor(1) as pool:

        def count(answer: Answer) -> None:
            if not done and answer.num_tokens >= after:
                os.kill(pid, signal.SIGKILL)
                done.append(pool.submit(admin.release, other))

        async def ask() -> Answer:
            async with connected(server) as client:
                return await asked(client, kind, count)

        answer = asyncio.run(ask())
    (released,) = done
    assert not released.result().is_held
    (summary,) = admin.requests(1)
    legs = [e.event for e in admin.trace(summary.id).lines if isinstance(e.event, LegBegan)]
    back(server, victim, pid)
    return answer, [leg.resumed_tokens for leg in legs if leg.resumed_tokens > 1]
