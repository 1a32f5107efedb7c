"""Connections of clients: the Unix socket, and slots of connections that were lost.

In the store's process. Entry: ``listener.StoreListener``.
"""
