"""Routing policy under the name that it is registered by, so that its mistakes name it."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.errors import NoInstanceError, PolicyError, UserError
from banaserve.orchestrator.routing.interface import RoutingPolicy
from banaserve.registry import one_line
from banaserve.types import ClusterView, RequestView, Route


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A routing policy that answers with a route over instances that there are, or says why not.

    Attributes:
        name: In the registry.
        package: Name and version of the package that it is from; empty for banaserve's own.
    """

    policy: RoutingPolicy
    name: str
    package: str = ""

    @property
    def label(self) -> str:
        """The name, with the package of one that is not banaserve's own."""
        return f"{self.name} ({self.package})" if self.package else self.name

    @property
    def reads_resident_tokens(self) -> bool:
        """Whether it wants to know where KV of a prompt lies; looking costs some microseconds."""
        return bool(getattr(self.policy, "reads_resident_tokens", False))

    def __str__(self) -> str:
        """Returns what messages call it."""
        return f"routing policy {self.name}" + (f" of {self.package}" if self.package else "")

    def route(self, request: RequestView, cluster: ClusterView) -> Route:
        """Returns the choice of the policy.

        Raises:
            NoInstanceError, UserError: As the policy raises them.
            PolicyError: The policy raises anything else, or its answer is no route.
        """
        try:
            route = self.policy.route(request, cluster)
        except (NoInstanceError, UserError):
            raise
        # It may be another package's code: sys.exit in it would end the server.
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
