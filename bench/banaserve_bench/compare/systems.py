"""Systems that ``banaserve bench compare`` compares, as options of one server."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known


class ServerSystem(NamedTuple):
    """A system under comparison.

    Attributes:
        options: Options of ``banaserve serve``, in addition to those that all systems share.
        num_servers: Number of such servers; more than one run behind a balancer.
        policy: Routing policy of that balancer; empty without a balancer.
    """

    name: str
    options: tuple[str, ...]
    question: str
    num_servers: int = 1
    policy: str = ""

    @property
    def has_orchestrator(self) -> bool:
        return "--orchestrator on" in " ".join(self.options)

    def told(self) -> str:
        """Return question and options in a line."""
        behind = f"{self.num_servers} servers behind route --policy {self.policy}: "
        return f"{self.question} ({behind if self.policy else ''}{' '.join(self.options)})"


REFERENCE = ServerSystem("reference", ("--colocated", "1", "--no-kv-store"), "one vLLM engine")


def known_systems(num_instances: int) -> dict[str, ServerSystem]:
    """Return the named systems, each with ``num_instances`` engines, two or more.

    The ``colocated-*`` systems are unmodified vLLM engines, each with its own prefix cache; all
    systems use the same front door, which spares the baselines a server process for each engine.
    """
    prefill = num_instances // 2
    together = ("--colocated", str(num_instances))
    apart = ("--pd", f"{prefill}:{num_instances - prefill}")
    no_store, still = ("--no-kv-store",), ("--migration", "off", "--orchestrator", "off")

    def routed(policy: str) -> tuple[str, ...]:
        return ("--routing-policy", policy)

    systems = [
        ServerSystem(
            "colocated-round-robin",
            (*together, *no_store, *still, *routed("round_robin")),
            "vLLM engines behind round robin",
        ),
        ServerSystem(
            "colocated-least-requests",
            (*together, *no_store, *still, *routed("least_requests")),
            "vLLM engines behind least requests",
        ),
        ServerSystem(
            "colocated-prefix-affinity",
            ("--colocated", "1", *no_store, *still),
            "vLLM engines behind a balancer that follows prefixes, cache_aware of SGLang's router",
            num_instances,
            "cache_aware",
        ),
        ServerSystem(
            "static-pd",
            (*apart, *still, *routed("round_robin")),
            "prefill and decode apart, round robin, nothing moves",
        ),
        ServerSystem(
            "banaserve",
            (*apart, "--migration", "on", "--orchestrator", "on", *routed("load_aware")),
            "prefill and decode apart, load-aware, store, migration when it helps",
        ),
        ServerSystem(
            "banaserve-no-migration",
            (*apart, *still, *routed("load_aware")),
            "the same without migration",
        ),
        ServerSystem(
            "banaserve-colocated",
            (*together, *still, *routed("load_aware")),
            "engines that do both, load-aware, store",
        ),
        ServerSystem(
            "banaserve-no-store",
            (*together, *no_store, *still, *routed("load_aware")),
            "engines that do both, load-aware, no store",
        ),
    ]
    return {system.name: system for system in systems}


def chosen_systems(words: Sequence[str], num_instances: int) -> list[ServerSystem]:
    """Return the systems that ``words`` name: known ones, or ``NAME=OPTIONS`` of serve.

    Raises:
        UserError: An unknown name, a name twice, or a quote that does not end.
    """
    known = known_systems(num_instances)
    found: list[ServerSystem] = []
    for word in words or known:
        name, equals, options = word.partition("=")
        if equals:
            try:
                found.append(ServerSystem(name, tuple(shlex.split(options)), "as given"))
            except ValueError as error:
                raise UserError(f"--system {word}: {error}") from None
        else:
            check_known("system", name, known)
            found.append(known[name])
    names = [system.name for system in found]
    if len(set(names)) < len(names):
        raise UserError(f"each system once: {', '.join(names)}")
    return found
