"""Request on its way through the simulation."""

from __future__ import annotations

from typing import Any


class SimRequest:
    """Simulated request; mutable, and lean because there are millions.

    Attributes:
        prompt_tokens: Number of tokens of the prompt, as it arrived.
        output_tokens: Number of tokens to generate, known to the simulation only.
        hash_ids: Ids of the prompt's blocks, prefix by prefix; empty without such a trace.
        max_tokens: Maximum number of output tokens, which routing knows; 0 if unknown.
        cached_tokens: Number of prompt tokens that are found and not computed.
        found_tokens: Number of prompt tokens that were cached when the request was routed.
        resident_tokens: Number of ``cached_tokens`` in the engine's own cache, which need no fetch.
        to_compute: Number of tokens still to compute: of the prompt, or after a preemption of all
            tokens so far.
        computed: Number of tokens whose KV exists in the prefill under way.
        generated: Number of output tokens so far, as of the last join or preemption.
        kv_tokens: Number of tokens whose KV the request holds, as of the last join.
        joined_step, end_step: Decode steps of the engine at which the request joined and will end.
        first_s, end_s: Times of the first and of the last token, in seconds; -1 before.
        prefill, decode: Instances of the two legs; prefill is None for an adopted request.
        expected_by: Instance that will decode the request, while the prompt is computed elsewhere.
        held_by: Engine that keeps the request's KV until it is fetched; None for none.
        rebalanced_s: Time of the last move by the rebalancer, in seconds; None for none.
        counted_tokens: Number of the request's tokens in the router's counts of its instance.
        uncounted_tokens: Number of those tokens that the instance has to compute first.
    """

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "computed",
        "counted_tokens",
        "decode",
        "end_s",
        "end_step",
        "expected_by",
        "first_s",
        "found_tokens",
        "generated",
        "hash_ids",
        "held_by",
        "id",
        "joined_step",
        "kv_tokens",
        "max_tokens",
        "num_preemptions",
        "output_tokens",
        "prefill",
        "prompt_tokens",
        "rebalanced_s",
        "resident_tokens",
        "to_compute",
        "uncounted_tokens",
    )

    def __init__(
        self,
        id: int,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        hash_ids: tuple[int, ...] = (),
        max_tokens: int = 0,
    ) -> None:
        self.id = id
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.hash_ids = hash_ids
        self.max_tokens = max_tokens
        self.cached_tokens = 0
        self.found_tokens = 0
        self.resident_tokens = 0
        self.to_compute = prompt_tokens
        self.computed = 0
        self.generated = 0
        self.kv_tokens = 0
        self.joined_step = 0
        self.end_step = -1
        self.first_s = -1.0
        self.end_s = -1.0
        self.num_preemptions = 0
        self.counted_tokens = 0
        self.uncounted_tokens = 0
        self.rebalanced_s: float | None = None
        self.prefill: Any = None
        self.decode: Any = None
        self.expected_by: Any = None
        self.held_by: Any = None

    @property
    def all_tokens(self) -> int:
        """Return the number of tokens of the prompt and of the output so far."""
        return self.prompt_tokens + self.generated

    @property
    def needed_tokens(self) -> int:
        """Return the KV tokens needed for admission: of the whole prompt, or those to fetch."""
        return self.to_compute + self.cached_tokens if self.to_compute else self.kv_tokens

    def comes(self) -> None:
        """Let the decode instance no longer expect the request: its prompt is computed, or lost."""
        if self.expected_by is not None:
            self.expected_by.coming -= 1
            self.expected_by.is_dirty = True
            self.expected_by = None

    def start_over(self) -> None:
        """Lose the request's KV: all tokens so far have to be computed again."""
        self.to_compute = self.all_tokens
        self.computed = 0
        self.cached_tokens = self.resident_tokens = 0
        self.kv_tokens = 0
        self.end_step = -1
