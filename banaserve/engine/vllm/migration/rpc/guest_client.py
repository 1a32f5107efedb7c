"""Host's end of the connection to one guest, with timeouts learnt from earlier answers."""

from __future__ import annotations

import contextlib
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from banaserve.engine.vllm.migration.rpc import messages
from banaserve.engine.vllm.migration.rpc.tensors import TensorBundle, from_wire
from banaserve.errors import GuestLostError, MigrationError, ProtocolError
from banaserve.platform.processes import Leash, Pulse
from banaserve.transport.errors import PeerGoneError, TransferTimeoutError, TransportError
from banaserve.transport.interface import Channel, Message, Transport

_FACTOR = 10.0
_SMOOTHING = 0.2
R = TypeVar("R", bound=messages.Reply)
CONTROL_TIMEOUT_S = 5.0
_LOOKS = 4
"""How often a guest is looked at within the time for which it may be still."""


class AnswerTimes:
    """Timeouts of a guest's answers, from seconds a token as measured.

    Args:
        stall_s: How long a guest may be silent beyond what its work should take.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._seconds_per_token = 0.0

    def deadline_s(self, num_tokens: int) -> float:
        """For a step of so many tokens."""
        if not self._seconds_per_token:
            return _FACTOR * self._stall_s
        return self._stall_s + _FACTOR * self._seconds_per_token * num_tokens

    def learn(self, seconds: float, num_tokens: int) -> None:
        """A step took so long."""
        sample = seconds / max(1, num_tokens)
        if not self._seconds_per_token:
            self._seconds_per_token = sample
        self._seconds_per_token += _SMOOTHING * (sample - self._seconds_per_token)


class GuestClient:
    """Client of one guest. Control and steps take turns on one channel.

    Args:
        epoch: The host's present epoch, asked for each message.
        stall_s: How long a guest may neither answer nor use its processor. Where that cannot be
            seen from here, how long it may be silent beyond what its work should take.
        is_one_of_several: Whether it is one process of a guest of several: one that is given up
            is ended, since those that wait for its part of a sum would wait for ever.

    Attributes:
        lost: Why the guest is given up; None while it is not.
        round_trips: Steps that it has answered.
        described_step: Whose metadata it has last been sent with heads.
        run_s: What it took to compute the layers that it has answered with last.
        share: Fraction of the time that it may compute for: it stands still in between.
        save_s: What saving the blocks of what it has answered with last took; None: it has not.
        num_saved: Steps whose blocks it has saved.
    """

    def __init__(
        self,
        guest_id: str,
        channel: Channel,
        transport: Transport,
        epoch: Callable[[], int],
        stall_s: float,
        *,
        is_one_of_several: bool = False,
    ) -> None:
        self.guest_id = guest_id
        self._is_one_of_several = is_one_of_several
        self.transport = transport
        self.lost: str | None = None
        self.round_trips = 0
        self.described_step = 0
        self.run_s, self.share = 0.0, 1.0
        self.save_s: float | None = None
        self.num_saved = 0
        self._may_write = False
        self._leash: Leash | None = None
        self._submitted_s: deque[float] = deque()
        self._answered_s = 0.0
        self._channel = channel
        self._epoch = epoch
        self._stall_s = stall_s
        self._pulse = Pulse(None)
        self._lock = threading.RLock()
        self._times = AnswerTimes(stall_s)
        self._sent_s = 0.0

    # ---- control

    def ask(
        self,
        request: messages.Request,
        expected: type[R],
        timeout_s: float = CONTROL_TIMEOUT_S,
        *,
        may_wait: bool = False,
    ) -> R:
        """One request and its answer.

        Args:
            expected: What an answer is that is no refusal.
            may_wait: For what others, a disk say, as long as it takes. Else a guest that stands
                still is given up as in a step.

        Raises:
            MigrationError: The guest refuses.
            GuestLostError: It is gone or does not answer.
        """
        with self._lock:
            self._refuse_lost()
            try:
                self._send(request, TensorBundle(), timeout_s)
                still_s = timeout_s if may_wait else 0.0
                reply, _ = self._read(self._await_answer(timeout_s, still_s, timeout_s))
            except (TransportError, ProtocolError) as error:
                raise self.give_up(str(error)) from error
        if isinstance(reply, messages.RequestRefused):
            raise MigrationError(f"guest {self.guest_id} refuses: {reply.reason}")
        if not isinstance(reply, expected):
            raise self.give_up(f"{type(request).__name__} got a {type(reply).__name__}")
        return reply

    def watch(self, pid: int) -> None:
        """The guest's process runs on this machine: look whether it works when it is silent."""
        self._pulse = Pulse(pid)
        self._leash = Leash.on(pid)

    @property
    def can_be_ended(self) -> bool:
        """Whether it is certain, once the guest is given up, that it writes nowhere any more."""
        return self._leash is not None

    def check(self) -> None:
        """Notice a guest that has died between two messages.

        Raises:
            GuestLostError: It is gone.
        """
        if self.lost is not None or not self._lock.acquire(blocking=False):
            return
        try:
            poll = select.poll()
            poll.register(self._channel.fileno(), select.POLLIN | select.POLLHUP)
            if poll.poll(0):
                self._channel.receive(0.0)
        except TransportError as error:
            if isinstance(error, PeerGoneError):
                raise self.give_up(str(error)) from error
        finally:
            self._lock.release()

    # ---- steps

    def run(
        self, request: messages.Request, bundle: TensorBundle, num_tokens: int
    ) -> list[torch.Tensor | None]:
        """One step there and back.

        Raises:
            GuestLostError: It is gone, stalls, or cannot do it.
        """
        self.submit(request, bundle)
        return self.collect(num_tokens)

    def submit(self, request: messages.Request, bundle: TensorBundle) -> None:
        """Send a step's work without waiting; ``collect`` must follow on the same thread.

        More may be sent before, if the guest knows how much follows: answers come in
        the order of what was submitted.

        Raises:
            GuestLostError: It is gone or does not read.
        """
        self._lock.acquire()
        try:
            self._refuse_lost()
            if isinstance(request, messages.Run) and request.writes_store:
                self._may_write = True
            self._send(request, bundle, self._stall_s / self.share)
            self._submitted_s.append(self._sent_s)
        except TransportError as error:
            self._lock.release()
            raise self.give_up(str(error)) from error
        except BaseException:
            self._lock.release()
            raise

    def collect(self, num_tokens: int) -> list[torch.Tensor | None]:
        """The answer to what was submitted first.

        Raises:
            GuestLostError: It is gone, stalls, or cannot do it.
        """
        began_s = max(self._submitted_s.popleft(), self._answered_s)
        try:
            answer = self._await_answer(self._times.deadline_s(num_tokens))
            self._answered_s = time.perf_counter()
            self._times.learn(self._answered_s - began_s, num_tokens)
            reply, tensors = self._read(answer)
            self._may_write = self._may_write and bool(self._submitted_s)
        except (TransportError, ProtocolError) as error:
            raise self.give_up(str(error)) from error
        finally:
            self._lock.release()
        return self._outputs(reply, tensors)

    def has_answer(self) -> bool:
        """Whether the answer to what was submitted has begun to arrive, or the guest is gone."""
        if self._channel.has_pending():
            return True
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN | select.POLLHUP)
        return bool(poll.poll(0))

    def drop(self, num_tokens: int) -> None:
        """Wait for the answers to all that was submitted, and throw them away.

        Args:
            num_tokens: Of the largest part.
        """
        while self._submitted_s:
            with contextlib.suppress(GuestLostError):
                self.collect(num_tokens)

    def give_up(self, reason: str) -> GuestLostError:
        """Close the connection, and return what to raise.

        A guest that has failed once is not trusted with another step.
        """
        self._let_go(reason, ends=self._is_one_of_several)
        return GuestLostError(f"guest {self.guest_id}: {reason}")

    def close(self) -> None:
        """End the connection; the guest ends by itself."""
        self._let_go("closed")

    # ---- inside

    def _let_go(self, reason: str, *, ends: bool = False) -> None:
        self.lost = self.lost or reason
        self._channel.close()
        if self._leash is not None:
            # The slots of the store that it may be writing to belong to other owners next.
            if self._may_write or ends:
                self._leash.kill()
            self._leash.close()

    def _send(self, request: messages.Request, bundle: TensorBundle, timeout_s: float) -> None:
        message = Message(messages.encode(request), tuple(bundle.tensors), self._epoch())
        self._sent_s = time.perf_counter()
        self._channel.send(message, timeout_s)

    def _await_answer(
        self, deadline_s: float, still_s: float = 0.0, at_most_s: float = math.inf
    ) -> Message:
        """The next message, as long as the guest works or the deadline has not passed.

        Time counts from now: what was submitted before may have been answered long ago, or the
        guest may have waited for what came before it.

        Args:
            still_s: How long a guest may stand still that is seen to, if longer than ``stall_s``.
            at_most_s: How long it may take even if it works.
        """
        asked_s = since_s = looked_s = time.perf_counter()
        until_s = asked_s + deadline_s
        still_s = max(still_s, self._stall_s / self.share)
        look_s = self._stall_s / _LOOKS
        while True:
            try:
                return self._channel.receive(look_s)
            except TransferTimeoutError:
                now_s = time.perf_counter()
                worked_s = self._pulse.last_worked_s(now_s)
                # Time in which this process stood still, perhaps with the guest, does not count.
                if (late_s := now_s - looked_s - look_s) > look_s:
                    since_s, until_s = now_s, until_s + late_s
                looked_s = now_s
                is_still = now_s - max(worked_s, since_s) >= still_s
                if is_still and (self._pulse.is_known or now_s >= until_s):
                    raise
                if now_s - asked_s >= at_most_s:
                    raise

    @staticmethod
    def _read(answer: Message) -> tuple[messages.Reply, list[torch.Tensor]]:
        reply = messages.decode_reply(answer.body)
        return reply, [from_wire(tensor) for tensor in answer.tensors]

    def _outputs(
        self, reply: messages.Reply, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        if isinstance(reply, messages.RequestRefused):
            raise self.give_up(reply.reason)
        if not isinstance(reply, messages.StepOutputs):
            raise self.give_up(f"a step was answered with {type(reply).__name__}")
        if any(index is not None and not 0 <= index < len(tensors) for index in reply.values):
            raise self.give_up("a step's answer names a tensor that did not come")
        self.round_trips += 1
        self.run_s, self.save_s = reply.seconds, reply.save_s
        self.num_saved += reply.save_s is not None
        return [None if index is None else tensors[index] for index in reply.values]

    def check_shape(self, tensor: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
        """An output that is shaped like ``wanted`` and of its type.

        Raises:
            GuestLostError: It is not; the guest is given up.
        """
        if tensor is None or (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise self.give_up("a step was answered with another shape than was asked for")
        return tensor

    def _refuse_lost(self) -> None:
        if self.lost is not None:
            raise GuestLostError(f"guest {self.guest_id} is lost: {self.lost}")
