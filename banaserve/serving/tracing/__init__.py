"""Notes of all processes about a request, and the parts of its time. In the server's process.

Entry: ``request_log.RequestLog``.
"""
