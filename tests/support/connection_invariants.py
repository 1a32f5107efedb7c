"""What must hold in a table of client connections."""

from __future__ import annotations

from banaserve.base.net.connections import ConnectionTable


def check_connections(table: ConnectionTable) -> None:
    """Assert that the table's parts agree, and that it holds no more than it may."""
    assert table._anonymous.keys() <= table._all.keys()
    of_addresses = [peer for one in table._by_address.values() for peer in one]
    assert sorted(map(repr, of_addresses)) == sorted(map(repr, table._anonymous))
    assert all(table._by_address.values())
    assert len(table._all) <= table.max_connections
