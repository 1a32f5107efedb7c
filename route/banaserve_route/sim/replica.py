"""Simulated replica behind a balancer: batches, chunked prefill, memory and a prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from banaserve.engine.priority_groups import PriorityGroups
from banaserve.sim.timeline import Timeline
from banaserve_route.policies.interface import ReplicaId, Request
from banaserve_route.policies.preble.tree import CacheTree
from banaserve_route.policies.prefixes.tree import make_tree

BLOCK_TOKENS = 16
UNIT_BYTES = 8
"""Size of the digest of one block: prompts are digests of blocks, 8 bytes for 16 tokens."""

_LOOKS_A_STEP = 16
_SELF = ReplicaId("self")
_UNLIMITED_BYTES = 1 << 40


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
        fetch_ms_per_token: Time to copy the KV of a token from a shared store, in ms: 128 KiB at
            12.5 GB/s.
        num_groups: Number of Preble's groups of waiting requests by their cached share; 1: first
            come, first served.
    """

    step_ms: float = 55.0
    prefill_ms_per_token: float = 0.5
    decode_ms_per_request: float = 0.6
    kv_tokens: int = 24_000
    cache_tokens: int = 16_000
    max_running: int = 64
    chunk_tokens: int = 2048
    fetch_ms_per_token: float = 0.0105
    num_groups: int = 1


@dataclass(slots=True, eq=False)
class ReplicaJob:
    """Request on its way.

    Attributes:
        output: Digests of the answer's blocks, fixed beforehand.
        hit_tokens: Number of prompt tokens that the serving replica did not compute.
        fetched_tokens: Number of these that it copied from a shared store.
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
    fetched_tokens: int = 0
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


class SharedStore:
    """KV store without limit behind several replicas, which save all that they compute in it."""

    def __init__(self) -> None:
        self._tree = make_tree(UNIT_BYTES, _UNLIMITED_BYTES, _UNLIMITED_BYTES)

    def match(self, prompt: bytes) -> int:
        """Return the number of leading tokens of ``prompt`` that are stored."""
        return self._tree.match(prompt).get(_SELF, 0) * BLOCK_TOKENS

    def add(self, prompt: bytes) -> None:
        """Store the KV of ``prompt``."""
        self._tree.add(prompt, _SELF)


@dataclass(slots=True, eq=False)
class _Steps:
    """Equal steps that are taken together; only the first of several computes prompts."""

    began_s: float
    step_s: float
    decoding: list[ReplicaJob]
    computed: list[tuple[ReplicaJob, int]]
    count: int = 1


class SimReplica:
    """Engine that admits in order while memory lasts, and prefills in order of admission.

    Attributes:
        busy_s: Total time of its steps, in seconds.
    """

    def __init__(
        self,
        replica_id: str,
        region: str,
        accelerator: Accelerator,
        timeline: Timeline,
        store: SharedStore | None = None,
    ) -> None:
        self.id = ReplicaId(replica_id)
        self.region = region
        self.waiting: PriorityGroups[ReplicaJob] = PriorityGroups(accelerator.num_groups)
        self._num_submitted = 0
        self.running: list[ReplicaJob] = []
        self.used_tokens = 0
        self.most_outstanding = 0
        self.busy_s = 0.0
        self._spec = accelerator
        self._timeline = timeline
        self._cache = CacheTree(UNIT_BYTES, accelerator.cache_tokens, 60.0)
        self._store = store
        self._steps: _Steps | None = None

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
        self._num_submitted += 1
        self.waiting.add(job, self._num_submitted, self._cached_fraction(job))
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        if self._steps is None:
            self._step()
        elif len(self.waiting) == 1:
            self._shorten(self._steps)

    def _step(self) -> None:
        self._admit()
        if not self.running:
            self._steps = None
            return
        budget = self._spec.chunk_tokens
        decoding: list[ReplicaJob] = []
        computed: list[tuple[ReplicaJob, int]] = []
        taken_ms = self._spec.step_ms
        for job in self.running:
            if not job.left_to_prefill:
                decoding.append(job)
            elif budget:
                tokens = min(budget, job.left_to_prefill)
                budget -= tokens
                computed.append((job, tokens))
                taken_ms += self._spec.prefill_ms_per_token * tokens
                if job.left_to_prefill == job.request.num_tokens - job.hit_tokens:
                    taken_ms += self._spec.fetch_ms_per_token * job.fetched_tokens
        taken_ms += self._spec.decode_ms_per_request * len(decoding)
        steps = _Steps(self._timeline.now_s, taken_ms / 1000, decoding, computed)
        if not computed:
            # Nothing changes before an answer ends, or a request comes that may be admitted.
            steps.count = max(1, min(job.left_to_decode for job in decoding))
        self._steps = steps
        self._timeline.after(steps.count * steps.step_s, self._end, (steps, steps.count))

    def _shorten(self, steps: _Steps) -> None:
        """End ``steps`` with the present one."""
        now_s = self._timeline.now_s
        count = int((now_s - steps.began_s) / steps.step_s) + 1
        if count < steps.count:
            steps.count = count
            self._timeline.at(steps.began_s + count * steps.step_s, self._end, (steps, count))

    def _end(self, told: tuple[_Steps, int]) -> None:
        steps, count = told
        if steps is not self._steps or count != steps.count:
            return
        self.busy_s += count * steps.step_s
        decoding = steps.decoding
        for job, tokens in steps.computed:
            job.left_to_prefill -= tokens
            if not job.left_to_prefill:
                if self._store is not None:
                    self._store.add(job.request.prompt)
                job.on_first()
                decoding.append(job)
        for job in decoding:
            job.left_to_decode -= count
            if job.left_to_decode <= 0:
                self.running.remove(job)
                self.used_tokens -= job.held_tokens
                answered = job.request.prompt + job.output
                self._cache.add(answered, BLOCK_TOKENS, _SELF, self._timeline.now_s)
                if self._store is not None:
                    self._store.add(answered)
                job.on_done()
        self._step()

    def _hit_tokens(self, request: Request) -> int:
        hit = self._cache.match(request.prompt, BLOCK_TOKENS).get(_SELF)
        return min(int(hit[0]), request.num_tokens - 1) if hit else 0

    def _cached_fraction(self, job: ReplicaJob) -> float:
        if self.waiting.num_groups == 1:
            return 0.0
        return self._hit_tokens(job.request) / job.request.num_tokens

    def _admit(self) -> None:
        self.waiting.settle()
        if self.waiting.num_groups > 1:
            for job in self.waiting.to_look_at(_LOOKS_A_STEP):
                self.waiting.raise_to(job, self._cached_fraction(job))
        while self.waiting and len(self.running) < self._spec.max_running:
            job = self.waiting.peek()
            request = job.request
            hit_tokens = self._hit_tokens(request)
            output_tokens = len(job.output) // UNIT_BYTES * BLOCK_TOKENS
            held = request.num_tokens - hit_tokens + output_tokens
            if self.running and self.used_tokens + held > self._spec.kv_tokens:
                return
            self.waiting.pop()
            if self._store is not None:
                stored = min(self._store.match(request.prompt), request.num_tokens - 1)
                job.fetched_tokens = max(0, stored - hit_tokens)
            job.hit_tokens, job.held_tokens = hit_tokens + job.fetched_tokens, held
            job.left_to_prefill = request.num_tokens - job.hit_tokens
            job.left_to_decode = output_tokens
            self.used_tokens += held
            self.running.append(job)
            # As in vLLM, which prefills in this order: later requests find the blocks of earlier
            # ones, although some of those are still to be computed.
            self._cache.add(request.prompt, BLOCK_TOKENS, _SELF, self._timeline.now_s)
