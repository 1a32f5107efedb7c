"""Rolling restarts, with other weights or options. In the server's process.

Entry: ``rolling.RollingRestarts.begin``.
"""
