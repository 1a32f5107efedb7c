"""Role switches and drains. In the server's process.

Entry: ``role_switch.Roles``.
"""
