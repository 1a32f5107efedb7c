"""One mock core in a process of its own, with a bare front end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import small_model
from front_end import FrontEnd, Handshake, Names, front_end
from mock_facts import VARIABLE, MockOptions
from mock_protocol import STRUCTS, EngineCoreOutput, EngineCoreOutputs, RequestType, field_names

INSTANCE = "c0"
INIT = {
    "addresses": {
        "inputs": [],
        "outputs": [],
        "coordinator_input": None,
        "coordinator_output": None,
        "frontend_stats_publish_address": None,
    },
    "parallel_config": {},
}
"""The front end's answer to HELLO."""
FOLDER = Path(__file__).parent
"""Goes into PYTHONPATH: modules of this folder import each other by name."""
_PROGRAM = FOLDER / "mock_core.py"
_read_outputs = msgspec.msgpack.Decoder(EngineCoreOutputs)


@dataclass
class MockProcess:
    """A mock core that has shaken hands."""

    process: subprocess.Popen[bytes]
    front: FrontEnd
    shake: Handshake

    def add(self, request_id: str, prompt: Sequence[int], **params: Any) -> None:
        """Send a request; ``params`` are sampling parameters as vLLM encodes them."""
        told = {"max_tokens": 16, "temperature": 0.0, **params}
        body = [request_id, list(prompt), None, told, None, 1.0, None, None, None]
        self.front.send(RequestType.ADD, body)

    def abort(self, *request_ids: str) -> None:
        self.front.send(RequestType.ABORT, list(request_ids))

    def receive(self) -> EngineCoreOutputs:
        """The next message."""
        return _read_outputs.decode(self.front.receive(self.is_alive)[0])

    def call(self, method: str, *args: Any) -> Any:
        """Result of a utility call; output that comes before is left out.

        Raises:
            RuntimeError: It has failed; the text is the core's.
        """
        self.front.send(RequestType.UTILITY, (0, 1, method, args))
        while (answer := self.receive().utility_output) is None:
            pass
        if answer.failure_message is not None:
            raise RuntimeError(answer.failure_message)
        assert answer.result is not None
        return answer.result[1]

    def until_finished(self, *request_ids: str) -> dict[str, list[EngineCoreOutput]]:
        """All outputs of requests, up to their ends."""
        found: dict[str, list[EngineCoreOutput]] = {one: [] for one in request_ids}
        left = set(request_ids)
        while left:
            for output in self.receive().outputs:
                found[output.request_id].append(output)
                if output.finish_reason is not None:
                    left.discard(output.request_id)
        return found

    def tokens(self, request_id: str) -> list[int]:
        """All tokens of a request, up to its end."""
        outputs = self.until_finished(request_id)[request_id]
        return [token for output in outputs for token in output.new_token_ids]

    def is_alive(self) -> bool:
        return self.process.poll() is None


def names() -> Names:
    """Field names as the mock core's structs have them."""
    return Names({struct.__name__: field_names(struct) for struct in STRUCTS})


def engine_argv(*more: str) -> list[str]:
    """Engine options for the small model."""
    return ["--model", small_model.resolve().path_or_id, "--max-model-len", "4096", *more]


@contextmanager
def launched(
    front: FrontEnd, options: MockOptions, argv: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A mock core that has not shaken hands."""
    said = msgspec.json.encode(options).decode()
    command = [sys.executable, "-P", str(_PROGRAM), INSTANCE, front.handshake_address, *argv]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(FOLDER), VARIABLE: said}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def mock_core(
    options: MockOptions | None = None, argv: Sequence[str] = ()
) -> Iterator[MockProcess]:
    """A mock core that serves.

    Args:
        argv: Engine options beside those of the model.
    """
    with tempfile.TemporaryDirectory(prefix="mc-") as place:
        folder = Path(place)
        with (
            front_end(folder) as front,
            launched(front, options or MockOptions(), engine_argv(*argv)) as process,
        ):
            shake = front.shake(INIT, lambda: process.poll() is None)
            yield MockProcess(process, front, shake)
