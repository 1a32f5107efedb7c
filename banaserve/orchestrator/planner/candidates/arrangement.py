"""Arrangements: how many instances prefill, decode or do both, and with which step size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from banaserve.base.types import InstanceId, InstanceView, Role

PREFILL_STEP_TOKENS = 2048
"""Least step size, in tokens, of an instance that only prefills: small chunks would only cost."""

_PARTS = 8
"""Number of equal parts of many instances that get their roles together: a forecast of 64 takes 0.3
to 1.5 s, and one by one they have 2,080 splits into roles."""


class Arrangement(NamedTuple):
    """Number of instances of each role; with unlike devices, an ``Order`` assigns the roles.

    Attributes:
        step_tokens: Maximum number of tokens of a step of the instances that compute prompts.
    """

    num_prefill: int
    num_decode: int
    num_both: int
    step_tokens: int

    @property
    def size(self) -> int:
        return self.num_prefill + self.num_decode + self.num_both

    def tokens_of(self, role: Role) -> int:
        """Return the maximum number of tokens of a step of an instance of ``role``."""
        if role is Role.PREFILL:
            return max(PREFILL_STEP_TOKENS, self.step_tokens)
        return self.step_tokens

    def __str__(self) -> str:
        return (
            f"{self.num_prefill} prefill, {self.num_decode} decode, {self.num_both} both, "
            f"steps of {self.step_tokens}"
        )


def arrangements(
    size: int, chunks: Sequence[int], present: Sequence[int] = ()
) -> Iterator[Arrangement]:
    """Yield every arrangement of ``size`` instances in which each instance has work.

    Instances that only decode get their requests from those that only prefill; an instance that
    does both keeps its own. Of 16 instances or more, roles differ by several instances.

    Args:
        present: Arrangement whose roles are among them in any case; empty for none.
    """
    step = max(1, size // _PARTS)
    for num_prefill in range(size):
        for num_decode in range(size - num_prefill + 1):
            num_both = size - num_prefill - num_decode
            if (num_decode and not num_prefill) or not num_decode + num_both:
                continue
            is_between = num_prefill % step or (num_both and num_decode % step)
            if is_between and (num_prefill, num_decode) != present[:2]:
                continue
            # Without an instance that does both, smaller chunks change nothing.
            sizes = chunks if num_both else [n for n in chunks if n >= PREFILL_STEP_TOKENS]
            for step_tokens in sizes or chunks[-1:]:
                yield Arrangement(num_prefill, num_decode, num_both, step_tokens)


def arrangement_of(views: Sequence[InstanceView]) -> Arrangement:
    """Return the present arrangement.

    Its step size is the smallest one of the colocated instances, or else of the prefill instances.
    """
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
"""Device profiles in the order in which their instances prefill; those of the last ones decode.
Empty if it does not matter which instance has which role."""

_MOST_PERMUTED = 3
"""Number of device kinds up to which all orders are tried; of more, each kind first and last."""


def device_kind(view: InstanceView) -> str:
    """Return the profile of the instance's device; empty for the usual one of the cluster."""
    return view.facts.profile if view.facts is not None else ""


def orders(views: Sequence[InstanceView]) -> tuple[Order, ...]:
    """Return the orders of device kinds to try; one empty order if all ``views`` are alike."""
    kinds = sorted({device_kind(view) for view in views})
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
    """Return the new roles of the instances that change, as few as possible.

    An instance that will only prefill is taken from those that decode least, one that will only
    decode from those with the least left to prefill: their old work continues beside the new work.

    Args:
        order: Order of device kinds, which fixes how many of each kind have which role; within a
            kind, instances are chosen as above.
    """
    if order:
        found: dict[InstanceId, Role] = {}
        for kind, part in _by_kind(wanted, views, order).items():
            found.update(assign(part, [view for view in views if device_kind(view) == kind]))
        return found
    open_ = {
        Role.PREFILL: wanted.num_prefill,
        Role.DECODE: wanted.num_decode,
        Role.COLOCATED: wanted.num_both,
    }
    changes: list[InstanceView] = []
    for role in open_:
        having = [view for view in views if view.role is role]
        # The instances with the most work of the role keep it.
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
    """Return each kind's arrangement: the first kinds prefill, the last decode, others do both."""
    free = {kind: sum(device_kind(view) == kind for view in views) for kind in order}

    def filled(number: int, kinds: Sequence[str]) -> dict[str, int]:
        """Return how many of ``number`` instances each kind provides, the first kinds first."""
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
    """Return how much work of ``role`` an instance has, for comparison within a role only."""
    if role is Role.PREFILL:
        return view.computable_prefill_tokens
    return view.report.kv_used_fraction if view.report is not None else view.inflight_requests
