"""Calls to all engines whose effect lasts, such as a pause: engines that start later get them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Calls = Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]]
"""Arguments of calls by the name of the client's method, in the order of the calls."""


class LastingCalls:
    """Calls in force: those since the engines last ran freely.

    Attributes:
        calls: Calls in force; replaced, never modified.
    """

    def __init__(self) -> None:
        self.calls: Calls = {}

    def begin(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Note a call before engines that serve get it; it replaces an earlier one of its name."""
        earlier = {name: given for name, given in self.calls.items() if name != method}
        self.calls = {**earlier, method: (args, kwargs)}

    def end(self) -> None:
        """Forget all calls, before engines that serve are told to run freely."""
        self.calls = {}

    async def give(self, llm: Any, taken: Calls) -> Calls:
        """Bring an engine that does not serve yet to the state of the others.

        Args:
            taken: Calls that the engine got before.

        Returns:
            Calls that it has got now: more may have come meanwhile.
        """
        calls = self.calls
        if taken:
            await llm.wake_up()
        for method, (args, kwargs) in calls.items():
            await getattr(llm, method)(*args, **kwargs)
        return calls
