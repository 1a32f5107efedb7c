"""Connections of clients and of peers, and slots of connections that were lost.

In the store's process. Entries: ``listener.StoreListener`` for clients,
``peer_server.PeerServer`` for stores of other machines.
"""
