"""Role changes that are waited for."""

from __future__ import annotations

from banaserve.base.errors import UserError
from banaserve.contracts.control_api import RoleRequest
from banaserve.contracts.instances import RoleChange
from banaserve.frontdoor.admin_client import AdminClient


def changed(admin: AdminClient, ask: RoleRequest) -> RoleChange | None:
    """The change when it has ended; None where it is refused, as by the last of a role."""
    try:
        change = admin.roles.begin(ask)
    except UserError as refused:
        if "already" in str(refused) or "only one that serves" in str(refused):
            return None
        raise
    while change.is_open:
        change = admin.roles.show(change.id, wait_s=10.0)
    return change
