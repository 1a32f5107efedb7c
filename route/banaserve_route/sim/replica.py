"""Simulated replica behind a balancer: batches, chunked prefill, memory and a prefix cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from banaserve.sim.timeline import Timeline
from banaserve_route.policies.interface import ReplicaId, Request
from banaserve_route.policies.preble.tree import CacheTree

BLOCK_TOKENS = 16
UNIT_BYTES = 8
"""Size of the digest of one block: prompts are digests of blocks, 8 bytes for 16 tokens."""

_SELF = ReplicaId("self")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Cost of a step, and memory. The defaults are of Llama-3.1-8B on one L4.

    Attributes:
        step_ms: Fixed time of a step, in ms, for reading the weights: 16 GB at 300 GB/s.
        prefill_ms_per_token: Time per prompt token, in ms; SkyWalker says about 300 ms for 512
            tokens.
        decode_ms_per_request: Time of a decoding request in a step, including its KV, in ms.
        kv_tokens: Memory for running requests, in tokens.
        cache_tokens: Memory for cached prefixes besides, in tokens; in an engine both share one
            memory.
        max_running: Maximum number of requests in a batch.
        chunk_tokens: Maximum number of prompt tokens in a step.
    """

    step_ms: float = 55.0
    prefill_ms_per_token: float = 0.5
    decode_ms_per_request: float = 0.6
    kv_tokens: int = 24_000
    cache_tokens: int = 16_000
    max_running: int = 64
    chunk_tokens: int = 2048


@dataclass(slots=True, eq=False)
class ReplicaJob:
    """Request on its way.

    Attributes:
        output: Digests of the answer's blocks, fixed beforehand.
        hit_tokens: Number of prompt tokens that the serving replica had cached.
        on_first: Called when the first token leaves the replica; ``on_done`` at the last token.
        on_refused: Called when a replica that serves nothing at present sends the request back.
    """

    request: Request
    output: bytes
    on_first: Callable[[], None]
    on_done: Callable[[], None]
    on_refused: Callable[[], None] | None = None
    left_to_prefill: int = 0
    left_to_decode: int = 0
    hit_tokens: int = 0
    held_tokens: int = 0


class BalancedReplica(Protocol):
    """Replica as a simulated balancer knows it: one engine, or a cell of many."""

    id: ReplicaId
    region: str

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that are in no batch yet."""

    @property
    def num_running(self) -> int:
        """Return the number of requests in a batch."""

    @property
    def kv_used_fraction(self) -> float:
        """Return the share of the replica's KV memory that is in use."""

    @property
    def is_ready(self) -> bool:
        """Return whether the replica serves at all."""

    @property
    def has_room(self) -> bool:
        """Return whether the replica would begin another request at once, as peers are told."""

    def submit(self, job: ReplicaJob) -> None:
        """Take ``job``."""


class SimReplica:
    """Engine that admits in order while memory lasts, and prefills in order of admission."""

    def __init__(
        self, replica_id: str, region: str, accelerator: Accelerator, timeline: Timeline
    ) -> None:
        self.id = ReplicaId(replica_id)
        self.region = region
        self.waiting: deque[ReplicaJob] = deque()
        self.running: list[ReplicaJob] = []
        self.used_tokens = 0
        self.most_outstanding = 0
        self._spec = accelerator
        self._timeline = timeline
        self._cache = CacheTree(UNIT_BYTES, accelerator.cache_tokens, 60.0)
        self._is_stepping = False

    @property
    def outstanding(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def is_ready(self) -> bool:
        return True

    @property
    def has_room(self) -> bool:
        return not self.waiting

    @property
    def kv_used_fraction(self) -> float:
        return self.used_tokens / self._spec.kv_tokens

    def submit(self, job: ReplicaJob) -> None:
        """Take ``job``, which starts with the next step that has room."""
        self.waiting.append(job)
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        if not self._is_stepping:
            self._is_stepping = True
            self._step(None)

    def _step(self, _: object) -> None:
        self._admit()
        if not self.running:
            self._is_stepping = False
            return
        budget = self._spec.chunk_tokens
        decoding = [job for job in self.running if not job.left_to_prefill]
        computed: list[tuple[ReplicaJob, int]] = []
        for job in self.running:
            if job.left_to_prefill and budget:
                tokens = min(budget, job.left_to_prefill)
                budget -= tokens
                computed.append((job, tokens))
        num_tokens = sum(tokens for _, tokens in computed)
        spec = self._spec
        taken_ms = (
            spec.step_ms
            + spec.prefill_ms_per_token * num_tokens
            + spec.decode_ms_per_request * len(decoding)
        )
        self._timeline.after(taken_ms / 1000, self._end, (decoding, computed))

    def _end(self, step: tuple[list[ReplicaJob], list[tuple[ReplicaJob, int]]]) -> None:
        decoding, computed = step
        for job, tokens in computed:
            job.left_to_prefill -= tokens
            if not job.left_to_prefill:
                self._remember(job.request.prompt)
                job.on_first()
                decoding.append(job)
        for job in decoding:
            job.left_to_decode -= 1
            if job.left_to_decode <= 0:
                self.running.remove(job)
                self.used_tokens -= job.held_tokens
                self._remember(job.request.prompt + job.output)
                job.on_done()
        self._step(None)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._spec.max_running:
            job = self.waiting[0]
            request = job.request
            hit = self._cache.match(request.prompt, BLOCK_TOKENS).get(_SELF)
            hit_tokens = min(int(hit[0]), request.num_tokens - 1) if hit else 0
            output_tokens = len(job.output) // UNIT_BYTES * BLOCK_TOKENS
            held = request.num_tokens - hit_tokens + output_tokens
            if self.running and self.used_tokens + held > self._spec.kv_tokens:
                return
            self.waiting.popleft()
            job.hit_tokens, job.held_tokens = hit_tokens, held
            job.left_to_prefill = request.num_tokens - hit_tokens
            job.left_to_decode = output_tokens
            self.used_tokens += held
            self.running.append(job)

    def _remember(self, prompt: bytes) -> None:
        self._cache.add(prompt, BLOCK_TOKENS, _SELF, self._timeline.now_s)
