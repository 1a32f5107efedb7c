"""Rebalancer: moves streams from overloaded instances to instances with fewer requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from banaserve.base.clock import Clock
from banaserve.base.tasks import end_tasks
from banaserve.base.types import InstanceId
from banaserve.orchestrator.control.rebalancing import (
    DecodeLoad,
    RebalanceOptions,
    Stream,
    choose_moves,
    decode_load_of,
    remaining_tokens,
)
from banaserve.serving.instances.instance import Instance
from banaserve.serving.requests.router import Router

logger = logging.getLogger(__name__)
_STALE_S = 5.0


class Rebalancer:
    """Mover of streams between instances: it decides once per interval, until it is stopped.

    The router chooses the instance at which a stream continues, and avoids the one that the stream
    just left if others can serve it. Decode instances are balanced among themselves, and so are
    instances that do both.

    Args:
        note: Function called with the streams to leave each instance, before they leave.
    """

    def __init__(
        self,
        router: Router,
        options: RebalanceOptions,
        clock: Clock,
        note: Callable[[Mapping[InstanceId, Sequence[Stream]]], None],
    ) -> None:
        self._cluster = router.cluster
        self._output_lengths = router.output_lengths
        self._options = options
        self._clock = clock
        self._note = note
        self._begun: set[InstanceId] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start deciding, in a task."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop deciding; streams that are moving still arrive."""
        await end_tasks(self._task)

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._options.interval_s)
            try:
                self.rebalance()
            except Exception:
                logger.exception("rebalancing")

    def rebalance(self) -> int:
        """Decide once; return the number of streams that are moved."""
        if self._cluster.is_replacing:
            return 0
        num_moved, begun = 0, self._begun
        self._begun = set()
        for role in self._options.roles:
            instances = self._cluster.instances.values()
            loads = [self._load(i) for i in instances if i.role is role and i.takes_requests]
            now_s = asyncio.get_running_loop().time()
            remaining = remaining_tokens(self._output_lengths.lengths)
            moves = choose_moves(loads, now_s, self._options, remaining, begun)
            self._begun.update(moves)
            if moves:
                self._note(moves)
            for source, streams in moves.items():
                instance = self._cluster.instances[source]
                for stream in streams:
                    instance.move_stream(stream.key)
                num, num_waiting = len(streams), sum(stream.is_waiting for stream in streams)
                words = "%d streams leave instance %s, %d of which had not begun there"
                logger.info(words, num, source, num_waiting)
                num_moved += num
        return num_moved

    def _load(self, instance: Instance) -> DecodeLoad:
        view = instance.view()
        if view.report is not None and self._clock.now() - view.report.at_s > _STALE_S:
            view = replace(view, report=None)
        return decode_load_of(view, instance.num_streams, instance.streams)
