"""Options of a server whose engines run on other machines."""

from __future__ import annotations

from dataclasses import dataclass, field

from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE
from banaserve.base.config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.net.addresses import host_and_port
from banaserve.nodes.credentials import MIN_KEY_BYTES


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of the nodes of a server.

    Attributes:
        addresses: ``HOST:PORT`` of each node's agent.
        ray: Address of the Ray cluster that places agents instead, or ``auto``; empty for none.
        key: Key that the nodes and the server share.
    """

    addresses: tuple[str, ...] = ()
    ray: str = ""
    key: str = field(default="", repr=False)

    @classmethod
    def of(cls, config: ServeConfig) -> NodeOptions:
        """Return the node options of ``banaserve serve``."""
        return cls(config.nodes, config.cluster, config.cluster_key)

    @property
    def are_used(self) -> bool:
        """Return whether engines run on other machines."""
        return bool(self.addresses or self.ray)

    def check(self) -> None:
        """Check the options.

        Raises:
            UserError: An address is invalid or given twice, addresses and Ray are combined, or the
                key is missing or too short.
        """
        for address in self.addresses:
            host_and_port("--node", address)
        if len(set(self.addresses)) < len(self.addresses):
            raise UserError("--node: a node is given twice")
        if self.addresses and self.ray:
            raise UserError("--node and --cluster exclude each other: Ray starts the nodes' agents")
        if self.addresses and len(self.key.encode()) < MIN_KEY_BYTES:
            raise UserError(
                f"nodes need a key of {MIN_KEY_BYTES} characters or more, the same as their "
                f"agents have: give --cluster-key-file or set {CLUSTER_KEY_VARIABLE}"
            )
