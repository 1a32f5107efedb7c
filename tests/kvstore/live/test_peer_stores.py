"""Two servers whose stores share blocks: what one has computed the other reads."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from observing import until, writer
from server_run import Run

pytestmark = pytest.mark.e2e

BLOCK_TOKENS, PROMPT_TOKENS = 128, 420
NUM_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
OPTIONS = ("--dtype", "float32", "--migration", "off", "--max-model-len", "2048")
MOST_ASKED = 3
KEY = "a-key-that-both-servers-know"


def prompts(seed: int, num: int = 4) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(num)]


def ask(server: Run, prompt: list[int]) -> list[int]:
    """The tokens of the answer."""
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 24, "temperature": 0.0}
    answer = server.post("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    assert len(found) == 24
    return found


def found(server: Run) -> float:
    """Blocks that were found at the peer: fetched, or computed where that was to be quicker."""
    return of_peers(server, "promoted_total") + of_peers(server, "declined_total")


def of_peers(server: Run, name: str) -> float:
    return server.metric(f"banaserve_kvstore_tier_{name}", tier="peers")


@pytest.fixture(scope="module")
def pair(
    serve: Callable[..., Run],
    free_port: Callable[[], int],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Run, Run]:
    """One that prefills and decodes on one engine, and one that does so on two."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(KEY)
    ports = free_port(), free_port()

    def start(own: int, other: int, *options: str) -> Run:
        sharing = ("--kv-store-listen", f"127.0.0.1:{own}", "--kv-store-peer", f"127.0.0.1:{other}")
        return serve(*OPTIONS, *options, *sharing, "--kv-store-peer-key-file", str(key))

    first = start(*ports, "--colocated", "1")
    second = start(*reversed(ports), "--pd", "1:1")
    for server in (first, second):
        until(lambda server=server: of_peers(server, "available") == 1, "the stores have met")
    return first, second


def test_a_prefix_is_computed_once_for_both(pair: tuple[Run, Run]) -> None:
    first, second = pair
    asked = prompts(1)
    expected = [ask(first, prompt) for prompt in asked]
    assert [ask(second, prompt) for prompt in asked] == expected
    assert found(second) >= NUM_BLOCKS * len(asked)
    assert of_peers(second, "promoted_total") > 0
    assert second.metric("banaserve_prompt_tokens_cached_total") > 0
    # And the other way round.
    asked = prompts(2)
    expected = [ask(second, prompt) for prompt in asked]
    assert [ask(first, prompt) for prompt in asked] == expected
    assert found(first) >= NUM_BLOCKS * len(asked)


def test_a_server_whose_peer_stands_still_or_dies_computes_for_itself(
    pair: tuple[Run, Run],
) -> None:
    first, second = pair
    asked = prompts(3, 3 + MOST_ASKED)
    expected = [ask(first, prompt) for prompt in asked]
    daemon = writer(first.run_dir, "kvstore")
    os.kill(daemon, signal.SIGSTOP)
    # At once: nothing is known of its standing still yet.
    assert ask(second, asked[0]) == expected[0]
    until(lambda: of_peers(second, "available") == 0, "the peer is given up")
    assert ask(second, asked[1]) == expected[1]
    os.kill(daemon, signal.SIGCONT)
    until(lambda: of_peers(second, "available") == 1, "the peer is back")
    before = found(second)
    # What a peer does not answer in time is computed: a busy machine may need more than one.
    for prompt, tokens in zip(asked[3:], expected[3:], strict=True):
        assert ask(second, prompt) == tokens
        if found(second) > before:
            break
    assert found(second) > before
    os.killpg(first.process.pid, signal.SIGKILL)
    assert ask(second, asked[2]) == expected[2]
    until(first.is_gone, "every process of the other server has ended")
    assert ask(second, prompts(4)[0]) == ask(second, prompts(4)[0])
    for gauge in ("leased_slots", "writing_slots", "promoting_slots"):
        name = f"banaserve_kvstore_{gauge}"
        until(lambda name=name: second.metric(name) == 0, f"no {gauge} are left")


def test_the_key_is_shown_nowhere(pair: tuple[Run, Run]) -> None:
    _, second = pair
    written = "".join(
        path.read_text(errors="replace")
        for path in Path(second.run_dir).iterdir()
        if path.is_file()
    )
    assert KEY not in written + second.tails()
    assert not any(KEY in word for one in second.processes() for word in one.cmdline())
