"""Options of the elastic policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from banaserve.costs import profile as profiles
from banaserve.elastic import modules
from banaserve.elastic.forecast import ServiceLimits
from banaserve.errors import UserError
from banaserve.names import check_known
from banaserve.orchestrator.routing import registry as routings


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """Options of ``elastic``.

    Attributes:
        profile: Device and model of the forecast: a built-in profile's name, or its file. Empty is
            what the instances say of themselves: the shape of their model, and learnt step times.
        devices: ``own`` forecasts each instance by the profile of its device, where it has one;
            ``one`` takes all for what ``profile`` says.
        step_times: ``profile`` forecasts with the profile's; ``learnt`` with those that instances
            have learnt, and not before they have.
        dilation: Seconds on the wall of one modelled second; 1 where time is not stretched.
        ttft_s, tpot_s: Limits of a request that is served well; 0 is none, and with neither the
            forecast looks at latency.
        chunks: Tokens of a step to choose from, separated by commas.
        min_step_tokens, max_step_tokens: What the engines can do: sizes beyond these become these;
            0 is no limit.
        roles: ``any``, or ``fixed`` where they stay what they are and only step sizes change.
        modules: What may leave its instance: ``layers``, ``heads``, or both, separated by a comma.
            ``none`` is nothing: beside routing by predicted times it rarely pays, and where a
            forecast errs it costs.
        routing: Policy that routes in the forecast: the one that serves.
        first_plan_s: A load's first plan comes when it has lasted this long.
        settled_s: After this a load is known; it is planned for again when it changes.
        recheck_s: After this it is looked again whether modules that are away still bring anything
            under a known load; and, after longer and longer, whether a plan has come about.
        window_s: Requests of at most so long ago are forecast.
        horizon_s: So far a forecast looks.
        max_requests: That arrive in a forecast at most.
        screened_requests: Of those, the first, which every arrangement is forecast for.
        kept: Arrangements that are forecast for all of them, the best for the first ones.
        coarse: From so many arrangements on, roles are looked at in steps of one size first, and
            no more than half of the requests are screened.
        tried_moves: Moves of modules that are forecast for the first requests at most, those by
            which the cost model says that hosts could gain most.
        recent_s: Stretch that is compared with what came before it.
        least_change_fraction: A load that changes by less is the same.
        deviations: Of chance, by which a load must change.
        margin: Least gain of a forecast's mean worth, as a share of it, for which anything changes.
        certainty: Deviations of chance by which a gain must exceed nothing.
        slowdown_weight: By how many requests within their limits a gain is less, of as many that
            come, where an arrangement would work half as fast as the fastest. High: only what keeps
            up is chosen in an overload. Low: what serves some well and makes others wait.
    """

    profile: str = "opt-13b-a100"
    devices: str = "own"
    step_times: str = "profile"
    dilation: float = 1.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    chunks: str = "512,1024,2048"
    min_step_tokens: int = 0
    max_step_tokens: int = 0
    roles: str = "any"
    modules: str = "none"
    routing: str = "load_aware"
    first_plan_s: float = 4.0
    settled_s: float = 110.0
    recheck_s: float = 15.0
    window_s: float = 60.0
    horizon_s: float = 40.0
    max_requests: int = 3000
    screened_requests: int = 500
    kept: int = 7
    coarse: int = 40
    tried_moves: int = 8
    recent_s: float = 10.0
    least_change_fraction: float = 0.15
    deviations: float = 5.0
    margin: float = 0.1
    certainty: float = 1.5
    slowdown_weight: float = 3.0

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "min_step_tokens", "max_step_tokens", "slowdown_weight"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} is {getattr(self, name)}: give 0 or more")
        for name in (
            "first_plan_s",
            "settled_s",
            "recheck_s",
            "window_s",
            "max_requests",
            "recent_s",
            "dilation",
        ):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: give more than 0")
        if self.devices not in ("own", "one"):
            raise UserError(f"devices is {self.devices!r}: give own or one")
        if self.step_times not in ("profile", "learnt"):
            raise UserError(f"step_times is {self.step_times!r}: give profile or learnt")
        if self.kinds and not self.profile:
            raise UserError(
                f"modules is {self.modules!r}: what they bring is forecast by a profile: give "
                f"profile=NAME ({', '.join(profiles.names())}, or a .toml file)"
            )
        if self.roles not in ("any", "fixed"):
            raise UserError(f"roles is {self.roles!r}: give any or fixed")
        if self.modules != "none" and not set(self.kinds) <= set(modules.KINDS):
            raise UserError(f"modules is {self.modules!r}: give {', '.join(modules.KINDS)} or none")
        check_known("routing policy", self.routing, routings.names())
        if 0 < self.max_step_tokens < self.min_step_tokens:
            raise UserError(
                f"max_step_tokens is {self.max_step_tokens}: give at least min_step_tokens, "
                f"{self.min_step_tokens}"
            )
        sizes = self._sizes()
        if not sizes or min(sizes) < 1:
            raise UserError(f"chunks is {self.chunks!r}: give numbers of tokens, as 512,2048")

    @property
    def are_times_learnt(self) -> bool:
        """Whether forecasts take the step times that instances have learnt."""
        return not self.profile or self.step_times == "learnt"

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Sizes of steps to choose from, each once, that the engines can do."""
        return tuple(sorted({self.feasible(size) for size in self._sizes()}))

    def feasible(self, step_tokens: int) -> int:
        """The size of a step that the engines take where ``step_tokens`` is asked for."""
        most = self.max_step_tokens or step_tokens
        return max(self.min_step_tokens, min(step_tokens, most))

    def _sizes(self) -> set[int]:
        try:
            return {int(one) for one in self.chunks.split(",")}
        except ValueError:
            return set()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of modules that may leave."""
        if self.modules == "none":
            return ()
        return tuple(dict.fromkeys(one.strip() for one in self.modules.split(",")))

    @property
    def routing_options(self) -> dict[str, Any]:
        """What the policy that routes is given in the forecast, in the time of it."""
        if self.routing != "slo_aware":
            return {}
        limits = self.limits
        return {"ttft_s": limits.ttft_s or 0.0, "tpot_s": limits.tpot_s or 0.0}

    @property
    def limits(self) -> ServiceLimits:
        ttft_s, tpot_s = self.ttft_s / self.dilation, self.tpot_s / self.dilation
        return ServiceLimits(ttft_s or None, tpot_s or None)
