"""Check that a server without ``--otlp-traces-endpoint`` loads nothing that makes spans."""

from __future__ import annotations

import sys
import threading


def check() -> int:
    """Exit code: 0 where nothing of ours is loaded and nothing of OpenTelemetry runs."""
    import banaserve.mains.serve

    assert banaserve.mains.serve.serve
    if "banaserve.serving.tracing.otlp" in sys.modules:
        return 1
    return 2 if any(one.name.startswith("Otel") for one in threading.enumerate()) else 0
