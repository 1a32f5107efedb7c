"""Timeouts by which instances are started, watched and given up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterTimeouts:
    """Timeouts of the cluster, in seconds.

    Attributes:
        start_s: For an engine that starts.
        stall_s: For a sign of life of an engine that does nothing for certain.
        spin_s: For a sign of life of any engine.
        retry_s: From giving an instance up to trying it again.
        unserved_s: Without instances for both legs, after which the server is not healthy.
    """

    start_s: float = 600.0
    stall_s: float = 60.0
    spin_s: float = 600.0
    retry_s: float = 180.0
    unserved_s: float = 120.0
