"""Two stores that tests make peers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from peer_store import PeerStore


@pytest.fixture
def two(
    tmp_path: Path, stack: ExitStack, request: pytest.FixtureRequest
) -> tuple[PeerStore, PeerStore]:
    """Two stores that may be peers of each other; neither is started.

    A parameter is what starts them.
    """
    how = {"start": request.param} if hasattr(request, "param") else {}
    there, here = (PeerStore(tmp_path, stack, name, **how) for name in ("there", "here"))
    return there, here
