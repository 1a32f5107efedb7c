"""Start and end of the front door: its listening socket, take-over by another server, closing.

In the server's process. Entry: ``listening_socket.bind``.
"""
