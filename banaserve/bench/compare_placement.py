"""Between two cells of ``bench compare``: what the orchestrator has moved goes back."""

from __future__ import annotations

import time

from banaserve.api.admin_client import AdminClient
from banaserve.controller.words import RoleAsk
from banaserve.engine.vllm.migration.api import Return
from banaserve.errors import UserError

_TIMEOUT_S = 120.0
_AGAIN_S = 0.5


class StartPlacement:
    """Roles and modules of a server as they were when it had started.

    A cell that begins with what the one before has left behind measures that one too, and is no
    cell of the simulator's.

    Args:
        admin: Of a server that nobody has used yet.

    Raises:
        UserError: It cannot be reached.
    """

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self._roles = {one.id: one.role for one in admin.placement().instances}

    def restore(self) -> None:
        """Return when everything is there again; the orchestrator rests meanwhile. Blocking.

        Raises:
            UserError: It does not come back in two minutes.
        """
        self._admin.set_paused(True)
        until_s = time.monotonic() + _TIMEOUT_S
        try:
            while problem := self._step():
                if time.monotonic() > until_s:
                    raise UserError(f"the start's placement does not come back: {problem}")
                time.sleep(_AGAIN_S)
        finally:
            self._admin.set_paused(False)

    def _step(self) -> str:
        """Bring one thing home; what was still in the way, empty where nothing was."""
        placement = self._admin.placement()
        if any(migration.is_open for migration in placement.migrations):
            return "a move is under way"
        try:
            for one in placement.instances:
                if one.units:
                    self._admin.run(Return(one.id))
                    return f"{one.id} has modules away"
            for one in placement.instances:
                if one.role != self._roles.get(one.id, one.role):
                    change = self._admin.begin_role(RoleAsk(one.id, self._roles[one.id]))
                    while change.is_open:
                        change = self._admin.show_role(change.id, wait_s=_AGAIN_S)
                    return f"{one.id} is {one.role}"
        except UserError as error:
            return str(error)
        return ""
