"""Request on its way through the simulation."""

from __future__ import annotations

from typing import Any


class SimRequest:
    """One request; mutable, and lean because there are millions.

    Attributes:
        prompt_tokens: As it arrived.
        output_tokens: What it will generate, known to the simulation alone.
        hash_ids: Ids of its prompt's blocks, prefix by prefix, where a trace has them.
        max_tokens: Most that its client allows, which routing knows; 0 where none is said.
        cached_tokens: Of the prompt, those that are fetched and not computed.
        found_tokens: Of the prompt, those that were cached when it was routed.
        to_compute: Tokens of the prompt (after a preemption: of everything so far) still to do.
        computed: Tokens whose KV it has, in the prefill under way.
        generated: Output tokens so far, as of the last join or preemption.
        kv_tokens: KV that it holds, as of its last join.
        joined_step, end_step: Decode steps of its engine at which it joined and will end.
        first_s, end_s: When its first and its last token came; -1 before.
        prefill, decode: Engines of its two legs; prefill is None where one serves both.
        expected_by: The instance that will decode it, until its prompt is computed elsewhere.
        held_by: The engine that keeps its KV until it is fetched.
        rebalanced_s: Time of its last move by the rebalancer; None for none.
        counted_tokens: Its tokens in the router's counts of the instance that it is at,
        uncounted_tokens: and of those, the ones that have to be computed there first.
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
        """Prompt and what has been generated."""
        return self.prompt_tokens + self.generated

    @property
    def needed_tokens(self) -> int:
        """KV that it takes when it is admitted: its whole prompt, or what it fetches."""
        return self.to_compute + self.cached_tokens if self.to_compute else self.kv_tokens

    def comes(self) -> None:
        """Nobody waits for its prompt any more: it is computed, or lost."""
        if self.expected_by is not None:
            self.expected_by.coming -= 1
            self.expected_by.is_dirty = True
            self.expected_by = None

    def start_over(self) -> None:
        """Its KV is lost: everything so far has to be computed again."""
        self.to_compute = self.all_tokens
        self.computed = 0
        self.cached_tokens = 0
        self.kv_tokens = 0
        self.end_step = -1
