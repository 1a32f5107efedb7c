"""Prompts with images: handed over, stored, and gone on with elsewhere; greedy, float32."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

import random_models
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient
from observing import until, writer
from server_run import Run
from streams import Answer, Kind, asked_all

pytestmark = pytest.mark.e2e

NAME = "seeing"
OUTPUT_TOKENS = 60
STREAM_TOKENS = 400
OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--limit-mm-per-prompt", '{"image": 2}'),
    *("--kv-cache-memory-bytes", str(96 << 20), "--served-model-name", NAME),
)
LONG = "a b c d e f g h i j " * 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_models.make_seeing(tmp_path_factory.mktemp("model") / "m")


def images(num: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    shape = (random_models.IMAGE_PIXELS, random_models.IMAGE_PIXELS, 3)
    found = []
    for _ in range(num):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 255, shape, dtype=np.uint8)).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        found.append({"type": "image_url", "image_url": {"url": url}})
    return found


def kinds(num_tokens: int = OUTPUT_TOKENS) -> dict[str, Kind]:
    """Some of the same words with other images, some of more than a block before or behind one."""
    one, two, three, four = images(4)

    def text(words: str) -> dict[str, str]:
        return {"type": "text", "text": words}

    contents = (
        [text("What is "), one, text(" this?")],
        [text("What is "), two, text(" this?")],
        [text(LONG), one, text("and "), three, text(" what?")],
        [text(LONG), two, text("and "), three, text(" what?")],
        [four, text(LONG)],
        [three, text(LONG)],
    )
    body = {
        "model": NAME,
        "temperature": 0.0,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return {
        str(n): Kind(
            "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content}]}
        )
        for n, content in enumerate(contents)
    }


def tokens_of(found: dict[str, Answer]) -> list[list[int]]:
    assert [one.error for one in found.values()] == [""] * len(found)
    return [one.tokens[0] for one in found.values()]


def answers(server: Run) -> list[list[int]]:
    return tokens_of(asyncio.run(asked_all(server, kinds())))


@pytest.fixture(scope="module")
def streamed(serve: Callable[..., Run], model: str) -> list[list[int]]:
    """Long answers of one engine without a store; they begin with the short ones."""
    one = ("--colocated", "1", "--no-kv-store", "--migration", "off")
    run = serve("--model", model, *OPTIONS, *one)
    found = tokens_of(asyncio.run(asked_all(run, kinds(STREAM_TOKENS))))
    assert run.end() == 0
    return found


@pytest.fixture(scope="module")
def expected(streamed: list[list[int]]) -> list[list[int]]:
    found = [tokens[:OUTPUT_TOKENS] for tokens in streamed]
    assert found[0] != found[1]
    assert found[2] != found[3]
    assert found[4] != found[5]
    return found


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run], model: str, expected: list[list[int]]) -> Iterator[Run]:
    run = serve(
        *("--pd", "1:2", "--model", model, *OPTIONS, "--kv-store-size", "256MiB"),
        *("--skip-prefill-below-tokens", "0", "--migration-poison"),
    )
    yield run
    assert run.end() == 0


def computed(server: Run, instance: str) -> float:
    return server.metric("banaserve_prompt_tokens_computed_total", instance_id=instance)


def test_images_are_handed_over_with_the_prompt(server: Run, expected: list[list[int]]) -> None:
    assert answers(server) == expected
    assert (computed(server, "d0"), computed(server, "d1")) == (0, 0)
    before = computed(server, "p0")
    assert answers(server) == expected
    # What was seen once is found by what was seen, and the last token of each is computed.
    assert computed(server, "p0") - before <= len(expected)


def in_mid_stream(server: Run, harm: Callable[[], None]) -> list[list[int]]:
    """Answers of streams all of which have begun when ``harm`` is done."""
    begun, seen, found = threading.Event(), set[int](), dict[str, Answer]()

    def see(answer: Answer) -> None:
        seen.add(id(answer))
        if len(seen) == len(kinds()):
            begun.set()

    streams = threading.Thread(
        target=lambda: found.update(asyncio.run(asked_all(server, kinds(STREAM_TOKENS), see)))
    )
    streams.start()
    assert begun.wait(60)
    harm()
    streams.join()
    return tokens_of(found)


def test_layers_leave_in_mid_stream(server: Run, streamed: list[list[int]]) -> None:
    admin = AdminClient(*find_admin(server.run_dir))
    moved = []

    def move() -> None:
        moved.append(admin.run(MoveLayers("d0", "p0", (1, 3))))

    assert in_mid_stream(server, move) == streamed
    moved.append(admin.run(Return("d0")))
    assert [(one.state, one.error) for one in moved] == [("done", "")] * 2


def test_streams_with_images_go_on_where_their_engine_dies(
    server: Run, streamed: list[list[int]]
) -> None:
    pid = writer(server.run_dir, "d0")
    assert in_mid_stream(server, lambda: os.kill(pid, signal.SIGKILL)) == streamed
    until(lambda: server.metric("banaserve_instance_ready", instance_id="d0") == 1, "d0 is back")
    assert writer(server.run_dir, "d0") != pid
