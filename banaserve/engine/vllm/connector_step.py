"""What the worker's side of the connector knows of the step that runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from banaserve.engine.vllm.copies import Copy
from banaserve.engine.vllm.transfer_plan import BlockCopy
from banaserve.engine.vllm.visible import Visible
from banaserve.kvstore.client import StoreClient


@dataclass(slots=True)
class RunningStep:
    """One step's copies.

    Attributes:
        early: Fetches that the forward pass begins behind.
        loads: A fetch for each layer, in the order of the layers; empty where nothing is fetched.
        saves: A save for each layer so far.
        target: Where this step's saves go, once anybody has asked.
        deferred: Layers whose save waits for the end of the forward pass.
        waited_s: How long the engine's thread has waited for fetches.
    """

    began_s: float
    early: list[Copy] = field(default_factory=list)
    loads: list[Future[Copy]] = field(default_factory=list)
    saves: list[Future[Copy | None]] = field(default_factory=list)
    target: Visible | None = None
    deferred: list[int] = field(default_factory=list)
    waited_s: float = 0.0
    fetched_blocks: int = 0
    fetch_s: float = 0.0
    compute_s: float | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def target_of(self, copies: Sequence[BlockCopy], client: StoreClient) -> Visible:
        """Those of the step's saves that can be made: the same for every layer, from any thread.

        A slot that was visible for some layers only must not be committed.
        """
        with self.lock:
            if self.target is None:
                self.target = Visible.of(copies, client)
            return self.target
