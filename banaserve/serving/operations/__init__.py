"""Operations that take a while: role switches, drains, scalings, nodes, rolling restarts.

In the server's process. Entry: ``operation.Operations``, the base of all of them.
"""
