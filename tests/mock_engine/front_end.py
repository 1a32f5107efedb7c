"""Bare front end of one engine core: sockets, frames, and the scenario that recordings are made of.

What it sends are frames that vLLM's own client has encoded once (``record_cores.py``); what comes
back is told by its shape, so that a mock core can be compared with a real one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from mock_protocol import ENGINE_CORE_DEAD, RAW_VIEW, RequestType

ANSWER_S = 60.0
"""Limit of every wait; a real engine on a busy machine answers in seconds."""
Shape = Any
_ENGINE = (0).to_bytes(2, "little")


class Action(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message to an engine core, and the message that ends the answers to it.

    Attributes:
        type: Name of a ``RequestType``.
        body: Plain value of its second frame.
        ends: ``utility``: the answer to a utility call comes; ``finished``: the request has ended,
            and a step without requests has followed; ``outputs N``: N messages with output have
            come; ``none``: at once.
        is_racing: The number of equal messages depends on who is faster.
    """

    name: str
    type: str
    body: Any
    ends: str
    is_racing: bool = False


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """Shape of one message or of several equal ones, one after the other.

    Attributes:
        times: Number of them; 0 where it depends on who is faster.
    """

    shape: Shape
    times: int = 1


class Answers(msgspec.Struct, frozen=True):
    """Answers to one action."""

    name: str
    frames: list[Frame]


class Recording(msgspec.Struct, frozen=True):
    """A scenario and what one engine core has sent in it.

    Attributes:
        vllm: Version of vLLM that has encoded the actions and, where it was real, the answers.
        structs: Fields of vLLM's structs in order, with their defaults, as text.
        init: Plain value of the front end's answer to HELLO, without its addresses.
        hello: Shape of the first message of the handshake.
        ready: Shape of the last one.
        registration: Shape of the first message on the input socket.
        stats: Different shapes of statistics.
        ended: Shapes of what comes after SIGTERM, and the exit code.
        killed: The same of SIGKILL.
    """

    vllm: str
    structs: dict[str, list[list[str]]]
    init: dict[str, Any]
    actions: list[Action]
    hello: Shape
    ready: Shape
    registration: Shape
    answers: list[Answers]
    stats: list[Shape]
    ended: list[Any]
    killed: list[Any]


@dataclass
class Names:
    """Shapes of messages, with the names of their fields.

    Attributes:
        fields: Field names of vLLM's structs.
        stats: Different shapes of statistics so far; a message says which one its own is.
    """

    fields: Mapping[str, Sequence[str]]
    stats: list[Shape] = field(default_factory=list)

    @classmethod
    def of(cls, structs: Mapping[str, Sequence[Sequence[str]]]) -> Names:
        return cls({name: [one[0] for one in fields] for name, fields in structs.items()})

    def outputs(self, message: Any) -> Shape:
        """Shape of an ``EngineCoreOutputs``: fields that are not null, and the number of all."""
        found = self._shape("EngineCoreOutputs", message)
        named = self.named("EngineCoreOutputs", message)
        found["outputs"] = [self._output(one) for one in named["outputs"]]
        if (stats := named["scheduler_stats"]) is not None:
            found["scheduler_stats"] = self._stats(stats)
        if (answer := named["utility_output"]) is not None:
            _, failure, result = answer
            found["utility_output"] = {"failure_message": failure, "result": result}
        return found

    def _output(self, message: Any) -> Shape:
        found = self._shape("EngineCoreOutput", message)
        named = self.named("EngineCoreOutput", message)
        found["new_token_ids"] = f"{len(named['new_token_ids'])} tokens"
        for name in ("finish_reason", "prefill_stats"):
            if named[name] is not None:
                found[name] = named[name]
        for shape, event in zip(found.get("events", ()), named["events"] or (), strict=True):
            shape["type"] = event["type"]
        return found

    def _stats(self, stats: Mapping[str, Any]) -> Shape:
        """Counts of requests as they are: a scenario has them the same each time."""
        shape = shape_of(stats)
        if shape not in self.stats:
            self.stats.append(shape)
        running, waiting = stats["num_running_reqs"], stats["num_waiting_reqs"]
        return f"{running} run, {waiting} wait; shape {self.stats.index(shape)}"

    def _shape(self, struct: str, message: Sequence[Any]) -> dict[str, Any]:
        named = self.named(struct, message)
        found = {name: shape_of(value) for name, value in named.items() if value is not None}
        return {"num_fields": len(message), **found}

    def named(self, struct: str, message: Sequence[Any]) -> dict[str, Any]:
        """Fields of a message by name; None where it is shorter."""
        names = self.fields[struct]
        assert len(message) <= len(names), f"{struct} has {len(message)} fields, not {len(names)}"
        return {**dict.fromkeys(names), **dict(zip(names, message, strict=False))}


def shape_of(value: Any) -> Shape:
    """Types, keys and lengths of a plain value."""
    match value:
        case None:
            return "null"
        case bool() | int() | float() | str():
            return type(value).__name__
        case dict():
            return {str(key): shape_of(one) for key, one in value.items()}
        case list() | tuple():
            shapes = [shape_of(one) for one in value]
            if len(shapes) > 4 and all(shape == shapes[0] for shape in shapes):
                return [f"{len(shapes)} times", shapes[0]]
            return shapes
        case msgspec.msgpack.Ext(code=code, data=data):
            return f"{len(data)} bytes" if code == RAW_VIEW else f"extension {code}"
    raise TypeError(f"{type(value)} is no plain value")


@dataclass
class Handshake:
    """Messages of a handshake: those of the engine core, as plain values."""

    hello: Any
    ready: Any
    registration: Any


class FrontEnd:
    """Front end of one engine core.

    Args:
        folder: Folder of the sockets, with a short path.
    """

    def __init__(self, folder: Path) -> None:
        self._timeout_s = ANSWER_S
        self._context = zmq.Context()
        self._names = [f"ipc://{folder}/{name}" for name in ("h", "i", "o")]
        self.handshake_address = self._names[0]
        kinds = (zmq.SocketType.ROUTER, zmq.SocketType.ROUTER, zmq.SocketType.PULL)
        self._handshake, self._input, self._output = map(self._context.socket, kinds)
        for socket, name in zip(self._sockets, self._names, strict=True):
            socket.setsockopt(zmq.SocketOption.LINGER, 0)
            socket.bind(name)
        self._ended = self._output.get_monitor_socket(zmq.Event.DISCONNECTED)

    @property
    def _sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        return self._handshake, self._input, self._output

    def shake(
        self, init: Mapping[str, Any], is_alive: Callable[[], bool], timeout_s: float = ANSWER_S
    ) -> Handshake:
        """vLLM's start-up handshake, which a real engine core takes its time for."""
        self._timeout_s = timeout_s
        hello = self._told(is_alive)
        addresses = {"inputs": [self._names[1]], "outputs": [self._names[2]]}
        answer = {**init, "addresses": {**init["addresses"], **addresses}}
        self._handshake.send_multipart((_ENGINE, msgspec.msgpack.encode(answer)))
        registration = self._received(self._input, is_alive)
        self._timeout_s = ANSWER_S
        return Handshake(hello, self._told(is_alive), msgspec.msgpack.decode(registration[1]))

    def _told(self, is_alive: Callable[[], bool]) -> Any:
        identity, body = self._received(self._handshake, is_alive)
        assert identity == _ENGINE
        return msgspec.msgpack.decode(body)

    def send(self, kind: RequestType, body: Any) -> None:
        self._input.send_multipart((_ENGINE, kind.value, msgspec.msgpack.encode(body)))

    def receive(self, is_alive: Callable[[], bool] = lambda: True) -> list[bytes]:
        """The next message of the engine core.

        Raises:
            TimeoutError: None has come, or the engine core has ended without one.
        """
        return self._received(self._output, is_alive)

    def _received(self, socket: zmq.Socket[bytes], is_alive: Callable[[], bool]) -> list[bytes]:
        until_s = time.monotonic() + self._timeout_s
        while time.monotonic() < until_s:
            lives = is_alive()
            if socket.poll(100):
                return socket.recv_multipart()
            if not lives:
                raise TimeoutError("the engine core has ended without an answer")
        raise TimeoutError(f"the engine core has not answered in {self._timeout_s:g} s")

    def pending(self) -> Iterator[list[bytes]]:
        """Messages that have come from an engine core that has ended."""
        # A thread of zmq's reads them; it tells of the connection's end after the last one.
        assert self._ended.poll(1000 * ANSWER_S), "the connection has not ended"
        while self._output.poll(0):
            yield self._output.recv_multipart()

    def close(self) -> None:
        self._output.disable_monitor()
        for socket in (*self._sockets, self._ended):
            socket.close()
        self._context.term()


@contextmanager
def front_end(folder: Path) -> Iterator[FrontEnd]:
    """A front end that is closed at the end."""
    made = FrontEnd(folder)
    try:
        yield made
    finally:
        made.close()


@dataclass
class Player:
    """Plays a scenario's actions and tells the answers by their shapes."""

    front: FrontEnd
    names: Names
    messages: list[Any] = field(default_factory=list)

    def play(self, action: Action) -> Answers:
        """Send one action and read what comes until its end."""
        self.front.send(RequestType[action.type], action.body)
        what, _, number = action.ends.partition(" ")
        left, shapes = {"none": 0, "finished": 2}.get(what, int(number or 1)), []
        while left > 0:
            message = msgspec.msgpack.decode(self.front.receive()[0])
            self.messages.append(message)
            shapes.append(self.names.outputs(message))
            left -= self._counted(what, message, left)
        return Answers(action.name, collapsed(shapes, is_racing=action.is_racing))

    def _counted(self, what: str, message: Any, left: int) -> int:
        """How much nearer to the end of an action a message brings."""
        named = self.names.named("EngineCoreOutputs", message)
        match what:
            case "utility":
                return named["utility_output"] is not None
            case "outputs":
                return bool(named["outputs"])
        outputs = [self.names.named("EngineCoreOutput", one) for one in named["outputs"]]
        has_ended = any(one["finish_reason"] is not None for one in outputs)
        return has_ended if left > 1 else not outputs


def differences(recorded: Recording, answers: Sequence[Answers], stats: list[Shape]) -> list[str]:
    """One line for each answer that is not the recorded one.

    Where it depends on who is faster how many messages come, as it does in calls, steps without
    output and messages like those of the last action with answers are left out.
    """
    lines, before = [], (Answers("", []), Answers("", []))
    calls = {action.name for action in recorded.actions if action.ends == "utility"}
    racing = calls | {action.name for action in recorded.actions if action.is_racing}
    for pair in zip(recorded.answers, answers, strict=True):
        told = [
            [one for one in now.frames if now.name not in racing or _counts(one, last.frames)]
            for now, last in zip(pair, before, strict=True)
        ]
        lines += _unlike(pair[0].name, *told)
        if pair[0].frames and pair[1].frames:
            before = pair
    if recorded.stats != stats:
        lines.append(f"statistics: recorded {recorded.stats}, came {stats}")
    return lines


def _counts(frame: Frame, before: Sequence[Frame]) -> bool:
    is_answer = "utility_output" in frame.shape
    return is_answer or (bool(frame.shape["outputs"]) and frame not in before)


def _unlike(name: str, recorded: list[Frame], came: list[Frame]) -> Iterator[str]:
    if len(recorded) != len(came):
        kinds = [[sorted(one.shape) for one in frames] for frames in (recorded, came)]
        yield f"{name}: recorded {len(recorded)} messages, came {len(came)}: {kinds}"
        return
    for number, (wanted, found) in enumerate(zip(recorded, came, strict=True)):
        keys = sorted(wanted.shape.keys() | found.shape.keys())
        for key in keys:
            if (one := wanted.shape.get(key)) != (other := found.shape.get(key)):
                yield f"{name}, message {number}, {key}: recorded {one}, came {other}"
        if wanted.times != found.times:
            yield f"{name}, message {number}: recorded {wanted.times} times, came {found.times}"


def collapsed(shapes: Sequence[Shape], *, is_racing: bool) -> list[Frame]:
    """Equal shapes that follow each other as one."""
    groups = [(shape, len(list(same))) for shape, same in itertools.groupby(shapes)]
    return [Frame(shape, 0 if is_racing else times) for shape, times in groups]


def farewell(front: FrontEnd, names: Names, code: int) -> list[Any]:
    """Shapes of what an engine core has sent before it ended, and its exit code."""
    found: list[Any] = []
    for frames in front.pending():
        if frames == [ENGINE_CORE_DEAD]:
            found.append(ENGINE_CORE_DEAD.decode())
        else:
            found.append(names.outputs(msgspec.msgpack.decode(frames[0])))
    return [*found, code]
