"""HTTP protocol of the listening socket: limits, refusals, authentication before a body is read.

In the server's process. Entry: ``edge``.
"""
