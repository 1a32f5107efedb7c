"""Timeouts for starting, watching and giving up instances."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterTimeouts:
    """Timeouts of the cluster, in seconds.

    Attributes:
        start_s: Maximum time for an engine to start.
        stall_s: Maximum silence of an engine that certainly does no work.
        spin_s: Maximum silence of any engine.
        retry_s: Time from giving up an instance to retrying it.
        unserved_s: Time without instances for both legs after which the server is unhealthy.
    """

    start_s: float = 600.0
    stall_s: float = 60.0
    spin_s: float = 600.0
    retry_s: float = 180.0
    unserved_s: float = 120.0
