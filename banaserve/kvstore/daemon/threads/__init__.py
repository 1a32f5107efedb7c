"""Access of other threads to the daemon, whose own thread alone changes the index.

In the store's process. Entry: ``calls.DaemonCalls``.
"""
