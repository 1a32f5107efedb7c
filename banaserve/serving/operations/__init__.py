"""Operations that take a while: role switches, drains, scalings, nodes, rolling restarts.

In the server's process. Entry: ``scaler.Scaler.begin`` is one of them.
"""
