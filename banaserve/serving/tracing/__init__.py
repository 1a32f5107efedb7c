"""Notes of all processes about a request, as events and as spans. In the server's process.

Entry: ``request_log.RequestLog``.
"""
