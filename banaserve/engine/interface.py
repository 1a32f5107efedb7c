"""What the floors above and below may ask of an instance, real or simulated."""

from __future__ import annotations

from typing import Protocol

from banaserve.types import InstanceId, InstanceView, Role


class InstanceClient(Protocol):
    """One serving engine, reached over whatever lies between."""

    @property
    def id(self) -> InstanceId: ...

    @property
    def role(self) -> Role: ...

    def view(self) -> InstanceView:
        """The last report with the caller's own in-flight counts on top; never blocks."""
        ...
