"""One message or one copy goes wrong, at each phase of a move away and of the way home.

Whatever it is, the streams go on with the same tokens, nothing of the move is left on the host,
and the same modules can leave again.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest

import transport_faults as faults
from rig import all_kinds, kinds_with_kv, modules_of

pytestmark = pytest.mark.e2e

ENGINE = "mixtral"
NUM_TOKENS = 24
LOOK_S = 0.02
OVER = ("freed", "aborted", "failed")
MESSAGES = ("build", "activate", "step", "release")
COPIES = ("precopy", "last copy", "copy home")
During = Generator[None, None, None]


def sample(kind: str) -> dict[str, Any]:
    """A unit of a kind."""
    some = {1: (0, 2), 5: (1,)}
    return modules_of(kind, layers=(2, 4), heads=some, experts=some)


def each_unit(places: Sequence[str], faults: Sequence[str], kinds: Sequence[str]) -> list[Any]:
    """Every kind of unit with every fault at every place.

    Those that are not marked ``long`` have each fault at each place, with the kinds in turn: each
    kind meets each fault, and a fault at each place.
    """
    return [
        pytest.param(
            place,
            fault,
            unit,
            marks=[] if (at + what) % len(kinds) == which else [pytest.mark.long],
        )
        for at, place in enumerate(places)
        for what, fault in enumerate(faults)
        for which, unit in enumerate(kinds)
    ]


class Armed(faults.Faults):
    """Goes wrong with the next operation after ``armed`` was set, or with all of them."""

    def __init__(self, kind: str, pid: int, *, always: bool = False) -> None:
        super().__init__(kind if kind != "garble" else "corrupt", pid=pid, delay_s=0.01)
        self.armed = self.always = always

    def strikes(self) -> bool:
        struck, self.armed = self.armed, self.always
        if struck:
            self.done.append(len(self.done))
        return struck


class GarbledChannel:
    """What comes from the guest is no answer."""

    def __init__(self, inner: Any, wrong: Armed) -> None:
        self._inner = inner
        self._wrong = wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, timeout_s: float) -> Any:
        message = self._inner.receive(timeout_s)
        if not self._wrong.strikes():
            return message
        body = bytes([message.body[0] ^ 0xFF]) + message.body[1:]
        return type(message)(body, message.tensors, message.epoch, message.token)


class Trouble:
    """Lets one operation of one guest go wrong at ``place``."""

    def __init__(self, rig: Any, guest: str, place: str, wrong: Armed) -> None:
        link = rig.host.links[guest]
        # Where the guest stays silent; else it would only be given up for being slow.
        is_silent = place in MESSAGES and wrong.kind in ("drop", "stall")
        self._begin = functools.partial(rig.wait_no_longer, guest) if is_silent else int
        self._place = place
        self._wrong = wrong
        if place in (*COPIES, "all copies"):
            link.transport = faults.FaultyTransport(link.transport, wrong)
        elif wrong.kind == "corrupt":
            link._channel = GarbledChannel(link._channel, wrong)
        else:
            link._channel._stream = faults.FaultyStream(link._channel._stream, wrong)

    def at(self, place: str) -> None:
        """The next operation belongs to ``place``."""
        if place == self._place and not self._wrong.done:
            self._begin()
            self._wrong.armed = True

    @property
    def was_lost(self) -> bool:
        """Whether the guest has never got what the host waits for, for as long as it takes."""
        never = self._place == "build" and self._wrong.kind in ("drop", "stall")
        return never and bool(self._wrong.done)


class Journey:
    """A unit's way to a guest and home, between the steps of an engine, with one fault on it.

    Attributes:
        begun: Ids of all moves.
    """

    def __init__(self, rig: Any, guest: str, modules: dict[str, Any], trouble: Trouble) -> None:
        self._rig = rig
        self._guest = guest
        self._modules = modules
        self._trouble = trouble
        self._arm = trouble.at
        self.begun: list[str] = []

    def run(self) -> During:
        """Ends early where a move fails."""
        yield
        if not (yield from self._go("prepare", self._modules, self._guest)):
            return
        for _ in range(3):
            self._arm("step")
            yield
        if units := self._rig.do("status")["units"]:
            yield from self._go("move_on", units[0]["unit_id"], None)

    def _go(self, method: str, *args: Any) -> Generator[None, None, bool]:
        """One move, which the engine waits for between two of its steps."""
        home = method == "move_on"
        move_id = self._rig.new_move()
        self.begun.append(move_id)
        if not home:
            self._arm("build")
        self._rig.do(method, move_id, *args)
        if not self._until(move_id, "prepared"):
            return False
        yield
        self._arm("copy home" if home else "precopy")
        self._rig.do("precopy", move_id)
        if not self._until(move_id, "copied"):
            return False
        yield
        self._arm("last copy" if not home else "")
        self._arm("activate")
        if self._rig.ask("commit", move_id)["error"]:
            return False
        yield
        self._arm("release" if home else "")
        self._rig.do("free", move_id)
        return self._until(move_id, "freed")

    def _until(self, move_id: str, phase: str) -> bool:
        """Wait for a phase; a move whose message is lost is aborted, as a coordinator would."""
        move = self._rig.host.moves.get(move_id)
        while not move.join(LOOK_S):
            if self._trouble.was_lost:
                self._rig.do("abort", move_id)
                return False
        return bool(self._rig.phase(move_id) == phase)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two that begin alike and share blocks, and a short one."""
    story = [(7 * i + i * i) % 2000 + 5 for i in range(300)]
    return [story, story[:200], story[5:10]]


@pytest.fixture(scope="module")
def expected(rig: Any, prompts: list[list[int]]) -> Any:
    return rig.run(prompts, NUM_TOKENS)


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    yield
    rig.reset()


def travel(rig: Any, prompts: Any, modules: dict[str, Any], place: str, kind: str) -> Any:
    """Run streams and a journey with a fault beside each other; answers, phases, and the guest."""
    guest = rig.new_guest()
    wrong = Armed(kind, rig.pids[guest], always=place.startswith("all"))
    journey = Journey(rig, guest, modules, Trouble(rig, guest, place, wrong))
    answers = rig.run(prompts, NUM_TOKENS, journey.run())
    assert wrong.done, "nothing went wrong"
    return answers, [rig.phase(move_id) for move_id in journey.begun], guest


def check_clean(rig: Any, guest: str) -> None:
    """Nothing is left of a journey but what the rig's own calls take home."""
    from banaserve.migration.modules.layer_proxy import RangeProxy
    from banaserve.migration.modules.split_attention import SplitAttention

    rig.do("status")
    rig.all_home()
    rig.do("detach", guest)
    host = rig.host
    rig.until(lambda: all(move.is_over for move in host.moves))
    assert guest not in host.links
    assert list(host.placement) == []
    assert not any(isinstance(layer, RangeProxy) for layer in host.engine.layers)
    assert not any(isinstance(one.impl, SplitAttention) for one in host.engine.attentions.values())
    assert host.step_context.dirty_blocks._watches == [], "nobody copies any more"
    assert not any("forward_modular" in vars(one.experts) for one in host.engine.experts.values())
    rig.until(lambda: not rig.lives(guest))


@pytest.mark.parametrize(
    ("place", "kind", "unit"),
    each_unit(MESSAGES, ["drop", "stall", "kill", "garble"], all_kinds()),
)
def test_a_message_goes_wrong(
    rig: Any, prompts: Any, expected: Any, place: str, kind: str, unit: str
) -> None:
    modules = sample(unit)
    answers, phases, guest = travel(rig, prompts, modules, place, kind)
    assert rig.agrees(answers, expected)
    assert phases[-1] in OVER, phases
    assert (phases[0] == "freed") == (place in ("step", "release")), phases
    check_clean(rig, guest)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.away(modules, rig.guest())), expected)


@pytest.mark.parametrize(
    ("place", "kind", "unit"),
    each_unit(COPIES, ["drop", "stall", "kill"], kinds_with_kv()),
)
def test_a_copy_goes_wrong(
    rig: Any, prompts: Any, expected: Any, place: str, kind: str, unit: str
) -> None:
    modules = sample(unit)
    answers, phases, guest = travel(rig, prompts, modules, place, kind)
    assert rig.agrees(answers, expected)
    if kind == "drop":
        assert phases == ["freed", "freed"], "the connection is opened again"
    assert phases[-1] in OVER, phases
    check_clean(rig, guest)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.away(modules, rig.guest())), expected)


@pytest.mark.spine
@pytest.mark.parametrize(
    ("what", "kind", "unit"),
    each_unit(["messages", "copies"], ["duplicate", "delay"], kinds_with_kv()),
)
def test_what_comes_twice_or_late_does_no_harm(
    rig: Any, prompts: Any, expected: Any, what: str, kind: str, unit: str
) -> None:
    answers, phases, guest = travel(rig, prompts, sample(unit), f"all {what}", kind)
    assert rig.agrees(answers, expected)
    assert phases == ["freed", "freed"]
    check_clean(rig, guest)
