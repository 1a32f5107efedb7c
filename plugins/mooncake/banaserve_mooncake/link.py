"""Thread between the tier and Mooncake's process, with a deadline for every operation."""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections import deque
from typing import NamedTuple

from banaserve.base.errors import ProtocolError
from banaserve.kvstore.tiers.interface import TierOutcome
from banaserve.kvstore.tiers.mailbox import Mailbox
from banaserve_mooncake.child import TRAILER_BYTES, Staging
from banaserve_mooncake.config import MooncakeConfig
from banaserve_mooncake.events import AskedKeys, Event, Health, MooncakeJob, Order, Removed
from banaserve_mooncake.process import NOT_FOUND, TOO_LARGE, AskPresent, Call, Get, Put, Remove
from banaserve_mooncake.supervisor import MooncakeSupervisor

log = logging.getLogger(__name__)

# A call counts as hung after this many timeouts: it consists of two of Mooncake's own steps.
_PATIENCE = 4


class _Sent(NamedTuple):
    call: Call
    job: MooncakeJob | None
    at_s: float


class MooncakeLink:
    """Thread that executes each order put into ``orders``, with one event in ``events`` for each.

    Only ``close`` waits, no longer than the timeout and two seconds.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        self.orders: Mailbox[Order] = Mailbox()
        self.events: Mailbox[Event] = Mailbox()
        self._timeout_s = config.timeout_s
        self._closing = False
        self._staging = Staging(config.depth, config.max_block_bytes)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.orders.fd, selectors.EVENT_READ, self._on_orders)
        self._supervisor = MooncakeSupervisor(
            config,
            self._staging.fd,
            self._selector,
            on_done=self._on_done,
            on_lost=self._on_lost,
            on_health=self.events.put,
        )
        self._waiting: deque[MooncakeJob] = deque()
        self._sent: dict[int, _Sent] = {}
        self._removing: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, name="mooncake", daemon=True)
        self._thread.start()

    @property
    def health(self) -> Health:
        """Last known health of the store."""
        return self._supervisor.health

    def close(self) -> None:
        """Finish or fail the transfers under way, then leave the store."""
        self._closing = True
        self.orders.knock()
        self._thread.join()
        self._selector.close()
        self._staging.close()
        self.orders.close()
        self.events.close()

    def _run(self) -> None:
        while not (self._closing and self._is_idle()):
            try:
                self._turn()
            except Exception:
                log.exception("Mooncake's thread goes on after an error")
                self._supervisor.lose("an internal error, see the log")
        self._supervisor.leave()

    def _turn(self) -> None:
        self._supervisor.look_after()
        for key, _ in self._selector.select(self._wait_s()):
            key.data()
        self._expire()
        self._give_out()

    def _is_idle(self) -> bool:
        is_busy = any(sent.job and not sent.job.outcome for sent in self._sent.values())
        return self.orders.is_empty and not is_busy and not self._waiting

    def _wait_s(self) -> float:
        due_s = [self._supervisor.due_s()]
        due_s += [job.deadline_s for job in self._waiting]
        due_s += [s.job.deadline_s for s in self._sent.values() if s.job and not s.job.outcome]
        return max(0.0, min(due_s) - time.monotonic())

    def _on_orders(self) -> None:
        self.orders.calm()
        for order in self.orders.take():
            match order:
                case MooncakeJob():
                    self._waiting.append(order)
                case AskedKeys(keys, _) if self.health.available:
                    self._call(AskPresent(self._supervisor.next_seq(), keys))
                case Removed(keys) if self.health.available:
                    self._removing.update(keys)
                    self._call(Remove(self._supervisor.next_seq(), keys))
                case _:
                    self.events.put(order)

    def _give_out(self) -> None:
        """Send waiting jobs in order while slots are free; skip those with a key being removed."""
        held: list[MooncakeJob] = []
        while self._waiting and (self._staging.num_free or not self.health.available):
            job = self._waiting.popleft()
            if not self.health.available:
                self._end(job, TierOutcome.FAILED)
            elif job.key in self._removing:
                held.append(job)
            else:
                self._transfer(job)
        self._waiting.extendleft(reversed(held))

    def _transfer(self, job: MooncakeJob) -> None:
        job.slot = self._staging.take()
        if job.is_store:
            self._staging.fill(job.slot, job.key, job.memory)
        kind = Put if job.is_store else Get
        first_byte = self._staging.first_byte(job.slot)
        num_bytes = job.memory.size + TRAILER_BYTES
        self._call(kind(self._supervisor.next_seq(), job.key, first_byte, num_bytes), job)

    def _call(self, call: Call, job: MooncakeJob | None = None) -> None:
        self._sent[call.seq] = _Sent(call, job, time.monotonic())
        self._supervisor.send(call)

    def _end(self, job: MooncakeJob, outcome: TierOutcome) -> None:
        if job.outcome is None:
            job.outcome = outcome
            self.events.put(job)

    def _expire(self) -> None:
        now_s = time.monotonic()
        for job in [job for job in self._waiting if job.deadline_s <= now_s]:
            self._waiting.remove(job)
            self._end(job, TierOutcome.FAILED)
        for sent in self._sent.values():
            if sent.job and sent.job.deadline_s <= now_s:
                # The slot stays taken: the call may still write to it.
                self._end(sent.job, TierOutcome.FAILED)
        oldest_s = min((sent.at_s for sent in self._sent.values()), default=now_s)
        if now_s - oldest_s > _PATIENCE * max(1.0, self._timeout_s):
            self._supervisor.lose("Mooncake's client does not answer")

    def _on_done(self, seq: int, codes: list[int]) -> None:
        if not codes:
            raise ProtocolError("an answer without a code")
        call, job, _ = self._sent.pop(seq)
        match call:
            case AskPresent(_, keys):
                complete = len(codes) == len(keys) and min(codes) >= 0
                self.events.put(AskedKeys(keys, codes if complete else None))
            case Remove(_, keys):
                self._removing.difference_update(keys)
                self.events.put(Removed(keys))
            case _:
                assert job is not None
                self._on_transferred(job, codes[0])
        if codes[0] < 0 and codes[0] != NOT_FOUND:
            self._supervisor.doubt()

    def _on_transferred(self, job: MooncakeJob, code: int) -> None:
        assert job.slot is not None
        if job.outcome is None:
            self._end(job, self._outcome(job, job.slot, code))
        self._staging.give_back(job.slot)

    def _outcome(self, job: MooncakeJob, slot: int, code: int) -> TierOutcome:
        if job.is_store:
            return TierOutcome.DONE if code == 0 else TierOutcome.FAILED
        if code == job.memory.size + TRAILER_BYTES:
            is_right = self._staging.copy_out(slot, job.key, job.memory)
            return TierOutcome.DONE if is_right else TierOutcome.CORRUPT
        if code == NOT_FOUND:
            return TierOutcome.MISSING
        return TierOutcome.CORRUPT if code >= 0 or code == TOO_LARGE else TierOutcome.FAILED

    def _on_lost(self) -> None:
        """End every call: the process is dead and no longer writes to the staging memory."""
        lost, self._sent = self._sent, {}
        self._removing.clear()
        for call, job, _ in lost.values():
            if job is not None and job.slot is not None:
                self._end(job, TierOutcome.FAILED)
                self._staging.give_back(job.slot)
            elif isinstance(call, AskPresent):
                self.events.put(AskedKeys(call.keys, None))
            elif isinstance(call, Remove):
                self.events.put(Removed(call.keys))
