"""Messages between two processes over Unix sockets and TCP: connections, frames, authentication.

In workers, guests and stores. Entry: ``connect.connect``.
"""
