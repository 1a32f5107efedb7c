"""Probes of engines; restart or replacement of an engine that has ended. In the server's process.

Entry: ``supervisor.Supervisor``.
"""
