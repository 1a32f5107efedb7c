"""Grammars are compiled in a process that may die of them.

It imports vLLM, which takes seconds, and gives way to all other processes: most tests are deep.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("xgrammar")

from banaserve.frontdoor.bodies.bounds import BodyRefusedError
from banaserve.frontdoor.bodies.grammar_checker import GrammarChecker, GrammarSpec
from banaserve.frontdoor.bodies.grammar_process import GrammarLimits

pytestmark = pytest.mark.deep

GOOD = [
    GrammarSpec("json", '{"type": "object", "properties": {"a": {"type": "string"}}}'),
    GrammarSpec("regex", r"[a-z]+@[a-z]+\.com"),
    GrammarSpec("choice", '["a", "b\\"c"]'),
    GrammarSpec("grammar", 'root ::= "a" | "b"'),
    GrammarSpec("structural_tag", '{"structures": [{"schema": {}}], "triggers": []}'),
]
WRONG = [GrammarSpec("regex", "("), GrammarSpec("json", "{"), GrammarSpec("choice", "3")]
"""vLLM says what is wrong with them."""
EXPLODING = GrammarSpec(
    "grammar", "root ::= " + " | ".join(f'"{"a" * length}"' for length in range(1, 1_500))
)

MANY = 10**9
EXPLODING_FOR_GUIDANCE = {
    "xgrammar refuses it": {"type": "array", "minItems": MANY},
    "xgrammar is skipped": {
        "type": "array",
        "items": {"type": "integer", "multipleOf": 5},
        "maxItems": MANY,
    },
}
EASY_FOR_XGRAMMAR = GrammarSpec("json", json.dumps({"type": "array", "maxItems": MANY}))


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(lambda: "", GrammarLimits(cpu_s=1))
    yield made
    made.close()


async def test_common_grammars_pass_and_wrong_ones_are_left_to_vllm(
    checker: GrammarChecker,
) -> None:
    await checker.check([*GOOD, *WRONG])


async def test_a_grammar_that_takes_too_long_is_cut_off_and_others_are_not(
    checker: GrammarChecker,
) -> None:
    slow = asyncio.create_task(checker.check([EXPLODING]))
    await checker.check(GOOD)
    with pytest.raises(BodyRefusedError, match="more than 1 s or 1024 MiB to compile") as refused:
        await slow
    assert (refused.value.status, refused.value.cause) == (400, "grammar")
    await checker.check(GOOD)


@pytest.mark.parametrize("schema", EXPLODING_FOR_GUIDANCE.values(), ids=EXPLODING_FOR_GUIDANCE)
async def test_a_grammar_is_tried_with_the_backend_that_vllm_uses(
    checker: GrammarChecker, schema: dict[str, object]
) -> None:
    await checker.check([EASY_FOR_XGRAMMAR])  # which would explode for guidance
    with pytest.raises(BodyRefusedError, match="to compile"):
        await checker.check([GrammarSpec("json", json.dumps(schema))])


@pytest.mark.room
async def test_a_grammar_that_takes_too_much_memory_is_cut_off() -> None:
    checker = GrammarChecker(lambda: "", GrammarLimits(cpu_s=600, memory_bytes=4 * 2**20))
    try:
        with pytest.raises(BodyRefusedError, match="4 MiB"):
            await checker.check([EXPLODING])
    finally:
        checker.close()


@pytest.mark.room
async def test_a_verdict_is_remembered(checker: GrammarChecker) -> None:
    await checker.check(GOOD)
    with pytest.raises(BodyRefusedError):
        await checker.check([EXPLODING])
    checker.close()
    checker._vocabulary = lambda: pytest.fail("asked again")  # type: ignore[assignment,return-value]
    await checker.check(GOOD)
    with pytest.raises(BodyRefusedError):
        await checker.check([EXPLODING])


@pytest.mark.deep
async def test_a_helper_that_has_died_is_started_again(checker: GrammarChecker) -> None:
    await checker.check(GOOD[:1])
    assert checker._process is not None
    pid = checker._process.pid
    os.kill(pid, signal.SIGKILL)
    await checker.check(GOOD)
    assert checker._process.pid != pid


@pytest.mark.room
async def test_the_helper_ends_with_its_server(checker: GrammarChecker) -> None:
    await checker.check(GOOD[:1])
    process, control = checker._process, checker._control
    assert process is not None
    assert control is not None
    control.close()
    assert await asyncio.to_thread(process.wait, 60) == 0


@pytest.mark.room
async def test_a_client_that_goes_away_ends_no_check_of_another(checker: GrammarChecker) -> None:
    first = asyncio.create_task(checker.check(GOOD))
    second = asyncio.create_task(checker.check(GOOD))
    await asyncio.sleep(0)
    first.cancel()
    await second
