"""Routing policy with its registered name, so that messages about its errors name it."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.base.errors import NoInstanceError, PolicyError, UserError, one_line
from banaserve.base.types import ClusterView, RequestView, Route
from banaserve.orchestrator.control.routing.interface import RoutingPolicy


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A routing policy whose answers are checked: a route over existing instances, or an error.

    Attributes:
        name: Name of the policy in the registry.
        package: Name and version of the policy's package; empty for banaserve's own.
    """

    policy: RoutingPolicy
    name: str
    package: str = ""

    @property
    def label(self) -> str:
        """Name of the policy, with its package if that is not banaserve."""
        return f"{self.name} ({self.package})" if self.package else self.name

    @property
    def reads_resident_tokens(self) -> bool:
        """True if the policy uses ``resident_tokens``, whose lookup takes some microseconds."""
        return bool(getattr(self.policy, "reads_resident_tokens", False))

    def __str__(self) -> str:
        """Return the name of the policy in messages."""
        return f"routing policy {self.name}" + (f" of {self.package}" if self.package else "")

    def route(self, request: RequestView, cluster: ClusterView) -> Route:
        """Return the choice of the policy.

        Raises:
            NoInstanceError, UserError: The policy has raised it.
            PolicyError: The policy has raised another exception, or its answer is not a valid
                route.
        """
        try:
            route = self.policy.route(request, cluster)
        except (NoInstanceError, UserError):
            raise
        # The code may be another package's: sys.exit in it would end the server.
        except (Exception, SystemExit) as error:
            raise PolicyError(f"{self}: {one_line(error)}") from error
        if not isinstance(route, Route):
            raise PolicyError(f"{self}: route returned a {type(route).__name__}, which is no Route")
        for chosen in (route.decode,) if route.prefill is None else (route.prefill, route.decode):
            if not isinstance(chosen, str):
                what = type(chosen).__name__
                raise PolicyError(f"{self}: its Route has a {what} where an instance's id belongs")
            if chosen not in cluster.instances:
                raise PolicyError(f"{self}: there is no instance {chosen!r}")
        return route
