"""Parts of the time of simulated requests: waiting, prefill, hand-over, decode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.instances.engine import SimEngine
from banaserve.sim.request import SimRequest


class TimeParts(NamedTuple):
    """Mean times of a request, in seconds, one after another.

    Attributes:
        wait_s: Time from the client's sending to the engine's admission.
        prefill_s: Time from admission to the first token.
        handover_s: Time from the first token to the first step that decodes.
        decode_s: Time from that step to the last token.
    """

    wait_s: float
    prefill_s: float
    handover_s: float
    decode_s: float


class PartsWatch:
    """Watch of a cluster's steps, which notes when each request begins to be computed."""

    def __init__(self) -> None:
        self._prefill_s: dict[int, float] = {}
        self._decode_s: dict[int, float] = {}

    def watch(self, cluster: SimCluster) -> None:
        """Watch ``cluster``, which has not run yet."""
        for cell in cluster.cells:
            for instance in cell.instances.values():
                instance.engine.observe = partial(self._note, instance.engine)

    def _note(
        self, engine: SimEngine, start_s: float, took_s: float, steps: int, batch: int, tokens: int
    ) -> None:
        for request in engine.prefilling:
            self._prefill_s.setdefault(request.id, start_s)
        for id in engine.decoding:
            self._decode_s.setdefault(id, start_s)

    def parts(self, finished: Sequence[SimRequest], way_s: float) -> TimeParts:
        """Return the means over ``finished`` requests, each of which waits ``way_s`` longer."""
        sums = [way_s * len(finished), 0.0, 0.0, 0.0]
        for one in finished:
            began_s = self._prefill_s.get(one.id, one.arrival_s)
            # A request with one output token does not decode.
            decoded_s = self._decode_s.get(one.id, one.first_s)
            moments = (one.arrival_s, began_s, one.first_s, decoded_s, one.end_s)
            for place in range(4):
                sums[place] += moments[place + 1] - moments[place]
        return TimeParts(*(one / max(1, len(finished)) for one in sums))
