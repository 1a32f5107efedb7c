"""Host's end of the connection to one guest, with timeouts learnt from previous answers."""

from __future__ import annotations

import contextlib
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch

from banaserve.base.errors import GuestLostError, MigrationError, ProtocolError
from banaserve.base.platform.processes import ProcessHandle
from banaserve.base.platform.stall_watch import Pulse
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.gpu_lane import HostLane
from banaserve.migration.rpc.tensors import TensorBundle, from_wire
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.errors import PeerGoneError, TransferTimeoutError, TransportError
from banaserve.transport.interface import Message, Tensor, Transport

_FACTOR = 10.0
_SMOOTHING = 0.2
R = TypeVar("R", bound=messages.Reply)
CONTROL_TIMEOUT_S = 5.0
SIBLINGS_FACTOR = 5
"""Factor of the time for which a guest of several processes may stand still: each waits for the
partial sums of the others, also of one whose host has not sent its work yet."""
_LOOKS = 4
"""Number of looks at a guest within the time for which it may stand still."""


class AnswerTimes:
    """Timeouts of a guest's answers, from the measured seconds per token.

    Args:
        stall_s: Maximum silence of a guest beyond the expected time of its work, in seconds.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._seconds_per_token = 0.0

    def deadline_s(self, num_tokens: int) -> float:
        """Return the timeout of a step of ``num_tokens`` tokens, in seconds."""
        if not self._seconds_per_token:
            return _FACTOR * self._stall_s
        return self._stall_s + _FACTOR * self._seconds_per_token * num_tokens

    def learn(self, seconds: float, num_tokens: int) -> None:
        """Learn from a step of ``num_tokens`` tokens that took ``seconds``."""
        sample = seconds / max(1, num_tokens)
        if not self._seconds_per_token:
            self._seconds_per_token = sample
        self._seconds_per_token += _SMOOTHING * (sample - self._seconds_per_token)


class GuestClient:
    """Client of one guest. Control messages and steps take turns on one channel.

    Args:
        epoch: Function that returns the host's present epoch, called for each message.
        stall_s: Maximum time a guest may neither answer nor use its processor, in seconds. If its
            processor use is not visible from here, the maximum silence beyond the expected time of
            its work.
        is_one_of_several: True if the guest has several processes. A process that is given up is
            then killed, since the others would wait for its partial sums for ever. It may stand
            still ``SIBLINGS_FACTOR`` times as long, since it waits for those of the others.

    Attributes:
        run_s: Time the guest took to compute its last answer, in seconds.
        share: Fraction of the time that the guest may compute; it stands still in between.
        save_s: Time the guest took to save the blocks of its last answer, in seconds; None if it
            did not save them.
    """

    def __init__(
        self,
        guest_id: str,
        channel: StreamChannel,
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
        self.run_s, self.share = 0.0, 1.0
        self.save_s: float | None = None
        self.num_saved = 0
        self.way = ""
        self.lane: HostLane | None = None
        self._may_write = False
        self._process: ProcessHandle | None = None
        self._submitted_s: deque[float] = deque()
        self._answered_s = 0.0
        self._channel = channel
        self._epoch = epoch
        self._stall_s = stall_s
        self._still_s = stall_s * (SIBLINGS_FACTOR if is_one_of_several else 1)
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
        """Send one request and return its answer.

        Args:
            expected: Type of an answer that is no refusal.
            may_wait: True if the guest may wait for others, such as a disk, for the whole timeout.
                Otherwise a guest that stands still is given up as in a step.

        Raises:
            MigrationError: The guest refuses.
            GuestLostError: The guest is gone, does not answer, or answers with another type.
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
        """Watch the guest's process on this machine, to see whether a silent guest works."""
        self._pulse = Pulse(pid)
        self._process = ProcessHandle.open(pid)

    @property
    def can_be_ended(self) -> bool:
        """True if the guest's process is on this machine, so that giving the guest up ends it.

        Only then is it certain that it writes nowhere any more.
        """
        return self._process is not None

    def check(self) -> None:
        """Detect a guest that has died between two messages.

        Raises:
            GuestLostError: The guest is gone.
        """
        if self.lost is not None or not self._lock.acquire(blocking=False):
            return
        try:
            if self._has_input():
                self._channel.receive(0.0)
        except TransportError as error:
            if isinstance(error, PeerGoneError):
                raise self.give_up(str(error)) from error
        finally:
            self._lock.release()

    def enter(self, lane: HostLane, transport: Transport) -> None:
        """Pass the large tensors of steps through ``lane``, and KV through ``transport``.

        Raises:
            MigrationError, GuestLostError: The guest refuses, or is gone.
        """
        self.ask(messages.UseLane(), messages.StepsDone)
        self.lane, self.transport, self.way = lane, transport, transport.name

    # ---- steps

    def bundle(self) -> TensorBundle:
        """Return the bundle of the next step's tensors, which must be submitted before another.

        Its ``put`` raises ``GuestLostError`` if the guest is gone.
        """
        if self.lane is None or self.lost is not None:
            return TensorBundle()
        self.lane.begin()
        return TensorBundle(self._pass_beside)

    def _pass_beside(self, tensor: torch.Tensor) -> Tensor | None:
        assert self.lane is not None
        try:
            return self.lane.write(tensor)
        except TransportError as error:
            raise self.give_up(str(error)) from error

    def submit(self, request: messages.Request, bundle: TensorBundle) -> None:
        """Send a step's work without waiting; ``collect`` must follow on the same thread.

        More work may be submitted before ``collect`` if the guest knows how much follows: answers
        arrive in the order of submission.

        Raises:
            GuestLostError: The guest is gone or does not read.
        """
        self._lock.acquire()
        try:
            self._refuse_lost()
            if isinstance(request, messages.Run) and request.writes_store:
                self._may_write = True
            if self.lane is not None:
                bundle.tensors += self.lane.sent()
            self._send(request, bundle, self._stall_s / self.share)
            self._submitted_s.append(self._sent_s)
        except TransportError as error:
            self._lock.release()
            raise self.give_up(str(error)) from error
        except BaseException:
            self._lock.release()
            raise

    def collect(self, num_tokens: int) -> list[torch.Tensor | None]:
        """Return the outputs of the earliest submission that is not collected yet.

        Raises:
            GuestLostError: The guest is gone, stalls, or cannot run the step.
        """
        began_s = max(self._submitted_s.popleft(), self._answered_s)
        try:
            answer = self._await_answer(self._times.deadline_s(num_tokens))
            self._answered_s = time.perf_counter()
            self._times.learn(self._answered_s - began_s, num_tokens)
            if self.lane is not None:
                answer = msgspec.structs.replace(
                    answer, tensors=tuple(self.lane.received(answer.tensors))
                )
            reply, tensors = self._read(answer)
            self._may_write = self._may_write and bool(self._submitted_s)
        except (TransportError, ProtocolError) as error:
            raise self.give_up(str(error)) from error
        finally:
            self._lock.release()
        return self._outputs(reply, tensors)

    def has_answer(self) -> bool:
        """Return whether the answer to a submission has begun to arrive, or the guest is gone."""
        return self._channel.has_pending() or self._has_input()

    def _has_input(self) -> bool:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN | select.POLLHUP)
        return bool(poll.poll(0))

    def drop(self, num_tokens: int) -> None:
        """Wait for the answers to all submissions, and discard them."""
        while self._submitted_s:
            with contextlib.suppress(GuestLostError):
                self.collect(num_tokens)

    def give_up(self, reason: str) -> GuestLostError:
        """Close the connection, and return the error to raise.

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
        if self.lane is not None:
            self.lane.close()
        if self._process is not None:
            # The slots of the store that the guest may be writing to will get other owners.
            if self._may_write or ends:
                self._process.kill()
            self._process.close()

    def _send(self, request: messages.Request, bundle: TensorBundle, timeout_s: float) -> None:
        message = Message(messages.encode(request), tuple(bundle.tensors), self._epoch())
        self._sent_s = time.perf_counter()
        self._channel.send(message, timeout_s)

    def _await_answer(
        self, deadline_s: float, still_s: float = 0.0, at_most_s: float = math.inf
    ) -> Message:
        """Return the next message; wait while the guest works or the deadline has not passed.

        Time counts from this call, not from a submission: earlier work may have been answered long
        ago, or the guest may have waited for the work before.

        Args:
            deadline_s: Maximum silence of a guest whose processor use is not visible, in seconds.
            still_s: Maximum time that a guest may stand still, in seconds, if longer than
                ``stall_s``.
            at_most_s: Maximum time of the answer even if the guest works, in seconds.
        """
        asked_s = since_s = looked_s = time.perf_counter()
        until_s = asked_s + deadline_s
        still_s = max(still_s, self._still_s / self.share)
        look_s = self._stall_s / _LOOKS
        while True:
            try:
                return self._channel.receive(look_s)
            except TransferTimeoutError:
                now_s = time.perf_counter()
                worked_s = self._pulse.last_worked_s(now_s)
                # Time in which this process stood still, perhaps like the guest, does not count.
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
        """Return ``tensor`` if it has the shape and the type of ``wanted``.

        Raises:
            GuestLostError: The shape or type differs; the guest is given up.
        """
        if tensor is None or (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise self.give_up("a step was answered with another shape than was asked for")
        return tensor

    def _refuse_lost(self) -> None:
        if self.lost is not None:
            raise GuestLostError(f"guest {self.guest_id} is lost: {self.lost}")
