"""Arrangements: how many instances prefill, decode or do both, and in steps of which size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from banaserve.types import InstanceId, InstanceView, Role

PREFILL_STEP_TOKENS = 2048
"""Fewest tokens of a step where nobody decodes beside it: small chunks would only cost."""


class Arrangement(NamedTuple):
    """Roles by their numbers; which instance has which matters where devices are not alike.

    Attributes:
        step_tokens: Most tokens of a step where prompts are computed.
    """

    num_prefill: int
    num_decode: int
    num_both: int
    step_tokens: int

    @property
    def size(self) -> int:
        return self.num_prefill + self.num_decode + self.num_both

    def tokens_of(self, role: Role) -> int:
        """Most tokens of a step of an instance of ``role``."""
        if role is Role.PREFILL:
            return max(PREFILL_STEP_TOKENS, self.step_tokens)
        return self.step_tokens

    def __str__(self) -> str:
        return (
            f"{self.num_prefill} prefill, {self.num_decode} decode, {self.num_both} both, "
            f"steps of {self.step_tokens}"
        )


def arrangements(size: int, chunks: Sequence[int]) -> Iterator[Arrangement]:
    """Yields every arrangement of ``size`` instances in which each has something to do.

    Instances that only decode get their requests from those that only prefill; one that does both
    keeps its own.
    """
    for num_prefill in range(size):
        for num_decode in range(size - num_prefill + 1):
            num_both = size - num_prefill - num_decode
            if (num_decode and not num_prefill) or not num_decode + num_both:
                continue
            # Without somebody who does both, smaller chunks change nothing.
            sizes = chunks if num_both else [n for n in chunks if n >= PREFILL_STEP_TOKENS]
            for step_tokens in sizes or chunks[-1:]:
                yield Arrangement(num_prefill, num_decode, num_both, step_tokens)


def arrangement_of(views: Sequence[InstanceView]) -> Arrangement:
    """Returns the present arrangement; step sizes that differ count as the smallest of both."""
    roles = [view.role for view in views]
    prompts = [view for view in views if view.role is Role.COLOCATED] or [
        view for view in views if view.role is Role.PREFILL
    ]
    return Arrangement(
        roles.count(Role.PREFILL),
        roles.count(Role.DECODE),
        roles.count(Role.COLOCATED),
        min((view.step_tokens for view in prompts), default=0),
    )


Order = tuple[str, ...]
"""Profiles of devices in the order in which they get instances that prefill; the last ones decode.
Empty where it does not matter which instance has which role."""

_MOST_PERMUTED = 3
"""Kinds of devices of which every order is looked at; of more, each kind first and each last."""


def device_of(view: InstanceView) -> str:
    """Returns the profile of the instance's device; empty for that of the cluster."""
    return view.facts.profile if view.facts is not None else ""


def orders(views: Sequence[InstanceView]) -> tuple[Order, ...]:
    """Returns every order of the devices of ``views``; one that is empty where all are alike."""
    kinds = sorted({device_of(view) for view in views})
    if len(kinds) < 2:
        return ((),)
    if len(kinds) <= _MOST_PERMUTED:
        return tuple(permutations(kinds))
    found = []
    for one in kinds:
        others = tuple(kind for kind in kinds if kind != one)
        found += [(one, *others), (*others, one)]
    return tuple(dict.fromkeys(found))


def assign(
    wanted: Arrangement, views: Sequence[InstanceView], order: Order = ()
) -> Mapping[InstanceId, Role]:
    """Returns the new roles of those that change, as few as can be.

    Who prefills only afterwards is taken from those that decode least, who decodes only from
    those with the least left to prefill: what they still have runs on beside the new work.

    Args:
        order: Says how many of each kind of device have which role; within a kind as above.
    """
    if order:
        found: dict[InstanceId, Role] = {}
        for kind, part in _by_kind(wanted, views, order).items():
            found.update(assign(part, [view for view in views if device_of(view) == kind]))
        return found
    open_ = {
        Role.PREFILL: wanted.num_prefill,
        Role.DECODE: wanted.num_decode,
        Role.COLOCATED: wanted.num_both,
    }
    changes: list[InstanceView] = []
    for role in open_:
        having = [view for view in views if view.role is role]
        # Those stay that have the most of what the role does.
        having.sort(key=lambda view: (-_work(view, role), view.id))
        changes += having[open_[role] :]
        open_[role] -= min(open_[role], len(having))
    changed: dict[InstanceId, Role] = {}
    for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED):
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        changes.sort(key=lambda view: (_work(view, other), view.id))
        for view in changes[: open_[role]]:
            changed[view.id] = role
        changes = changes[open_[role] :]
    return changed


def _by_kind(
    wanted: Arrangement, views: Sequence[InstanceView], order: Order
) -> dict[str, Arrangement]:
    """The first kinds prefill, the last ones decode, those between do both."""
    free = {kind: sum(device_of(view) == kind for view in views) for kind in order}

    def filled(number: int, kinds: Sequence[str]) -> dict[str, int]:
        """Of each kind, how many of ``number`` instances it has."""
        found = {}
        for kind in kinds:
            found[kind] = min(number, free[kind])
            free[kind] -= found[kind]
            number -= found[kind]
        return found

    prefill = filled(wanted.num_prefill, order)
    decode = filled(wanted.num_decode, order[::-1])
    return {
        kind: Arrangement(prefill[kind], decode[kind], free[kind], wanted.step_tokens)
        for kind in order
    }


def _work(view: InstanceView, role: Role) -> float:
    """How much ``view`` has of what ``role`` does; only compared."""
    if role is Role.PREFILL:
        return view.computable_prefill_tokens
    return view.report.kv_used_fraction if view.report is not None else view.inflight_requests
