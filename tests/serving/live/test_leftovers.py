"""What processes that are killed leave behind is removed while the server goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient
from observing import writer
from server_run import Run
from streams import back

pytestmark = pytest.mark.e2e
OPTIONS = ("--pd", "1:1", "--dtype", "float32", "--max-model-len", "2048")


def test_files_of_killed_engines_and_guests_do_not_pile_up(serve: Callable[..., Run]) -> None:
    server = serve(*OPTIONS)
    admin = AdminClient(*find_admin(server.run_dir))

    def upset() -> int:
        """A guest comes and goes, and an engine is killed; how many files there are then."""
        assert admin.run(MoveLayers("d0", "p0", (4, 8))).state == "done"
        assert admin.run(Return("d0")).state == "done"
        pid = writer(server.run_dir, "p0")
        os.kill(pid, signal.SIGKILL)
        back(server, "p0", pid)
        return sum(1 for _ in server.temp_dir.rglob("*"))

    first, *others = [upset() for _ in range(3)]
    assert max(others) <= first + 2
