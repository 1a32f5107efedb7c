"""Units that can move: ranges of layers, groups of heads, experts, older blocks.

In workers and guests. Entry: ``registry``; a unit has two sides, ``host_unit`` and ``guest_unit``.
The server's process plans moves with the units' values, ``base.MigrationUnit``.
"""
