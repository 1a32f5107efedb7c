"""``bench served`` keeps what it measured before a guest was lost; its servers keep their logs."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from banaserve.base.errors import UserError
from banaserve.contracts.environment import engine_environment
from banaserve.contracts.migration_api import Migration, MigrationRequest, MoveLayers, Return
from banaserve_bench.loadgen import servers
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from benchmarks import served
from benchmarks.served import Seen, Shape

OPTIONS = argparse.Namespace(prompts=2, prompt_tokens=100, output_tokens=4, stream_tokens=8)
SHAPE = Shape(num_layers=8, num_kv_heads=2, num_experts=0, vocab_size=500)
TOKENS = [1, 2, 3, 4]


class Admin:
    """An admin API whose moves end as told, in their order."""

    def __init__(self, *errors: str) -> None:
        self._errors = list(errors)

    def run(self, order: MigrationRequest) -> Migration:
        error = self._errors.pop(0)
        state = "failed" if error else "done"
        kind = "return" if isinstance(order, Return) else "layers"
        return Migration("m1", kind, "d0", None, state, [], error=error)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def closed_loop(
        _: OpenAiClient, calls: Sequence[CompletionCall], concurrency: int
    ) -> list[RequestRecord]:
        await asyncio.to_thread(lambda: None)  # the move goes on meanwhile, on a thread too
        return [
            RequestRecord(id=call.id, sent_at_s=0.0, first_token_at_s=0.1, token_ids=TOKENS)
            for call in calls
        ]

    monkeypatch.setattr(served, "closed_loop", closed_loop)


async def seen_of(admin: Any, keep: Callable[[Seen], object] = lambda seen: None) -> Seen:
    server: Any = servers.Server(None, "http://127.0.0.1:1", Path("x"))  # type: ignore[arg-type]
    orders = [MoveLayers("d0", "p0", (2, 4)), MoveLayers("d0", "p0", (4, 5))]
    return await served._serve(server, admin, OPTIONS, SHAPE, orders, lambda what: None, keep)


@pytest.mark.parametrize(
    ("errors", "why"),
    [
        (("", "nothing is away", "", ""), "nothing is away"),
        (("", "", "", "nothing is away"), "nothing is away"),
        (("", "", "guest m2.0: the peer has not answered in time"), "has not answered in time"),
    ],
)
async def test_a_lost_guest_leaves_a_result(
    answers: None, errors: tuple[str, ...], why: str
) -> None:
    kept: list[int] = []
    seen = await seen_of(Admin(*errors), lambda seen: kept.append(len(seen.moves | seen.failed)))
    assert "layers" in seen.moves, "one of the two has left and come home"
    assert kept[:2] == [0, 1], "what was handed over, then with the first move"
    plain = Seen(alone=seen.alone, streams={"": seen.streams["layers"]})
    assert served._figures(plain, seen)["equal_layers"] == ([1.0], "fraction")
    assert any(why in note for note in served._notes(seen))


def test_failed_requests_are_other_answers_and_a_note() -> None:
    good = RequestRecord(id="0", sent_at_s=0.0, first_token_at_s=0.1, token_ids=TOKENS)
    bad = RequestRecord(id="0", sent_at_s=0.0, error="HTTP 500")
    plain = Seen(alone=[good], streams={"": [good]})
    ours = Seen(alone=[good, bad], again=[good], streams={"heads": [bad]})
    found = served._figures(plain, ours)
    assert found["equal_handed_over"] == ([0.5], "fraction")
    assert found["equal_heads"] == ([0.0], "fraction")
    assert "handed over: 1 of 2 requests failed: HTTP 500" in served._notes(ours)
    with pytest.raises(UserError, match="plain vLLM: 1 of 2 requests failed"):
        served._figures(Seen(alone=[bad], streams={"": [good]}), ours)


# ---- logs of servers


def test_the_log_that_an_error_names_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(servers.LOGS_VARIABLE, raising=False)
    command = [sys.executable, "-c", "import sys; sys.exit('no GPU')"]
    with (
        pytest.raises(UserError, match=r"did not start: no GPU \(log: ") as failed,
        servers.command_server(command, "it"),
    ):
        pass
    log = Path(str(failed.value).rpartition("log: ")[2].rstrip(")"))
    assert "no GPU" in log.read_text()


@pytest.mark.parametrize("keeps", [False, True])
def test_logs_stay_where_they_are_wanted(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if keeps:
        monkeypatch.setenv(servers.LOGS_VARIABLE, str(tmp_path / "logs"))
    with servers.log_folder() as folder:
        (folder / "a.log").write_text("words")
    assert (folder / "a.log").exists() is keeps
    assert (folder.parent == tmp_path / "logs") is keeps


@pytest.mark.parametrize("is_there", [False, True])
def test_flashinfer_samples_only_where_it_is_installed(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = object() if is_there else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    assert ("VLLM_USE_FLASHINFER_SAMPLER" not in engine_environment()) is is_there
