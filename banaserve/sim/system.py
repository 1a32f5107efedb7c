"""Systems that are compared: one implementation, several configurations."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from banaserve.base.config.orchestrator_config import ANY_NUMBER, ELASTIC_INTERVAL_S, SLO_AWARE
from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.base.types import Role
from banaserve.orchestrator.control.move_policies import registry as migrations
from banaserve.orchestrator.control.routing import registry as routings
from banaserve.orchestrator.control.turn import ControlLimits
from banaserve.sim.instances.batch import EngineLimits

KINDS = ("banaserve", "colocated", "elastic", "static")
HANDOVERS = ("pull", "store")
CACHES = ("global", "local", "none")
_HISTORY_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Configuration of a simulated cluster.

    Attributes:
        kind: Kind of the system, which names the row in results and selects the defaults; see
            ``preset``.
        handover: ``store`` frees the KV of a prefill instance when its step ends, and the step that
            the request joins fetches it; ``pull`` keeps it until the decode instance has fetched
            it, beside its steps (DistServe).
        cache: Place where prefixes are found: ``global`` in one store, ``local`` in each engine,
            ``none`` nowhere.
        store_tokens: Capacity of the store, in tokens.
        control_s: Period of the control loop, in seconds.
        history_s: Time for which requests are kept for the policy to look at, in seconds; 0 keeps
            none.
        control_limits: Limits of the steps that the policy may begin, and the time over which
            reports are smoothed.
        cell_size: Number of instances under one router and one policy; 0 is all of them. Requests
            go to the cell with the fewest requests.
        overlap_fraction: Fraction of the moved work that host and guest really overlap; None for
            the overlap of steps in micro-batches, cut as engines cut them by default.
        attention_fraction: Share of a layer's time that moved heads take along; None for that of
            the current steps.
        limits: Limits of each engine, whatever its role.
        rebalances: True if streams leave overloaded instances, as with ``serve --rebalance``; needs
            a hand-over by the store.
        devices: Profiles of the instances whose device differs from that of the cluster, by
            instance id.
    """

    kind: str
    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    routing: str = "load_aware"
    routing_options: dict[str, Any] = field(default_factory=dict)
    migration: str = "still"
    migration_options: dict[str, Any] = field(default_factory=dict)
    handover: str = "store"
    cache: str = "none"
    store_tokens: int = 4_000_000
    control_s: float = 2.0
    history_s: float = 0.0
    control_limits: ControlLimits = field(default_factory=ControlLimits)
    cell_size: int = 0
    overlap_fraction: float | None = None
    attention_fraction: float | None = 0.3
    limits: EngineLimits = field(default_factory=EngineLimits)
    rebalances: bool = False
    devices: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_known("kind of system", self.kind, KINDS)
        check_known("handover", self.handover, HANDOVERS)
        check_known("cache", self.cache, CACHES)
        for name in ("prefill", "decode", "colocated", "cell_size", "store_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UserError(f"{name} is {value!r}: give a whole number, 0 or more")
        if not self.roles():
            raise UserError("a system needs instances: give prefill and decode, or colocated")
        if self.control_s <= 0:
            raise UserError(f"control_s is {self.control_s}: give more than 0")
        if self.rebalances and self.handover != "store":
            raise UserError('rebalances needs a store: give handover = "store"')
        for name in ("overlap_fraction", "attention_fraction"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"{name} is {value}: give a share in [0, 1]")
        # Built once here so that a wrong option fails before anything runs.
        routings.make(self.routing, **self.routing_options)
        migrations.make(self.migration, **self.migration_options)

    def roles(self) -> list[tuple[str, Role]]:
        """Return the names and roles of the instances, in an order that mixes roles in cells."""
        named = [
            *((n / max(1, self.prefill), f"p{n}", Role.PREFILL) for n in range(self.prefill)),
            *((n / max(1, self.decode), f"d{n}", Role.DECODE) for n in range(self.decode)),
            *((n / max(1, self.colocated), f"c{n}", Role.COLOCATED) for n in range(self.colocated)),
        ]
        return [(name, role) for _, name, role in sorted(named, key=lambda entry: entry[:2])]


def preset(kind: str, **changes: Any) -> System:
    """Return a system of ``kind`` with its default settings, some of them changed.

    ``colocated`` is vLLM with its own prefix cache; ``static`` hands KV over by pulling and never
    moves anything (DistServe); ``banaserve`` has the global store and the repaired policy;
    ``elastic`` has the store, too, and ``following`` makes it behave as ``serve --elastic``.

    Raises:
        UserError: A kind or key is unknown, or a value is out of range.
    """
    check_known("kind of system", kind, KINDS)
    settings: dict[str, dict[str, Any]] = {
        "colocated": {"cache": "local"},
        "static": {"handover": "pull"},
        "banaserve": {"cache": "global", "migration": "repaired"},
        "elastic": {"cache": "global"},
    }
    known = [name for name in System.__slots__ if name != "kind"]
    for key in changes:
        check_known("key of a system", key, known)
    merged = {**settings[kind], **changes}
    sections: tuple[tuple[str, type[Any]], ...] = (
        ("limits", EngineLimits),
        ("control_limits", ControlLimits),
    )
    for name, section in sections:
        if isinstance(given := merged.get(name), dict):
            for key in given:
                check_known(f"key of {name}", key, [field.name for field in fields(section)])
            merged[name] = section(**given)
    return System(kind=kind, **merged)


def following(
    system: System, profile: str, ttft_s: float = 0.0, tpot_s: float = 0.0, **options: Any
) -> System:
    """Return ``system`` with roles and step sizes that follow its load, as ``serve --elastic``.

    Args:
        profile: Name or file of the device and model that the policy forecasts with.
        ttft_s, tpot_s: Latency limits of good service for policy and routing, in seconds; 0 for
            none.
        options: Further options of the policy, see ``orchestrator/planner/options.py``.
    """
    limits_s = {"ttft_s": ttft_s, "tpot_s": tpot_s}
    return replace(
        system,
        routing=SLO_AWARE,
        routing_options=limits_s,
        migration="elastic",
        migration_options={"profile": profile, "routing": SLO_AWARE, **limits_s, **options},
        history_s=_HISTORY_S,
        control_s=ELASTIC_INTERVAL_S,
        control_limits=replace(system.control_limits, concurrent=ANY_NUMBER, per_minute=ANY_NUMBER),
        attention_fraction=None,
        rebalances=True,
    )
