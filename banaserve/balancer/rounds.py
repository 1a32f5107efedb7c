"""What a balancer does over and over as long as it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic


async def over_and_over(
    step: Callable[[], Awaitable[None]],
    interval_s: float,
    log: Callable[[str], None],
    what: str,
) -> None:
    """Do ``step`` every ``interval_s`` until cancelled, whatever it raises.

    Nobody awaits these tasks: without this, one surprise would end a look at a replica for good,
    and nothing would say so. A step that fails anew in the same words is not logged again.
    """
    complaint = ""
    while True:
        began_s = monotonic()
        try:
            await step()
            complaint = ""
        except Exception as error:
            if (words := f"{what} failed: {error!r}") != complaint:
                complaint = words
                log(words)
        await asyncio.sleep(max(0.0, interval_s - (monotonic() - began_s)))
