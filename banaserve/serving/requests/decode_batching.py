"""Groups of decode legs that begin together, since their prompts are computed at the same time.

An engine that gets several prompts at once computes them in one step or two, and decodes them
together. With separate prefill, each decode leg would begin alone, as soon as it can: more steps,
each of which reads all weights. Here the first leg of a group waits, at most for a time limit,
until all prompts that were being computed for the same instance at its arrival are done. Decode
legs that arrive meanwhile join the group. No first token is delayed: it comes from prefill.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from banaserve.base.types import InstanceId
from banaserve.serving.instances.instance import Instance


@dataclass
class _Group:
    """Decode legs that begin together, once ``closed`` is set.

    Attributes:
        awaited: Unfinished ones of the prompts that were being computed when the first leg arrived.
    """

    awaited: set[object]
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class DecodeBatching:
    """Groups of decode legs, of all decode instances.

    Args:
        limit_s: Maximum waiting time of the first of a group, in seconds; 0 disables waiting.
    """

    def __init__(self, limit_s: float = 0.0) -> None:
        self._limit_s = limit_s
        self._groups: dict[InstanceId, _Group] = {}

    @contextlib.contextmanager
    def coming(self, instance: Instance) -> Iterator[None]:
        """Note, for the block, that a prompt computed elsewhere will be decoded at ``instance``."""
        prompt = object()
        instance.coming.add(prompt)
        try:
            yield
        finally:
            instance.coming.remove(prompt)
            group = self._groups.get(instance.id)
            if group is not None:
                group.awaited.discard(prompt)
                if not group.awaited:
                    self._close(instance.id, group)

    def waits(self, instance: Instance) -> bool:
        """Return whether a decode leg that is about to begin at ``instance`` should wait."""
        return self._limit_s > 0 and bool(instance.coming)

    async def wait_for_group(self, instance: Instance, news: asyncio.Event | None = None) -> None:
        """Return when the group of a decode leg that is about to begin at ``instance`` is complete.

        Args:
            news: Event that ends the wait early: set when the request has an output or an error.
        """
        if not self.waits(instance):
            return
        group = self._groups.get(instance.id)
        if group is None:
            group = self._groups[instance.id] = _Group(set(instance.coming))
            loop = asyncio.get_running_loop()
            loop.call_later(self._limit_s, self._close, instance.id, group)
        events = [group.closed] if news is None else [group.closed, news]
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _close(self, instance: InstanceId, group: _Group) -> None:
        group.closed.set()
        if self._groups.get(instance) is group:
            del self._groups[instance]
