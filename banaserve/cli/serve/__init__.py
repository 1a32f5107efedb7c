"""``banaserve serve``: its command line, its help, and the launch of a server.

Entry: ``command.serve_command``.
"""
