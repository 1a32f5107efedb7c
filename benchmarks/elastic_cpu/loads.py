"""Loads of the comparison: conversations of one question or of several in sequence."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from banaserve_bench.datasets.items import Words
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.loops import side_by_side


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """A kind of conversation, and the numbers of conversations in a pass.

    Attributes:
        prefix_tokens: Tokens that each prompt shares with others of its kind; 0 for none.
        num_prefixes: Number of different prefixes in a pass.
        question_tokens: Mean tokens of a question; lengths are uniform within half of the mean.
        turns: Number of turns of a conversation; each but the first begins with all that was said
            before.
        closed, open: Numbers of conversations in a pass that keeps some under way, and in a pass
            with given arrivals.
    """

    prefix_tokens: int
    num_prefixes: int
    question_tokens: int
    output_tokens: int
    turns: int
    closed: int
    open: int

    def shortened(self) -> ChatLoad:
        """Return the same load with a ninth of the conversations."""
        return replace(self, closed=-(-self.closed // 9), open=-(-self.open // 9))


LOADS = {
    "shared-prefixes": ChatLoad(512, 12, 64, 16, 1, 60, 72),
    "chats": ChatLoad(0, 0, 96, 16, 3, 24, 24),
    "nothing-shared": ChatLoad(0, 0, 256, 16, 1, 48, 72),
}
CONCURRENCY = 4
"""Number of conversations under way in a closed pass."""


class Conversation(NamedTuple):
    """Turns of one client; a single turn is sent as a prompt, several as a chat."""

    id: str
    questions: tuple[str, ...]
    output_tokens: int


def conversations(load: ChatLoad, how_many: int, key: str, words: Words) -> list[Conversation]:
    """Return conversations; equal keys give equal ones, different keys share no prefix."""
    draws = random.Random(key)
    return [_conversation(load, f"{key} {n}", key, draws, words) for n in range(how_many)]


def _conversation(
    load: ChatLoad, own: str, shared: str, draws: random.Random, words: Words
) -> Conversation:
    prefix: list[int] = []
    if load.num_prefixes:
        which = draws.randrange(load.num_prefixes)
        prefix = words.tokens(load.prefix_tokens, f"{shared} prefix {which}")
    questions = []
    for turn in range(load.turns):
        half = load.question_tokens // 2
        length = draws.randint(load.question_tokens - half, load.question_tokens + half)
        asked = words.tokens(length, f"{own} turn {turn}")
        questions.append(words.text([*prefix, *asked] if turn == 0 else asked))
    return Conversation(own, tuple(questions), load.output_tokens)


def arrivals_s(num_conversations: int, per_s: float, key: str) -> list[float]:
    """Return arrival times of a Poisson process whose first arrival is at 0."""
    draws, now_s, found = random.Random(f"{key} arrivals"), 0.0, []
    for _ in range(num_conversations):
        found.append(now_s)
        now_s += draws.expovariate(per_s)
    return found


async def hold(client: OpenAiClient, conversation: Conversation) -> list[RequestRecord]:
    """Run one conversation, each turn once the one before is answered; stop at a failure."""
    records: list[RequestRecord] = []
    messages: list[dict[str, str]] = []
    for turn, question in enumerate(conversation.questions):
        messages.append({"role": "user", "content": question})
        is_chat = len(conversation.questions) > 1
        call = CompletionCall(
            f"{conversation.id} {turn}",
            prompt=None if is_chat else question,
            messages=tuple(messages) if is_chat else (),
            max_tokens=conversation.output_tokens,
            extra={"ignore_eos": True},
        )
        record = await client.send(call)
        records.append(record)
        if record.error is not None:
            break
        messages.append({"role": "assistant", "content": record.text})
    return records


async def closed(
    client: OpenAiClient, what: Sequence[Conversation], concurrency: int
) -> list[RequestRecord]:
    """Keep ``concurrency`` conversations under way; return the records, in their order."""
    found = await side_by_side(lambda one: hold(client, one), what, concurrency)
    return [record for records in found for record in records]


async def opened(
    client: OpenAiClient, what: Sequence[Conversation], at_s: Sequence[float]
) -> list[RequestRecord]:
    """Begin each conversation at its time; return the records, in their order."""
    start_s = client.clock.now()

    async def begin(conversation: Conversation, after_s: float) -> list[RequestRecord]:
        await client.clock.sleep(max(0.0, start_s + after_s - client.clock.now()))
        return await hold(client, conversation)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(begin(one, after_s)) for one, after_s in zip(what, at_s, strict=True)
        ]
    return [record for task in tasks for record in task.result()]
