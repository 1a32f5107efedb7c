"""Options of the server and of its orchestrator, declared once and checked.

In every process that takes them. Entry: ``serve_config.ServeConfig``.
"""
