"""Options of the elastic policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.routing import registry as routings
from banaserve.orchestrator.planner.candidates import modules
from banaserve.orchestrator.planner.forecasting.forecast import ServiceLimits


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """Options of ``elastic``.

    Attributes:
        profile: Device and model of the forecast: a built-in profile's name, or its file. If empty,
            instances report the shape of their model and their learnt step times.
        devices: ``own`` forecasts each instance by the profile of its device, if it has one;
            ``one`` uses ``profile`` for all instances.
        step_times: ``profile`` forecasts with the step times of the profile; ``learnt`` with those
            that instances have learnt, and only once they have learnt them.
        dilation: Wall seconds of one modelled second; 1 if time is not dilated.
        ttft_s, tpot_s: SLO limits of a request, in seconds; 0 is no limit. With neither limit,
            forecasts are judged by latency.
        chunks: Step sizes to choose from, in tokens, separated by commas.
        min_step_tokens, max_step_tokens: Range of step sizes of the engines, in tokens: other sizes
            are clipped to it; 0 is no limit.
        roles: ``any``, or ``fixed`` to keep all roles and change step sizes only.
        modules: Kinds of modules that may leave their instance: ``layers``, ``heads``, or both,
            separated by a comma; or ``none``: in addition to routing by predicted times, moving
            modules rarely pays, and it costs if a forecast errs.
        routing: Routing policy of the forecast: the one that serves.
        first_plan_s: Duration of a load after which its first plan is made, in seconds.
        settled_s: Duration of a load after which it is known, in seconds; from then on there is a
            new plan only when the load changes.
        recheck_s: Time between checks whether modules away still bring a gain under a known load,
            in seconds. A plan is checked for its completion after growing intervals.
        window_s: Maximum age of the requests that are forecast, in seconds.
        horizon_s: Duration of arrivals in a forecast, in seconds.
        max_requests: Maximum number of requests that arrive in a forecast.
        screened_requests: Number of these, from the first on, with which every arrangement is
            screened.
        kept: Number of arrangements, the best of the screening, that are forecast for all requests.
        coarse: Number of arrangements from which on roles are first screened with one step size
            only, and with half of the arriving requests at most.
        tried_moves: Maximum number of candidates with moves that are screened: those with the
            largest possible gain of the hosts by the cost model.
        recent_s: Duration of the recent part of a load, compared with the part before, in seconds.
        least_change_fraction: Relative change up to which a load counts as unchanged.
        deviations: Number of standard deviations of chance beyond which a load counts as changed.
        margin: Least gain for which anything changes, as a share of a forecast's mean worth.
        certainty: Number of standard deviations of chance by which a gain must exceed 0.
        slowdown_weight: Worth subtracted from the mean worth of a request for an arrangement that
            would work half as fast as the fastest, where 1 is a request within its limits. High: in
            an overload, only an arrangement that keeps up is chosen. Low: also one that serves some
            requests well and makes others wait.
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
            "horizon_s",
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
        """True if forecasts use the step times that instances have learnt."""
        return not self.profile or self.step_times == "learnt"

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Distinct step sizes to choose from, clipped to what the engines support, ascending."""
        return tuple(sorted({self.feasible(size) for size in self._sizes()}))

    def feasible(self, step_tokens: int) -> int:
        """Return the step size that the engines use if ``step_tokens`` is requested."""
        most = self.max_step_tokens or step_tokens
        return max(self.min_step_tokens, min(step_tokens, most))

    def _sizes(self) -> set[int]:
        try:
            return {int(one) for one in self.chunks.split(",")}
        except ValueError:
            return set()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of modules that may leave their instance."""
        if self.modules == "none":
            return ()
        return tuple(dict.fromkeys(one.strip() for one in self.modules.split(",")))

    @property
    def routing_options(self) -> dict[str, Any]:
        """Options of the routing policy in the forecast, in the time of the forecast."""
        if self.routing != "slo_aware":
            return {}
        limits = self.limits
        return {"ttft_s": limits.ttft_s or 0.0, "tpot_s": limits.tpot_s or 0.0}

    @property
    def limits(self) -> ServiceLimits:
        ttft_s, tpot_s = self.ttft_s / self.dilation, self.tpot_s / self.dilation
        return ServiceLimits(ttft_s or None, tpot_s or None)
