"""Which of a step's copies a worker can carry out: those between it and a pool it has mapped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from banaserve.engine.vllm.transfer_plan import BlockCopy
from banaserve.errors import StoreUnavailableError
from banaserve.kvstore.client import StoreClient
from banaserve.kvstore.pool import PoolView


@dataclass(frozen=True, slots=True)
class Visible:
    """Copies whose slots all lie in ``view``: in the pool of another life of the store, their
    places would hold other blocks. Without a view there are no copies.
    """

    view: PoolView | None = None
    copies: Sequence[BlockCopy] = ()

    @classmethod
    def of(cls, copies: Sequence[BlockCopy], client: StoreClient) -> Visible:
        """Those of ``copies`` that ``client`` sees; connects where it has to."""
        view: PoolView | None = None
        for generation in {copy.slot.generation for copy in copies}:
            # Of two lives of the store the client knows one: the later, where it can.
            with suppress(StoreUnavailableError):
                view = client.view(generation)
        if view is None:
            return cls()
        return cls(view, [copy for copy in copies if copy.slot.generation == view.generation])
