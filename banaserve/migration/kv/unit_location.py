"""Place of a unit in a guest, as its host sees it."""

from __future__ import annotations

from banaserve.base.errors import GuestLostError, MigrationError
from banaserve.migration.kv.remote_kv import RemoteKv, StagedRemoteKv
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient


class UnitLocation:
    """Location of a unit: its place in one guest.

    Attributes:
        link: Connection to the guest.
        kv: The unit's KV in the guest.
        epoch: Epoch in which the unit was activated; None until then.
        weight_bytes: Bytes of weights that the guest has loaded for the unit.
        saves: True if the guest can save the unit's blocks to the store.
    """

    saves = False

    def __init__(self, unit_id: str, link: GuestClient, kv: RemoteKv, weight_bytes: int) -> None:
        self.unit_id = unit_id
        self.link = link
        self.kv = kv
        self.weight_bytes = weight_bytes
        self.epoch: int | None = None

    def activate(self, epoch: int) -> None:
        """Activate the unit: from now on it accepts messages and copies of ``epoch`` only."""
        self.link.ask(messages.Activate(self.unit_id, epoch), messages.StepsDone)
        self.kv.epoch = epoch
        self.epoch = epoch

    def leave(self) -> None:
        """Release the unit in the guest; a lost guest has nothing to release."""
        self.kv.close()
        try:
            self.link.ask(messages.ReleaseUnit(self.unit_id), messages.StepsDone)
        except GuestLostError:
            return
        except MigrationError as refused:
            self.link.give_up(str(refused))

    @property
    def has_landed(self) -> bool:
        """Return whether the guest has to be asked for each copy of the unit's KV."""
        return isinstance(self.kv, StagedRemoteKv)

    @property
    def working_epoch(self) -> int:
        assert self.epoch is not None
        return self.epoch
