"""Admin API: what moves between instances and who decides it, behind a key of its own.

In the server's process. Entry: ``app.admin_app``.
"""
