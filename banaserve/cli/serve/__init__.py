"""``banaserve serve``: its command line, its help, and the launch of a server.

In the process that becomes the server's. Entry: ``command.serve_command``.
"""
